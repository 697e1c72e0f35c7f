"""Exported folders in Hugging Face's transformers.

``import spider.hf`` registers the classes, and then ``AutoModelForCausalLM.from_pretrained(folder)`` reads an
exported folder. With ``trust_remote_code=True`` the folder's own file `remote` does the same.

    remote         the code that lies in every exported folder (`spider.checkpoints.transformers_files`)
    configuration  ``config.json``
    modeling       the model of any family
    reading        what generation keeps of each row: a `spider.model.interface.Reader`
    tokenization   `spider.tokens.Tokens` behind the interface of a tokenizer
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spider.hf.configuration import SpiderHFConfig
from spider.hf.modeling import SpiderForCausalLM
from spider.hf.tokenization import SpiderTokenizer

AutoConfig.register(SpiderHFConfig.model_type, SpiderHFConfig, exist_ok=True)
AutoModelForCausalLM.register(SpiderHFConfig, SpiderForCausalLM, exist_ok=True)
AutoTokenizer.register(SpiderHFConfig, SpiderTokenizer, exist_ok=True)
