# What transformers runs with trust_remote_code=True. A copy of this lies in every exported folder; all it
# does is to take the classes from the installed package.
try:
    from spider.hf.configuration import SpiderHFConfig
    from spider.hf.modeling import SpiderForCausalLM
    from spider.hf.tokenization import SpiderTokenizer
except ImportError as error:
    raise ImportError(
        f"this model is read by Spider with its extra `hf`, which is not installed here ({error}): run "
        "`pip install '.[hf]'` in its repository (a package named spider on an index is another one)"
    ) from error

__all__ = ["SpiderForCausalLM", "SpiderHFConfig", "SpiderTokenizer"]
