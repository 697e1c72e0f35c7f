"""Load exported folders in Hugging Face's transformers.

``import spider.hf`` registers the classes, and then ``AutoModelForCausalLM.from_pretrained(folder)`` loads an
exported folder. With ``trust_remote_code=True`` the copy of `remote` in the folder does the same.

    remote         the code in every exported folder (`spider.publish.transformers_files`)
    configuration  ``config.json``
    modeling       the model of any family, and the state of generation for each row
    tokenization   the vocabulary, with the interface of a tokenizer of transformers
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spider.hf.configuration import SpiderHFConfig
from spider.hf.modeling import SpiderForCausalLM
from spider.hf.tokenization import SpiderTokenizer

AutoConfig.register(SpiderHFConfig.model_type, SpiderHFConfig, exist_ok=True)
AutoModelForCausalLM.register(SpiderHFConfig, SpiderForCausalLM, exist_ok=True)
AutoTokenizer.register(SpiderHFConfig, SpiderTokenizer, exist_ok=True)
