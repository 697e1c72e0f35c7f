"""Writes what `spider.compress.format` reads, and is no part of the source that reading needs."""

from __future__ import annotations

import hashlib
import json
import lzma
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider.compress import rans
from spider.compress.classes import dealt, less, split
from spider.compress.format import FORMAT, MAGIC, SECTIONS, Quantized, restored
from spider.model.interface import weights_digest


def narrowed(tensor: Tensor) -> Tensor:
    """What is no matrix, as it is kept: of more than 64 numbers in float16."""
    return tensor.half() if tensor.is_floating_point() and tensor.numel() > 64 else tensor


def compressed(
    about: Mapping[str, Any],
    tokenizer: bytes,
    expected: Mapping[str, Tensor],
    quantized: Mapping[str, Quantized],
    exact: Mapping[str, Tensor],
) -> tuple[bytes, dict[str, int]]:
    """The file's bytes, and how many each part of it takes.

    Args:
        about: what the header says of the model, in plain JSON.
        tokenizer: its ``tokenizer.json``; empty for bytes.
        expected: the model's tensors, which say names, shapes and types.
    """
    coded = {name: _Coded.of(one) for name, one in quantized.items()}
    runs = [run for one in coded.values() for run in one.runs]
    tables = [table for one in coded.values() for table in one.tables]
    lanes = rans.lanes_for(sum(map(len, runs)))
    sections = {
        "tokenizer": lzma.compress(tokenizer, preset=9) if tokenizer else b"",
        "classes": zlib.compress(b"".join(one.classes for one in coded.values()), 9),
        "tables": zlib.compress(b"".join(one.astype("<u2").tobytes() for one in tables), 9),
        "steps": b"".join(one.step_EO1.cpu().numpy().astype("<f2").tobytes() for one in quantized.values()),
        "exact": b"".join(one.cpu().contiguous().numpy().tobytes() for one in exact.values()),
        "stream": rans.encode(runs, tables, lanes) if runs else b"",
    }
    rest = b"".join(sections.values())
    tensors = {f"model.{name}": t for name, t in restored(expected, quantized, exact).items()}
    header = {
        "format": FORMAT,
        **about,
        "weights": weights_digest(tensors),
        "quantized": [
            [n, one.bits, one.step_EO1.shape[1], len(coded[n].runs)] for n, one in quantized.items()
        ],
        "exact": [[name, str(one.dtype).removeprefix("torch.")] for name, one in exact.items()],
        "lanes": lanes,
        "sections": [len(sections[name]) for name in SECTIONS],
        "sha256": hashlib.sha256(rest).hexdigest(),
    }
    packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
    head = MAGIC + len(packed).to_bytes(4, "little") + hashlib.sha256(packed).digest()[:8] + packed
    return head + rest, {"header": len(head), **{name: len(part) for name, part in sections.items()}}


class _Coded(NamedTuple):
    """A tensor's integers as what is coded: a run and a table for each class of its rows."""

    classes: bytes
    """Of each row, and what those of the first are coded against; empty where there is but one."""
    runs: list[np.ndarray]
    tables: list[np.ndarray]

    @classmethod
    def of(cls, one: Quantized) -> _Coded:
        reach = (1 << one.bits - 1) - 1
        symbol_RI = (one.q_EOI.cpu().flatten(0, 1).to(torch.int16) + reach).to(torch.uint8).numpy()
        class_R, base_I = dealt(symbol_RI, reach)
        runs = split(less(symbol_RI, class_R, base_I, reach), class_R)
        tables = [rans.table(np.bincount(run, minlength=2 * reach + 1)) for run in runs]
        return cls(class_R.tobytes() + base_I.tobytes() if len(runs) > 1 else b"", runs, tables)
