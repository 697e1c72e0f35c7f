"""Write the file that `spider.checkpoints.compress.format` reads. Reading does not need this module.

Rows of one matrix differ in entropy: in an embedding, rows of frequent tokens have large norms and rows of
rare tokens small ones. One frequency table for all rows would cost more bits. So rows are sorted by the mean
square of their integers into 2 to 16 clusters of equal size, each with a table. This is done only if it saves
more than the tables and the rows' cluster numbers cost.

Shapes: R rows of I integers, stored as symbols 0 .. 2 zero; ``zero`` is the symbol of the integer 0.
"""

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
from spider.checkpoints.compress.format import FORMAT, MAGIC, MAX_CLUSTERS, SECTIONS, Quantized, restored
from spider.checkpoints.compress.quantize import largest
from spider.model.interface import weights_digest

#: Packed bytes per entry of a frequency table.
_ENTRY_BYTES = 1.3


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
    """The cluster of each row; empty if there is one cluster."""
    runs: list[np.ndarray]
    tables: list[np.ndarray]


def _coded(tensor: Quantized) -> _Coded:
    zero = largest(tensor.bits)
    symbol_RI = (tensor.q_EOI.cpu().flatten(0, 1).to(torch.int16) + zero).to(torch.uint8).numpy()
    cluster_R = assign_clusters(symbol_RI, zero)
    runs = split(symbol_RI, cluster_R)
    tables = [rans.table(np.bincount(run, minlength=2 * zero + 1)) for run in runs]
    return _Coded(cluster_R.tobytes() if len(runs) > 1 else b"", runs, tables)


def assign_clusters(symbol_RI: np.ndarray, zero: int) -> np.ndarray:
    """Return each row's cluster in the cheapest assignment, (R,) uint8."""
    square_R = np.square(symbol_RI - np.float32(zero)).mean(1)
    best_R = np.zeros(len(symbol_RI), np.uint8)
    least = _cost(symbol_RI, best_R)
    count = 2
    while count <= MAX_CLUSTERS:
        edges = np.quantile(square_R, np.arange(1, count) / count)
        cluster_R = np.searchsorted(edges, square_R).astype(np.uint8)
        if len(np.unique(cluster_R)) == count and (cost := _cost(symbol_RI, cluster_R)) < least:
            best_R, least = cluster_R, cost
        count *= 2
    return best_R


def _cost(symbol_RI: np.ndarray, cluster_R: np.ndarray) -> float:
    """Estimate the bytes of the integers, their tables and the rows' cluster numbers."""
    counts = [np.bincount(run) for run in split(symbol_RI, cluster_R)]
    tables = sum(_ENTRY_BYTES * np.count_nonzero(count) for count in counts)
    return sum(map(rans.entropy_bits, counts)) / 8 + tables + len(cluster_R) * np.log2(len(counts)) / 8


def split(symbol_RI: np.ndarray, cluster_R: np.ndarray) -> list[np.ndarray]:
    """Return the concatenated rows of each cluster."""
    return [symbol_RI[cluster_R == cluster].ravel() for cluster in range(int(cluster_R.max()) + 1)]
