"""Our classes in transformers' registry. Importing this registers the configuration; model and tokenizer,
which need all of torch, as the first configuration is made."""

from __future__ import annotations

from functools import cache

from transformers.models.auto.configuration_auto import AutoConfig

from spider.hf.configuration import SpiderHFConfig


@cache
def _rest() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spider.hf.modeling import SpiderForCausalLM
    from spider.hf.tokenization import SpiderTokenizer

    AutoModelForCausalLM.register(SpiderHFConfig, SpiderForCausalLM, exist_ok=True)
    AutoTokenizer.register(SpiderHFConfig, SpiderTokenizer, exist_ok=True)


AutoConfig.register(SpiderHFConfig.model_type, SpiderHFConfig, exist_ok=True)
SpiderHFConfig.made = staticmethod(_rest)
