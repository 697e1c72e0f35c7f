"""Read ``model.spider``: a compressed model in one file, without pickle.

    SPIDERQ1                      8 bytes
    length of the header          uint32, little-endian
    sha256 of the header          the first 8 bytes
    header                        JSON, packed by zlib: the model's configuration and a list of its tensors
    sections                      tokenizer, clusters, tables, steps, exact, stream; the header has their
                                  sizes, and the sha256 of all of them

A weight is a step times a small integer, in fp32, so every machine reads the same bits. The digest of all
weights is checked like a checkpoint's. A tensor of two axes is one matrix, whose rows are its outputs. A
tensor of three axes is a stack of transposed matrices. Each tensor has a frequency table
(`rans`), or one for each cluster of its rows (`writer`), and a step for each row, or one for all rows.
Small tensors and vectors are stored exactly or in float16.

Every size is checked before memory is allocated. Header and sections are checked by the size of the file,
tensors by the architecture, which is built on the meta device.

Shapes: E matrices of a stack, O rows, I columns; R = E O rows of a tensor; S steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from spider.checkpoints.compress import rans
from spider.common.errors import CheckpointError
from spider.config.block import ConfigError
from spider.config.model import family_block
from spider.model import build_model
from spider.model.interface import Model, model_tensors, weights_digest
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import tokens_of

MAGIC, FORMAT = b"SPIDERQ1", 3
SECTIONS = ("tokenizer", "clusters", "tables", "steps", "exact", "stream")
#: Most clusters of a tensor's rows.
MAX_CLUSTERS = 16
_HEAD_BYTES = len(MAGIC) + 4 + 8
_MAX_HEADER_BYTES = 1 << 24
#: Weights per byte of a file, an eighth of a bit each.
_MAX_WEIGHTS_PER_BYTE = 64
#: The strongest preset of lzma takes 65 MiB of memory to unpack.
_MAX_TOKENIZER_BYTES, _UNPACKING_MEMORY = 1 << 25, 1 << 27
_COPY_AGAIN = "copy it again from where it was made"
_EXACT_TYPES = ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")


class Quantized(NamedTuple):
    """A tensor in small integers."""

    q_EOI: Tensor
    """Integers, int8."""
    step_EO1: Tensor
    """Steps, float16; (E, 1, 1) if rows share one."""
    bits: int

    def weights(self, shape: Sequence[int]) -> Tensor:
        """Return the tensor with the model's shape, in fp32."""
        w_EOI = self.q_EOI.float() * self.step_EO1.float()
        return (w_EOI if len(shape) == 2 else w_EOI.mT).reshape(tuple(shape)).contiguous()


def matrices(tensor: Tensor) -> Tensor:
    """View a tensor of two or three axes as matrices (E, O, I)."""
    return tensor[None] if tensor.ndim == 2 else tensor.mT


