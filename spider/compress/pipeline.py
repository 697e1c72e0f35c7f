"""Compress the last checkpoint of a stage into ``compressed/model.spider``, with a receipt beside it.

Averaged weights are compressed where there are any, because the evaluation scores them. GPTQ needs the inputs
of each matrix: they come from training text, at the window and depth of the evaluation, in fp32. The same
checkpoint, settings, threads and device give the same file.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spider import files
from spider.checkpoints.compressed import CompressedReceipt, CompressedRecord, MatrixRecord
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.compress import code
from spider.compress.calibrate import inputs
from spider.compress.fit import MOST, fill
from spider.compress.format import Quantized
from spider.compress.format import read as read_compressed
from spider.compress.parts import Part, quantized, split
from spider.compress.writer import compressed
from spider.config import StageSpec
from spider.config.run import CompressConfig
from spider.data.shards import Shards
from spider.model.interface import Model, model_tensors
from spider.results import CompressedFolder
from spider.version import VERSION

log = logging.getLogger(__name__)

#: Windows read at once, and where the sizes of a file's parts are first looked at.
_BATCH, _FIRST_CLIP = 8, 12.85


class Compressor:
    """A model, ready to be compressed at any clip; what was made last is kept."""

    def __init__(
        self, model: Model, asked: CompressConfig, about: Mapping[str, Any], tokenizer: bytes,
        sums: Mapping[tuple[str, int], Tensor],
    ) -> None:  # fmt: skip
        self.asked, self.about, self.tokenizer, self.sums = asked, about, tokenizer, sums
        self.tensors = model_tensors(model, "")
        parameters = dict(model.named_parameters())
        tables = {name for name, p in parameters.items() if getattr(p, "_is_embedding", False)}
        self.parts, self.exact = split(self.tensors, tables, asked)
        self.done: dict[str, tuple[Quantized, MatrixRecord, list[str]]] = {}
        for part in self.parts:
            if part.clip is not None:
                self.done[part.name] = self._quantized(part, part.clip)

    @property
    def matrices(self) -> list[Part]:
        """Those that the clip decides."""
        return [part for part in self.parts if part.clip is None]

    def file(self, clip: float) -> tuple[bytes, dict[str, int]]:
        """The file at a clip, and the bytes of its parts."""
        self.done |= {part.name: self._quantized(part, clip) for part in self.matrices}
        made = {part.name: self.done[part.name][0] for part in self.parts}
        return compressed(self.about, self.tokenizer, self.tensors, made, self.exact)

    def entropy(self, clip: float) -> float:
        """Bytes of the matrices' integers, rounded to the nearest; of large ones by some of their rows."""
        samples = ((part, part.sampled()) for part in self.matrices)
        bits = (
            one.entropy(one.nearest(clip)) * part.w_EOI.numel() / one.w_EOI.numel() for part, one in samples
        )
        return sum(bits) / 8

    def _quantized(self, part: Part, clip: float) -> tuple[Quantized, MatrixRecord, list[str]]:
        return quantized(part, clip, self.sums, self.asked.damping)


