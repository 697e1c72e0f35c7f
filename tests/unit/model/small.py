"""The configuration of a very small Spider with every part on."""

from __future__ import annotations

from typing import Any

from spider.config import ModelConfig

SMALL: dict[str, Any] = {
    "preset": "test",
    "hidden": 32,
    "prelude_layers": 1,
    "coda_layers": 1,
    "ffn_hidden": 48,
    "attention": {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16},
    "boundary": {"hidden": 16},
    "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 16},
    "engram": {"layers": [1], "orders": [2, 3], "heads": 2, "head_dim": 8, "table_size": 61},
    "recurrence": {"layers": 2, "loops": 2, "lora_rank": 4, "checkpointing": False},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def small_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**merged(SMALL, changes))