def restored(
    expected: Mapping[str, Tensor], quantized: Mapping[str, Quantized], exact: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all tensors as reading the file gives them, in the types of the ``expected`` ones."""
    return {
        name: (quantized[name].weights(t.shape) if name in quantized else exact[name]).to(t.dtype)
        for name, t in expected.items()
    }


def join_clusters(runs: Sequence[np.ndarray], cluster_R: np.ndarray) -> np.ndarray:
    """Return the symbols (R, I) whose rows are split into runs, one per cluster."""
    symbol_RI = np.empty((len(cluster_R), sum(map(len, runs)) // len(cluster_R)), np.uint8)
    for cluster, run in enumerate(runs):
        symbol_RI[cluster_R == cluster] = run.reshape(-1, symbol_RI.shape[1])
    return symbol_RI


@dataclass(frozen=True)
class CompressedModel:
    """The header and the sections of a file whose digests match."""

    path: Path
    header: dict[str, Any]
    sections: dict[str, bytes]

    @property
    def tokenizer(self) -> bytes | None:
        """The model's ``tokenizer.json``, or None for bytes.

        Raises `CheckpointError` if it is damaged or too large.
        """
        packed = self.sections["tokenizer"]
        if not packed:
            return None
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING_MEMORY)
        try:
            content = unpacking.decompress(packed, _MAX_TOKENIZER_BYTES)
        except lzma.LZMAError as error:
            raise self._error(f"its tokenizer cannot be unpacked ({error})") from None
        if not unpacking.eof:
            why = f"it ends too soon, or holds more than {_MAX_TOKENIZER_BYTES:,} bytes"
            raise self._error(f"its tokenizer cannot be unpacked ({why})")
        return content

    @property
    def tokens(self) -> Tokens:
        """The model's vocabulary."""
        content = self.tokenizer
        return BYTES if content is None else tokens_of(json.loads(content), self.path)

    def model(self, device: str | torch.device = "cpu") -> Model:
        """Return the model in evaluation mode.

        Raises `CheckpointError` if the header contradicts the sections or is of another version.
        """
        try:
            return self._model(torch.device(device))
        except (KeyError, TypeError, zlib.error, lzma.LZMAError, ConfigError, ValidationError) as error:
            raise self._error(f"its header is of another version, or wrong ({error})") from None

    def _model(self, device: torch.device) -> Model:
        config = family_block(self.header["model"])
        with torch.device("meta"):
            model = build_model(config, self.tokens)
        expected = model_tensors(model, "")
        if sum(t.numel() for t in expected.values()) > _MAX_WEIGHTS_PER_BYTE * self.path.stat().st_size:
            raise self._error("it is too small for the model that its header describes")
        tensors = self._tensors(expected)
        if weights_digest({f"model.{name}": t for name, t in tensors.items()}) != self.header["weights"]:
            raise self._error("its weights do not match their digest")
        model = model.to_empty(device=device)
        model.reset_parameters()  # sets the buffers that the file does not hold
        for name, tensor in model_tensors(model, "").items():
            tensor.copy_(tensors[name])
        model.window = self.header["window"]
        return model.eval()

    def _tensors(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [name for name, *_ in [*self.header["quantized"], *self.header["exact"]]]
        if sorted(names) != sorted(expected):
            raise self._error("its tensors are not those of its architecture")
        return restored(expected, self._quantized(expected), self._exact(expected))

    def _quantized(self, expected: Mapping[str, Tensor]) -> dict[str, Quantized]:
        entries = self.header["quantized"]
        shapes = {name: matrices(expected[name]).shape for name, *_ in entries}
        symbols = self._symbols(shapes)
        sizes = [shapes[name][0] * rows for name, _, rows, _ in entries]
        step_S = np.frombuffer(self.sections["steps"], "<f2").copy()
        if len(step_S) != sum(sizes) or not all(rows in (1, shapes[name][1]) for name, _, rows, _ in entries):
            raise self._error("the steps of its rows do not match its tensors")
        found: dict[str, Quantized] = {}
        for (name, bits, rows, _), steps in zip(entries, torch.from_numpy(step_S).split(sizes), strict=True):
            shape = shapes[name]
            zero = (1 << bits - 1) - 1
            q_EOI = (torch.from_numpy(symbols[name]).to(torch.int16) - zero).to(torch.int8).view(shape)
            found[name] = Quantized(q_EOI, steps.view(shape[0], rows, 1), bits)
        return found

    def _exact(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = self.sections["exact"]
        found: dict[str, Tensor] = {}
        begin = 0
        for name, kind in self.header["exact"]:
            shape = expected[name].shape
            dtype = getattr(torch, kind) if kind in _EXACT_TYPES else None
            end = begin + prod(shape) * (dtype.itemsize if dtype else 0)
            if dtype is None or end > len(values):
                raise self._error(f"{name}, of type {kind}, is incomplete")
            content = np.frombuffer(values, np.uint8)[begin:end].copy()
            found[name] = torch.from_numpy(content).view(dtype).view(shape)
            begin = end
        if begin != len(values):
            raise self._error("it holds more values than its tensors have")
        return found

    def _symbols(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Decode each tensor's symbols, (R, I) uint8."""
        entries = self.header["quantized"]
        clusters = self._clusters({name: prod(shape[:-1]) for name, shape in shapes.items()})
        sizes: list[int] = []
        for name, _, _, count in entries:
            sizes += (np.bincount(clusters[name], minlength=count) * shapes[name][-1]).tolist()
        try:
            runs = rans.decode(self.sections["stream"], sizes, self._tables(), self.header["lanes"])
        except ValueError as error:
            raise self._error(str(error)) from None
        found = {}
        for name, _, _, count in entries:
            found[name] = join_clusters(runs[:count], clusters[name])
            runs = runs[count:]
        return found

    def _clusters(self, rows: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return each tensor's clusters of rows (R,)."""
        counts = {name: count for name, _, _, count in self.header["quantized"]}
        size = sum(rows[name] for name, count in counts.items() if count > 1)
        flat = np.frombuffer(_inflated(self.sections["clusters"], size), np.uint8)
        if len(flat) != size or not all(1 <= count <= MAX_CLUSTERS for count in counts.values()):
            raise self._error("the clusters of its rows do not match its tensors")
        found = {}
        for name, count in counts.items():
            found[name] = np.zeros(rows[name], np.uint8)
            if count > 1:
                found[name], flat = flat[: rows[name]], flat[rows[name] :]
            if (found[name] >= count).any():
                raise self._error(f"{name} has rows of a cluster that does not exist")
        return found

    def _tables(self) -> list[np.ndarray]:
        """Return the frequency table of each cluster of each tensor."""
        entries = self.header["quantized"]
        if not all(2 <= bits <= 8 for _, bits, _, _ in entries):
            raise self._error("its integers do not have 2 to 8 bits")
        widths = [(1 << bits) - 1 for _, bits, _, count in entries for _ in range(count)]
        raw = _inflated(self.sections["tables"], 2 * sum(widths))
        if len(raw) != 2 * sum(widths):
            raise self._error("its tables do not match its bits")
        return np.split(np.frombuffer(raw, "<u2"), np.cumsum(widths)[:-1])

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; {_COPY_AGAIN}")


def _inflated(packed: bytes, size: int) -> bytes:
    """Unpack at most ``size`` + 1 bytes."""
    return zlib.decompressobj().decompress(packed, size + 1)


def read(path: Path) -> CompressedModel:
    """Read the file at ``path``.

    Raises `CheckpointError` if it is missing, damaged, truncated, longer than its header says, or of another
    version.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path}: not a compressed model of this version (it begins {data[:8]!r})")
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    packed = data[_HEAD_BYTES : _HEAD_BYTES + length]
    rest = data[_HEAD_BYTES + length :]
    if len(packed) < length or hashlib.sha256(packed).digest()[:8] != data[len(MAGIC) + 4 : _HEAD_BYTES]:
        raise CheckpointError(f"{path}: damaged: its header is incomplete or was changed; {_COPY_AGAIN}")
    try:
        header = json.loads(zlib.decompressobj().decompress(packed, _MAX_HEADER_BYTES))
        version, sizes = header["format"], header["sections"]
    except (ValueError, zlib.error, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error}); {_COPY_AGAIN}") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: of format {version!r}, this Spider reads {FORMAT}")
    if sum(sizes) != len(rest) or hashlib.sha256(rest).hexdigest() != header["sha256"]:
        raise CheckpointError(f"{path}: damaged: it does not match its SHA-256; {_COPY_AGAIN}")
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [rest[begin:end] for begin, end in itertools.pairwise(ends)]
    return CompressedModel(path, header, dict(zip(SECTIONS, parts, strict=True)))
