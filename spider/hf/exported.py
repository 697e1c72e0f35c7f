"""What an exported folder holds for transformers, beside the weights.

    config.json              some keys of its own (`keys`)
    generation_config.json   what ends a text, and which ids are never drawn
    tokenizer_config.json    which class reads its tokenizer, and what ids are special
    spider_hf.py             the code that ``trust_remote_code`` runs: takes our classes from the package

All of it follows from the model and its tokenizer, so an export of an export has the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spider.tokens import BYTES
from spider.tokens.turns import TURN

#: What a ``config.json`` calls all of our models, whatever their family.
MODEL_TYPE = "spider"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
REMOTE = "spider_hf.py"
AUTO_MAP = {"AutoConfig": "spider_hf.SpiderHFConfig", "AutoModelForCausalLM": "spider_hf.SpiderForCausalLM"}
TOKENIZER_MAP = {"AutoTokenizer": ["spider_hf.SpiderTokenizer", None]}

#: The same in every alphabet.
_IDS = {"bos_token_id": BYTES.bos, "eos_token_id": BYTES.eos, "pad_token_id": BYTES.pad}


def keys(vocab_size: int | None) -> dict[str, Any]:
    """Return the keys of ``config.json`` that transformers reads; ``vocab_size`` is None for bytes."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["SpiderForCausalLM"],
        "auto_map": AUTO_MAP,
        "vocab_size": vocab_size or BYTES.size,
        **_IDS,
        "dtype": "float32",
    }


def written(tokenizer: bytes | None, window: int | None, conversations: str | None) -> dict[str, bytes]:
    """The files beside it by name; ``tokenizer`` is the model's ``tokenizer.json``, if it has one."""
    plain = {
        "tokenizer_class": "SpiderTokenizer",
        "auto_map": TOKENIZER_MAP,
        "learned": None if tokenizer is None else json.loads(tokenizer)["digest"],
        "conversations": conversations,
        **special_tokens(),
        # transformers would look for these in tokenizer.json, which is of another format.
        "added_tokens_decoder": {str(i): _added(name) for i, name in named().items()},
        **({} if window is None else {"model_max_length": window}),
    }
    return {GENERATION: _json(generation(conversations)), TOKENIZER_CONFIG: _json(plain), REMOTE: remote()}


def generation(conversations: str | None) -> dict[str, Any]:
    """As `spider.evaluation.generate`: what stands for text can be drawn, and what ends one; of a model that
    was trained on conversations a turn as well."""
    ends = {BYTES.eos} | ({TURN} if conversations else set())
    never = {*BYTES.specials.values()} - ends
    return {**_IDS, "eos_token_id": sorted(ends), "suppress_tokens": sorted(never)}


def _json(plain: dict[str, Any]) -> bytes:
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def remote() -> bytes:
    """What `REMOTE` holds."""
    return Path(__file__).with_name("remote.py").read_bytes()


def named() -> dict[int, str]:
    """Special ids, the same in every alphabet, as people read them; no id of text is shown so."""
    return {i: f"⟨{name}⟩" for name, i in BYTES.specials.items()}


def special_tokens() -> dict[str, Any]:
    """The same, as transformers has them."""
    shown = named()
    ours = {"bos_token": shown.pop(BYTES.bos), "eos_token": shown.pop(BYTES.eos)}
    return {**ours, "pad_token": shown.pop(BYTES.pad), "extra_special_tokens": list(shown.values())}


def _added(name: str) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": name, **plain, "special": True}