def compress(
    receipt: Path, spec: StageSpec, asked: CompressConfig, data: Path, output: Path, device: str | None = None
) -> CompressedReceipt:
    """Compress the checkpoint of a receipt into the folder ``output``.

    Args:
        spec: the stage.
        data: shards folder of what it was trained on, whose train split is read to see what enters.
        device: where to compute (default: the GPU where there is one).

    Raises:
        ValueError: a model that reads an index, weights that are not finite, no training text, a cap that no
            step reaches, or one given that the file is over. Nothing is left behind.
    """
    began, trained, checkpoint = time.perf_counter(), Receipt.read(receipt), Checkpoint.at(receipt)
    where = f"runs.{spec.run}.compress"
    if checkpoint.config.ngram is not None:
        raise ValueError(
            f"{where}: the model reads an n-gram index, which is many times as large as any file it would be "
            "compressed into; train a run without one (model.ngram: null)"
        )
    model = checkpoint.model(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokens, sums = 0, dict[tuple[str, int], Tensor]()
    if asked.method == "gptq":
        windows_NT = _windows(data, spec.window, asked.windows)
        log.info("reading %d windows of %d ids of training text", *windows_NT.shape)
        n_loops = spec.evaluation.n_loops or spec.loops
        sums = inputs(model, _batches(windows_NT), dict(model.named_parameters()), n_loops)
        tokens = windows_NT.size
    about = {
        "spider": VERSION,
        "model": checkpoint.config.model_dump(mode="json"),
        **trained.model_dump(include={"run", "stage", "identity", "global_step", "data_digest"}),
        "window": spec.window,
        "conversations": checkpoint.manifest.conversations,
    }
    made = Compressor(model, asked, about, checkpoint.tokenizer or b"", sums)
    folder = CompressedFolder(output)
    modules = _modules(made)
    counted = code.size(modules)
    clip, content, parts = _fitted(made, counted, where)
    with files.replacing(folder.model) as beside:
        beside.write_bytes(content)
    rounded = [name for _, _, names in made.done.values() for name in names]
    record = CompressedRecord(
        bytes=len(content),
        code_bytes=counted,
        total_bytes=len(content) + counted,
        cap=asked.cap,
        clip=clip,
        settings=asked.model_dump(mode="json"),
        parts=parts,
        matrices={name: record for name, (_, record, _) in made.done.items()},
        rounded=rounded,
        modules=list(modules),
        windows=asked.windows if sums else 0,
        tokens=tokens,
        sha256=hashlib.sha256(content).hexdigest(),
        seconds=time.perf_counter() - began,
    )
    if sums and rounded:
        log.info("nothing entered %d of its matrices: rounded to the nearest", len(rounded))
    weights = read_compressed(folder.model).header["weights"]
    changed = {"checkpoint": folder.model.name, "weights": weights, "averaged_weights": None}
    return CompressedReceipt(**dict(trained) | changed, compressed=record).write(folder.receipt)


def _fitted(made: Compressor, counted: int, where: str) -> tuple[float, bytes, dict[str, int]]:
    """The clip, the file and its parts, with the code within the cap; `ValueError` where it is not."""
    asked, last = made.asked, dict[float, tuple[bytes, dict[str, int]]]()

    def total(clip: float) -> int:
        last.clear()
        last[clip] = made.file(clip)
        return counted + len(last[clip][0])

    if asked.cap <= counted:
        raise ValueError(f"{where}.cap: the code alone is {counted:,} bytes")
    weights = sum(part.w_EOI.numel() for part in made.matrices)
    if asked.clip is not None:
        if (over := total(asked.clip) - asked.cap) > 0:
            what = f"{asked.cap + over:,} bytes, {over:,} over cap"
            fitting = asked.clip * 2 ** min(99.0, over * 8 / weights)
            remedy = f"at clip {fitting:.3g} it would fit" if fitting < MOST else "no clip makes it so small"
            raise ValueError(f"{where}.clip: {what}; {remedy}")
        return asked.clip, *last[asked.clip]
    first = total(_FIRST_CLIP)
    fixed = first - made.entropy(_FIRST_CLIP)
    clip, _ = fill(asked.cap, weights, lambda clip: fixed + made.entropy(clip), total)
    return clip, *last[clip]


def _modules(made: Compressor) -> dict[str, Path]:
    """Found by a file of this model's, whatever its clip."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.spider"
        plain = {part.name: part.nearest(_FIRST_CLIP) for part in made.parts}
        path.write_bytes(compressed(made.about, made.tokenizer, made.tensors, plain, made.exact)[0])
        return code.needed(path)


def _windows(data: Path, length: int, count: int) -> np.ndarray:
    """Windows of the train split, drawn by a seed of its digest, (N, T) uint16."""
    shards = Shards(data, "train")
    if not shards.tokens:
        raise ValueError(f"{data}: has no training text to see what enters the matrices")
    draw = np.random.default_rng(int(files.digest(["calibration", shards.digest]), 16))
    starts = draw.integers(0, shards.tokens, min(count, -(-shards.tokens // length)))
    return shards.gather(np.sort(starts), length)


def _batches(windows_NT: np.ndarray) -> Iterator[np.ndarray]:
    for at in range(0, len(windows_NT), _BATCH):
        yield windows_NT[at : at + _BATCH].astype(np.int64)
