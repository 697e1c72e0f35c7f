"""How large a run's compressed model will be, before it is trained: by the entropy of Gaussian weights.

An integer k of a weight with a step of s deviations has the probability of [(k - 1/2) s, (k + 1/2) s], or at
an end of the alphabet of all beyond. Trained matrices come to within some percent of that; tables, whose rows
are of several lengths, to less. What the code takes is measured, as it is of a file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spider.compress import code
from spider.compress.fit import MOST, first_clip
from spider.compress.gptq import SHORT, most
from spider.compress.parts import Part, split
from spider.config.run import CompressConfig
from spider.model.interface import Model, model_tensors
from spider.tokens import BYTES

#: Bytes that a tokenizer takes, packed, and a merge of it; and a tensor in the header, its table and classes.
_TOKENIZER, _MERGE, _TENSOR = 340, 3, 45
_CODE: dict[str, int] = {}


def gaussian_bits(clip: float, bits: int) -> float:
    """The entropy of a weight whose alphabet reaches ``clip`` deviations."""
    step = clip / most(bits)
    edges = np.array([math.erf((k + 0.5) * step / math.sqrt(2)) for k in range(most(bits))])
    share_K = np.diff(edges, prepend=0.0, append=1.0)  # of 0, and of both signs of each other
    share_K = np.concatenate([share_K[:1], share_K[1:] / 2, share_K[1:] / 2])
    share_K = share_K[share_K > 0]
    return float(-(share_K * np.log2(share_K)).sum())


def predict(model: Model, asked: CompressConfig) -> dict[str, Any]:
    """Bytes of the file and its code, by part, at the clip asked for or the one that fills the cap: ``clip``
    is null where none does, and the bytes are those of the coarsest. ``model`` may be on the meta device."""
    tables = {name for name, p in model.named_parameters() if getattr(p, "_is_embedding", False)}
    parts, exact = split(model_tensors(model, ""), tables, asked)
    ids = model.config.vocab_size
    fixed = {
        "tables": sum(_bytes(part, part.clip) for part in parts if part.clip is not None),
        "steps": sum(2 * part.w_EOI.shape[0] * _steps(part) for part in parts),
        "exact": sum(t.numel() * t.itemsize for t in exact.values()),
        "tokenizer": 0 if ids is None else _TOKENIZER + _MERGE * (ids - BYTES.size),
        "rest": _TENSOR * (len(parts) + len(exact)),
        "code": _code(model),
    }
    matrices = [part for part in parts if part.clip is None]

    def total(clip: float) -> float:
        return sum(fixed.values()) + sum(_bytes(part, clip) for part in matrices)

    try:
        clip = first_clip(asked.cap, total) if asked.clip is None else asked.clip
    except ValueError:
        clip = None
    sizes = {"matrices": sum(_bytes(part, clip or MOST) for part in matrices), **fixed}
    sizes = {name: round(size) for name, size in sizes.items()}
    return {"bytes": sizes, "total_bytes": sum(sizes.values()), "cap": asked.cap, "clip": clip}


def _bytes(part: Part, clip: float) -> float:
    return part.w_EOI.numel() * gaussian_bits(clip, part.bits) / 8


def _steps(part: Part) -> int:
    """Of each of its matrices."""
    rows, width = part.w_EOI.shape[1:]
    return 1 if part.shared or width < SHORT else rows


def _code(model: Model) -> int:
    """Asked once of a family, whose configurations differ in little of it."""
    if (family := model.config.family) not in _CODE:
        _CODE[family] = code.size(code.needed_by(model.config.model_dump_json()))
    return _CODE[family]
