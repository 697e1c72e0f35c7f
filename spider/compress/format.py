"""``model.spider``: a model in one file, to be read by whoever has the source, and by nobody's pickle.

    SPIDERQ1                      8 bytes
    length of the header          uint32, little-endian
    sha256 of the header          the first 8 bytes
    header                        JSON, packed by zlib: what the model is, and of what sections are made
    sections                      tokenizer, classes, tables, steps, exact, stream; the header has their
                                  sizes, and the sha256 of all of them

A weight is its step times a small integer, in fp32, so that every machine reads the same bits; the digest of
all weights is checked as of a checkpoint. A tensor of two axes is a matrix whose rows are what it makes, one
of three a stack of them stored the other way round. Each has its own table (`spider.compress.rans`), or one
for each class of its rows, of which those of the first are what they differ from one
(`spider.compress.classes`), and a step for each row, or one for all. What is small or no matrix stays as it
was, or in float16.

Nothing is allocated by a number that was not compared with what is there: a header by the size of the file,
sections by the same, tensors by those of the architecture, built without memory.

Shapes: E matrices of a stack, O rows, I columns; T tensors.
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

from spider.compress import rans
from spider.compress.classes import MOST, back, joined
from spider.config.block import ConfigError
from spider.config.model import family_block
from spider.errors import CheckpointError
from spider.model import build_model
from spider.model.interface import Model, model_tensors, weights_digest
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import tokens_of

MAGIC, FORMAT = b"SPIDERQ1", 2
_HEAD = len(MAGIC) + 4 + 8
SECTIONS = ("tokenizer", "classes", "tables", "steps", "exact", "stream")
#: Of a header, unpacked; and weights of a byte of a file: an eighth of a bit each.
_LONGEST_HEADER, _MOST_WEIGHTS = 1 << 24, 64
#: Bytes of an unpacked tokenizer, and of memory to unpack it with: the strongest preset takes 65 MiB.
_LONGEST_TOKENIZER, _UNPACKING_MEMORY = 1 << 25, 1 << 27
_EXACT = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}


class Quantized(NamedTuple):
    """A tensor in small integers."""

    q_EOI: Tensor
    """int8."""
    step_EO1: Tensor
    """float16; (E, 1, 1) where rows share one."""
    bits: int

    def weights(self, shape: Sequence[int]) -> Tensor:
        """As the model has it."""
        w_EOI = self.q_EOI.float() * self.step_EO1.float()
        return (w_EOI if len(shape) == 2 else w_EOI.mT).reshape(tuple(shape)).contiguous()


def matrices(tensor: Tensor) -> Tensor:
    """A tensor of two or three axes as matrices (E, O, I)."""
    return tensor[None] if tensor.ndim == 2 else tensor.mT


def restored(
    expected: Mapping[str, Tensor], quantized: Mapping[str, Quantized], exact: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All tensors as reading the file gives them, in the types of the ``expected``."""
    return {
        name: (quantized[name].weights(t.shape) if name in quantized else exact[name]).to(t.dtype)
        for name, t in expected.items()
    }


