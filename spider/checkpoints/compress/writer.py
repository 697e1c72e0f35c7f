"""Write the file that `spider.checkpoints.compress.format` reads. Reading does not need this module."""

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

from spider.checkpoints.compress import rans
from spider.checkpoints.compress.clusters import assign_clusters, split, subtract_base
from spider.checkpoints.compress.format import FORMAT, MAGIC, SECTIONS, Quantized, restored
from spider.checkpoints.compress.gptq import largest
from spider.model.interface import weights_digest


def compressed(
    about: Mapping[str, Any],
    tokenizer: bytes,
    expected: Mapping[str, Tensor],
    quantized: Mapping[str, Quantized],
    exact: Mapping[str, Tensor],
) -> tuple[bytes, dict[str, int]]:
    """Return the file's bytes, and the size of each of its sections.

    Args:
        about: Description of the model in the header, as plain JSON.
        tokenizer: Content of the model's ``tokenizer.json``; empty for bytes.
        expected: The model's tensors, for their names, shapes and types.
        quantized: Tensors in small integers.
        exact: Tensors that are stored as they are.
    """
    coded = {name: _coded(tensor) for name, tensor in quantized.items()}
    runs = [run for tensor in coded.values() for run in tensor.runs]
    tables = [table for tensor in coded.values() for table in tensor.tables]
    steps = [tensor.step_EO1.cpu().numpy().astype("<f2") for tensor in quantized.values()]
    lanes = rans.lanes_for(sum(map(len, runs)))
    sections = {
        "tokenizer": lzma.compress(tokenizer, preset=9) if tokenizer else b"",
        "clusters": zlib.compress(b"".join(tensor.clusters for tensor in coded.values()), 9),
        "tables": zlib.compress(b"".join(table.astype("<u2").tobytes() for table in tables), 9),
        "steps": b"".join(step.tobytes() for step in steps),
        "exact": b"".join(tensor.cpu().contiguous().numpy().tobytes() for tensor in exact.values()),
        "stream": rans.encode(runs, tables, lanes) if runs else b"",
    }
    rest = b"".join(sections.values())
    tensors = {f"model.{name}": t for name, t in restored(expected, quantized, exact).items()}
    header = {
        "format": FORMAT,
        **about,
        "weights": weights_digest(tensors),
        "quantized": [
            [name, tensor.bits, tensor.step_EO1.shape[1], len(coded[name].runs)]
            for name, tensor in quantized.items()
        ],
        "exact": [[name, str(tensor.dtype).removeprefix("torch.")] for name, tensor in exact.items()],
        "lanes": lanes,
        "sections": [len(sections[name]) for name in SECTIONS],
        "sha256": hashlib.sha256(rest).hexdigest(),
    }
    packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
    head = MAGIC + len(packed).to_bytes(4, "little") + hashlib.sha256(packed).digest()[:8] + packed
    return head + rest, {"header": len(head), **{name: len(part) for name, part in sections.items()}}


class _Coded(NamedTuple):
    """A tensor's integers with a run and a table for each cluster of its rows."""

    clusters: bytes
    """The cluster of each row, then the base row; empty if there is one cluster."""
    runs: list[np.ndarray]
    tables: list[np.ndarray]


def _coded(tensor: Quantized) -> _Coded:
    zero = largest(tensor.bits)
    symbol_RI = (tensor.q_EOI.cpu().flatten(0, 1).to(torch.int16) + zero).to(torch.uint8).numpy()
    cluster_R, base_I = assign_clusters(symbol_RI, zero)
    runs = split(subtract_base(symbol_RI, cluster_R, base_I, zero), cluster_R)
    tables = [rans.table(np.bincount(run, minlength=2 * zero + 1)) for run in runs]
    clusters = cluster_R.tobytes() + base_I.tobytes() if len(runs) > 1 else b""
    return _Coded(clusters, runs, tables)
