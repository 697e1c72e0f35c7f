"""Estimate the size of a run's compressed model before it is trained, by the entropy of Gaussian weights.

With steps of s standard deviations, the integer k has the probability of [(k - 1/2) s, (k + 1/2) s]; the
largest integers have that of the whole tail. Trained matrices come within a few percent of this. Embeddings
differ more, because their rows have different lengths. The size of the code is measured.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spider.checkpoints.compress import code
from spider.checkpoints.compress.gptq import largest
from spider.checkpoints.compress.parts import Part, split
from spider.checkpoints.compress.pipeline import MOST_CLIP, first_clip
from spider.config.run import CompressConfig
from spider.model.interface import Model
from spider.tokens import BYTES

#: Packed bytes of a tokenizer without merges, of a merge, and of a tensor in the header with its tables.
_TOKENIZER_BYTES, _MERGE_BYTES, _TENSOR_BYTES = 340, 3, 45
#: Bytes of the code that a family needs, measured once per process; its configurations hardly differ in it.
_CODE_BYTES: dict[str, int] = {}


def gaussian_bits(clip: float, bits: int) -> float:
    """Return the entropy of a Gaussian weight, quantized with a clipping range of ``clip`` deviations."""
    step = clip / largest(bits)
    edges = np.array([math.erf((k + 0.5) * step / math.sqrt(2)) for k in range(largest(bits))])
    share_K = np.diff(edges, prepend=0.0, append=1.0)  # of 0, and of both signs of each other integer
    share_K = np.concatenate([share_K[:1], share_K[1:] / 2, share_K[1:] / 2])
    share_K = share_K[share_K > 0]
    return float(-(share_K * np.log2(share_K)).sum())


def predict(model: Model, config: CompressConfig) -> dict[str, Any]:
    """Return the estimated bytes of the file's sections and its code, and the clipping range.

    The range is the configured one, or the one that fits the cap. It is None if none fits, and then the bytes
    are those of the coarsest step. ``model`` may be on the meta device.
    """
    parts, exact = split(model, config)
    vocab_size = model.config.vocab_size
    fixed = {
        "tables": sum(_bytes(part, part.clip) for part in parts if part.clip is not None),
        "steps": sum(part.nearest(MOST_CLIP).step_EO1.nbytes for part in parts),
        "exact": sum(t.numel() * t.itemsize for t in exact.values()),
        "tokenizer": 0 if vocab_size is None else _TOKENIZER_BYTES + _MERGE_BYTES * (vocab_size - BYTES.size),
        "rest": _TENSOR_BYTES * (len(parts) + len(exact)),
        "code": _code(model),
    }
    matrices = [part for part in parts if part.clip is None]

    def total(clip: float) -> float:
        return sum(fixed.values()) + sum(_bytes(part, clip) for part in matrices)

    try:
        clip = first_clip(config.cap, total) if config.clip is None else config.clip
    except ValueError:
        clip = None
    sizes = {"matrices": sum(_bytes(part, clip or MOST_CLIP) for part in matrices), **fixed}
    sizes = {name: round(size) for name, size in sizes.items()}
    return {"bytes": sizes, "total_bytes": sum(sizes.values()), "cap": config.cap, "clip": clip}


def _bytes(part: Part, clip: float) -> float:
    return part.w_EOI.numel() * gaussian_bits(clip, part.bits) / 8


def _code(model: Model) -> int:
    family = model.config.family
    if family not in _CODE_BYTES:
        _CODE_BYTES[family] = code.size(code.needed_by(model.config.model_dump_json()))
    return _CODE_BYTES[family]