@dataclass(frozen=True)
class CompressedModel:
    """A file that is whole: its header, and the sections behind it."""

    path: Path
    header: dict[str, Any]
    sections: dict[str, bytes]

    @property
    def tokenizer(self) -> bytes | None:
        """Its ``tokenizer.json``, None for bytes; `CheckpointError` where that is damaged or too large."""
        if not (packed := self.sections["tokenizer"]):
            return None
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING_MEMORY)
        try:
            content = unpacking.decompress(packed, _LONGEST_TOKENIZER)
        except lzma.LZMAError as error:
            raise self._lies(f"its tokenizer cannot be unpacked ({error})") from None
        if not unpacking.eof:
            most = f"it ends too soon, or holds more than {_LONGEST_TOKENIZER:,} bytes"
            raise self._lies(f"its tokenizer cannot be unpacked ({most})")
        return content

    @property
    def tokens(self) -> Tokens:
        """What the ids of its model stand for."""
        written = self.tokenizer
        return BYTES if written is None else tokens_of(json.loads(written), self.path)

    def model(self, device: str | torch.device = "cpu") -> Model:
        """The model in evaluation mode. `CheckpointError` where the file is of another version or lies."""
        try:
            return self._model(torch.device(device))
        except (KeyError, TypeError, zlib.error, lzma.LZMAError, ConfigError, ValidationError) as error:
            raise self._lies(f"its header is of another version, or wrong ({error})") from None

    def _model(self, device: torch.device) -> Model:
        config = family_block(self.header["model"])
        with torch.device("meta"):
            model = build_model(config, self.tokens)
        expected = model_tensors(model, "")
        if sum(t.numel() for t in expected.values()) > _MOST_WEIGHTS * self.path.stat().st_size:
            raise self._lies("it is too small for the model that its header describes")
        tensors = self._tensors(expected)
        if weights_digest({f"model.{name}": t for name, t in tensors.items()}) != self.header["weights"]:
            raise self._lies("its weights are not those of its digest")
        model = model.to_empty(device=device)
        model.reset_parameters()  # marks, and what is no parameter
        for name, tensor in model_tensors(model, "").items():
            tensor.copy_(tensors[name])
        return model.eval()

    def _tensors(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        quantized, exact = self.header["quantized"], self.header["exact"]
        if sorted(name for name, *_ in [*quantized, *exact]) != sorted(expected):
            raise self._lies("its tensors are not those of its architecture")
        symbols = self._symbols({name: matrices(expected[name]).shape for name, *_ in quantized})
        steps_S = np.frombuffer(self.sections["steps"], "<f2")
        values, found, at = self.sections["exact"], dict[str, Quantized](), 0
        for name, bits, rows, _ in quantized:
            shape = matrices(expected[name]).shape
            end = at + shape[0] * rows
            if rows not in (1, shape[1]) or end > len(steps_S):
                raise self._lies(f"{name} has not {rows} steps")
            step_EO1 = torch.from_numpy(steps_S[at:end].copy()).view(shape[0], rows, 1)
            reach, at = (1 << bits - 1) - 1, end
            q_EOI = (torch.from_numpy(symbols[name]).to(torch.int16) - reach).to(torch.int8).view(shape)
            found[name] = Quantized(q_EOI, step_EO1, bits)
        kept, begin = dict[str, Tensor](), 0
        for name, kind in exact:
            shape, dtype = expected[name].shape, _EXACT.get(kind)
            if dtype is None or begin + prod(shape) * dtype.itemsize > len(values):
                raise self._lies(f"{name} of {kind} is not there whole")
            end = begin + prod(shape) * dtype.itemsize
            flat = torch.frombuffer(bytearray(values[begin:end]), dtype=dtype) if end > begin else None
            kept[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)
            begin = end
        if at != len(steps_S) or begin != len(values):
            raise self._lies("it holds more than its tensors")
        return restored(expected, found, kept)

    def _symbols(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Each tensor's integers, (R, I) uint8."""
        dealt, quantized, at, found = self._classes(shapes), self.header["quantized"], 0, {}
        sizes = [np.bincount(dealt[n][0], minlength=c) * shapes[n][-1] for n, _, _, c in quantized]
        try:
            flat = [int(size) for one in sizes for size in one]
            runs = rans.decode(self.sections["stream"], flat, self._tables(), self.header["lanes"])
        except ValueError as error:
            raise self._lies(str(error)) from None
        for name, bits, _, count in quantized:
            class_R, base_I = dealt[name]
            found[name] = joined(runs[at : at + count], class_R, shapes[name][-1])
            if count > 1:
                found[name] = back(found[name], class_R, base_I, (1 << bits - 1) - 1)
            at += count
        return found

    def _classes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Each tensor's rows' classes, and what those of the first are coded against."""
        counts = {name: count for name, _, _, count in self.header["quantized"]}
        sizes = {name: (prod(shapes[name][:-1]), shapes[name][-1]) for name in counts}
        wanted = sum(sum(sizes[name]) for name, count in counts.items() if count > 1)
        flat = np.frombuffer(_inflated(self.sections["classes"], wanted), np.uint8)
        if len(flat) != wanted or not all(1 <= count <= MOST for count in counts.values()):
            raise self._lies("the classes of its rows are not those of its tensors")
        found = {}
        for name, count in counts.items():
            rows, width = sizes[name]
            if count == 1:
                found[name] = np.zeros(rows, np.uint8), flat[:0]
                continue
            found[name], flat = (flat[:rows], flat[rows : rows + width]), flat[rows + width :]
            if (found[name][0] >= count).any():
                raise self._lies(f"{name} has rows of a class that there is not")
        return found

    def _tables(self) -> list[np.ndarray]:
        quantized = self.header["quantized"]
        if not all(2 <= bits <= 8 for _, bits, _, _ in quantized):
            raise self._lies("its integers are not of 2 to 8 bits")
        widths = [(1 << bits) - 1 for _, bits, _, count in quantized for _ in range(count)]
        raw = _inflated(self.sections["tables"], 2 * sum(widths))
        if len(raw) != 2 * sum(widths):
            raise self._lies("its tables are not of its alphabets")
        return np.split(np.frombuffer(raw, "<u2"), np.cumsum(widths)[:-1])

    def _lies(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; copy it again from where it was made")


def _inflated(packed: bytes, size: int) -> bytes:
    """At most a byte more than so many."""
    return zlib.decompressobj().decompress(packed, size + 1)


def read(path: Path) -> CompressedModel:
    """The file at ``path``. `CheckpointError` where it is missing, damaged, cut, longer than it says, or of
    another version."""
    data = path.read_bytes() if path.is_file() else None
    again = "copy it again from where it was made"
    if data is None:
        raise CheckpointError(f"{path}: no such file")
    if data[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path}: not a compressed model of this version (it begins {data[:8]!r})")
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    packed, rest = data[_HEAD : _HEAD + length], data[_HEAD + length :]
    if len(packed) < length or hashlib.sha256(packed).digest()[:8] != data[len(MAGIC) + 4 : _HEAD]:
        raise CheckpointError(f"{path}: damaged: its header is not whole; {again}")
    try:
        header = json.loads(zlib.decompressobj().decompress(packed, _LONGEST_HEADER))
        version, sizes = header["format"], header["sections"]
    except (ValueError, zlib.error, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error}); {again}") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: of format {version!r}, this Spider reads {FORMAT}")
    if sum(sizes) != len(rest) or hashlib.sha256(rest).hexdigest() != header["sha256"]:
        raise CheckpointError(f"{path}: damaged: it does not match its SHA-256; {again}")
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [rest[begin:end] for begin, end in itertools.pairwise(ends)]
    return CompressedModel(path, header, dict(zip(SECTIONS, parts, strict=True)))
