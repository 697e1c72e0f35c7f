"""The files of an exported folder that transformers reads, apart from the weights.

    config.json              the keys for transformers (`config_keys`), among others
    generation_config.json   the ids that end a text, and the ids that are never sampled
    tokenizer_config.json    the class that reads the tokenizer, and the special ids
    spider_hf.py             the code that ``trust_remote_code`` runs: it imports the classes of `spider.hf`

They are functions of the model and its tokenizer, so an export of an export has the same bytes. This module
does not import transformers, because only the extra ``hf`` installs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spider.tokens import BYTES
from spider.tokens.turns import TURN

#: The model type in ``config.json``, the same for all families.
MODEL_TYPE = "spider"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
REMOTE = "spider_hf.py"
AUTO_MAP = {"AutoConfig": "spider_hf.SpiderHFConfig", "AutoModelForCausalLM": "spider_hf.SpiderForCausalLM"}
TOKENIZER_MAP = {"AutoTokenizer": ["spider_hf.SpiderTokenizer", None]}

#: What all special tokens have in common.
_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
#: Ids that are the same in every vocabulary.
_IDS = {"bos_token_id": BYTES.bos, "eos_token_id": BYTES.eos, "pad_token_id": BYTES.pad}


def config_keys(vocab_size: int | None) -> dict[str, Any]:
    """Return the keys of ``config.json`` that transformers reads; ``vocab_size`` is None for bytes."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["SpiderForCausalLM"],
        "auto_map": AUTO_MAP,
        "vocab_size": vocab_size or BYTES.size,
        **_IDS,
        "dtype": "float32",
    }


def files_beside(tokenizer: bytes | None, window: int | None, conversations: str | None) -> dict[str, bytes]:
    """Return the other files by name; ``tokenizer`` is the model's ``tokenizer.json``, if it has one."""
    plain = {
        "tokenizer_class": "SpiderTokenizer",
        "auto_map": TOKENIZER_MAP,
        "learned": None if tokenizer is None else json.loads(tokenizer)["digest"],
        "conversations": conversations,
        **special_tokens(),
        # transformers expects these in tokenizer.json, whose format differs here.
        "added_tokens_decoder": {str(i): {"content": name} | _ADDED for i, name in named().items()},
        **({} if window is None else {"model_max_length": window}),
    }
    return {GENERATION: _json(generation(conversations)), TOKENIZER_CONFIG: _json(plain), REMOTE: remote()}


def generation(conversations: str | None) -> dict[str, Any]:
    """Return ``generation_config.json``, which samples as `spider.evaluation.generate` does.

    A model can generate ids of text and the end of a document. A model that was trained on conversations can
    also generate the end of a turn, but no call of the calculator, because transformers computes none.
    """
    ends = {BYTES.eos} | ({TURN} if conversations else set())
    never = {*BYTES.specials.values()} - ends
    return {**_IDS, "eos_token_id": sorted(ends), "suppress_tokens": sorted(never)}


def _json(plain: dict[str, Any]) -> bytes:
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def remote() -> bytes:
    """Return the content of `REMOTE`."""
    return (Path(__file__).parents[1] / "hf" / "remote.py").read_bytes()


def named() -> dict[int, str]:
    """Return the displayed names of the special ids, which are the same in every vocabulary."""
    return {i: f"⟨{name}⟩" for name, i in BYTES.specials.items()}


def special_tokens() -> dict[str, Any]:
    """Return the special tokens under the names that transformers has for them."""
    shown = named()
    ours = {"bos_token": shown.pop(BYTES.bos), "eos_token": shown.pop(BYTES.eos)}
    return {**ours, "pad_token": shown.pop(BYTES.pad), "extra_special_tokens": list(shown.values())}
