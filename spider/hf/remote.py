# Transformers runs this file with trust_remote_code=True. Every exported folder holds a copy. It only imports
# the classes from the installed package.
try:
    from spider.hf.configuration import SpiderHFConfig
    from spider.hf.modeling import SpiderForCausalLM
    from spider.hf.tokenization import SpiderTokenizer
except ImportError as error:
    raise ImportError(
        f"this model needs Spider with its extra `hf`, which is not installed here ({error}): run "
        "`pip install '.[hf]'` in its repository (the package index has another package named spider)"
    ) from error

__all__ = ["SpiderForCausalLM", "SpiderHFConfig", "SpiderTokenizer"]
