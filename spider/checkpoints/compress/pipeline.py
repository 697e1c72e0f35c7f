"""Compress the last checkpoint of a stage into ``compressed/model.spider``, with a receipt beside it.

Averaged weights are compressed if there are any, because the evaluation scores them. GPTQ needs the inputs of
each matrix: they come from training text, at the window and depth of the evaluation, in fp32. The same
checkpoint, settings, threads and device give the same file.

Unless the clipping range is given, the smallest one is searched whose file fits the cap. The size of the file
falls by one bit per weight whenever the range doubles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from spider.checkpoints.compress.format import read as read_compressed
from spider.checkpoints.compress.quantize import QuantizedPart, input_sums, quantize, split
from spider.checkpoints.compress.writer import compressed
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CompressedReceipt, CompressedRecord, Receipt
from spider.common import VERSION, files
from spider.common.results import CompressedFolder
from spider.config import StageSpec
from spider.config.imports import allowed_imports
from spider.config.run import CompressConfig
from spider.data.shards import Shards
from spider.model.interface import Model, model_tensors
from spider.processes.device import available

log = logging.getLogger(__name__)

#: A file may be smaller than its cap by this share; the search aims at the middle.
SLACK = 0.003
#: Limits of the clipping range. The least cuts only a row's largest weights; at the most, nearly all weights
#: of a row are zero.
LEAST_CLIP, MOST_CLIP = 4.0, 96.0
#: Clipping range of the first file, which gives the size of everything but the matrices.
_FIRST_CLIP = 12.85
_TRIES = 4
#: Windows of training text that GPTQ reads. More of them change the loss little.
WINDOWS = 64
#: Reads a file, predicts once, and lists the modules of this project that it has loaded.
_READ = """
import json, sys
from pathlib import Path
import torch
from spider.config.imports import allow_import
for family in json.loads(sys.argv[2]):
    allow_import(family)
from spider.checkpoints.compress.format import read
model = read(Path(sys.argv[1])).model()
model(torch.zeros(1, 8, dtype=torch.long))
ours = {"spider", "kernels", model.config.family.partition(".")[0]}
loaded = {name: getattr(m, "__file__", None) for name, m in sys.modules.items()}
print(json.dumps({name: file for name, file in loaded.items() if file and name.partition(".")[0] in ours}))
"""


@dataclass(eq=False)
class Compressor:
    """A model that can be compressed at any clipping range.

    After `total`, ``content`` is the file, ``sections`` the size of each of its sections, and ``quantized``
    the tensors in it.
    """

    model: Model
    config: CompressConfig
    about: Mapping[str, Any]
    tokenizer: bytes
    sums: Mapping[tuple[str, int], Tensor]

    def __post_init__(self) -> None:
        self.tensors = model_tensors(self.model, "")
        self.parts, self.exact = split(self.model, self.config)
        self.matrices = [part for part in self.parts if part.clip is None]
        self.quantized: dict[str, QuantizedPart] = {
            part.name: quantize(part, part.clip, self.sums) for part in self.parts if part.clip is not None
        }
        # The modules that reading the file imports are the same at any clipping range.
        plain = {part.name: part.nearest(_FIRST_CLIP) for part in self.parts}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.spider"
            path.write_bytes(compressed(self.about, self.tokenizer, self.tensors, plain, self.exact)[0])
            self.modules = needed_modules(path)
        self.code_bytes = source_size(self.modules)

    def total(self, clip: float) -> int:
        """Compress at a clipping range, and return the bytes of the file and of its code."""
        for part in self.matrices:
            self.quantized[part.name] = quantize(part, clip, self.sums)
        tensors = {part.name: self.quantized[part.name].tensor for part in self.parts}
        file = compressed(self.about, self.tokenizer, self.tensors, tensors, self.exact)
        self.content, self.sections = file
        return len(self.content) + self.code_bytes

    def entropy_bytes(self, clip: float) -> float:
        """Estimate the bytes of the matrices' integers by rounding them, or a sample of a matrix's rows."""
        bits = 0.0
        for part in self.matrices:
            sample = part.sampled()
            share = sample.w_EOI.numel() / part.w_EOI.numel()
            bits += sample.entropy_bits(sample.nearest(clip)) / share
        return bits / 8


def compress(
    receipt: Path, spec: StageSpec, config: CompressConfig, data: Path, output: Path
) -> CompressedReceipt:
    """Compress the checkpoint of a receipt into the folder ``output``, on the GPU if there is one.

    Args:
        spec: the stage.
        data: shards folder of the training data; its train split is read for calibration.

    Raises:
        ValueError: The model reads an n-gram index, or has weights that are not finite. The training text is
            empty. The file exceeds the cap at the given clipping range, or at any range. In each case the
            output folder stays as it was.
    """
    began = time.perf_counter()
    trained = Receipt.read(receipt)
    checkpoint = Checkpoint.at(receipt)
    where = f"runs.{spec.run}.compress"
    if checkpoint.config.ngram is not None:
        raise ValueError(
            f"{where}: the model reads an n-gram index, which is many times larger than the compressed file; "
            "train a run without one (model.ngram: null)"
        )
    model = checkpoint.model(available())
    tokens = 0
    sums: dict[tuple[str, int], Tensor] = {}
    if config.method == "gptq":
        windows_NT = _windows(data, spec.window)
        log.info("calibration reads %d windows of %d tokens of training text", *windows_NT.shape)
        sums = input_sums(model, windows_NT, spec.evaluation.n_loops or spec.loops)
        tokens = windows_NT.size
    about = {
        "spider": VERSION,
        "model": checkpoint.config.model_dump(mode="json"),
        **trained.model_dump(include={"run", "stage", "identity", "global_step", "data_digest"}),
        "window": spec.window,
        "precision": "fp32" if trained.precision == "fp32" else "bf16",
        "n_loops": spec.evaluation.n_loops or spec.loops,
        "conversations": checkpoint.manifest.conversations,
    }
    compressor = Compressor(model, config, about, checkpoint.tokenizer or b"", sums)
    clip = _fitted(compressor, where)
    folder = CompressedFolder(output)
    files.write_bytes(folder.model, compressor.content)
    rounded = [name for part in compressor.quantized.values() for name in part.rounded]
    record = CompressedRecord(
        bytes=len(compressor.content),
        code_bytes=compressor.code_bytes,
        total_bytes=len(compressor.content) + compressor.code_bytes,
        cap=config.cap,
        clip=clip,
        settings=config.model_dump(mode="json"),
        parts=compressor.sections,
        matrices={name: part.record for name, part in compressor.quantized.items()},
        rounded=rounded,
        modules=list(compressor.modules),
        windows=WINDOWS if sums else 0,
        tokens=tokens,
        sha256=hashlib.sha256(compressor.content).hexdigest(),
        seconds=time.perf_counter() - began,
    )
    if sums and rounded:
        log.info("%d matrices had no inputs and were rounded to the nearest", len(rounded))
    weights = read_compressed(folder.model).header["weights"]
    changed = {"checkpoint": folder.model.name, "weights": weights, "averaged_weights": None}
    return CompressedReceipt(**dict(trained) | changed, compressed=record).write(folder.receipt)


def _fitted(compressor: Compressor, where: str) -> float:
    """Compress the model so that the file with its code fits the cap, and return the clipping range.

    Raises `ValueError` if there is none.
    """
    config = compressor.config
    if config.cap <= compressor.code_bytes:
        raise ValueError(f"{where}.cap: the code alone is {compressor.code_bytes:,} bytes")
    weights = sum(part.w_EOI.numel() for part in compressor.matrices)
    if config.clip is not None:
        over = compressor.total(config.clip) - config.cap
        if over > 0:
            fitting = config.clip * 2 ** min(99.0, over * 8 / weights)
            remedy = f"clip {fitting:.3g} would fit" if fitting < MOST_CLIP else "no clip makes it fit"
            raise ValueError(f"{where}.clip: {config.cap + over:,} bytes, {over:,} over cap; {remedy}")
        return config.clip
    fixed = compressor.total(_FIRST_CLIP) - compressor.entropy_bytes(_FIRST_CLIP)

    def estimate(clip: float) -> float:
        return fixed + compressor.entropy_bytes(clip)

    clip, _ = fit_cap(config.cap, weights, estimate, compressor.total)
    return clip


def first_clip(cap: int, estimate: Callable[[float], float]) -> float:
    """Return the clipping range whose estimated bytes hit the target, at least `LEAST_CLIP`.

    Raises `ValueError` if not even the coarsest step fits the cap.
    """
    target = cap * (1 - SLACK / 2)
    coarsest = estimate(MOST_CLIP)
    if coarsest > cap:
        raise ValueError(
            f"compress: {coarsest:,.0f} bytes even at clip {MOST_CLIP:g}, cap is {cap:,}; use fewer "
            "parameters, fewer bits or a larger cap"
        )
    clips = np.geomspace(LEAST_CLIP, MOST_CLIP, 1 << 15)
    at = bisect_left(clips, -target, hi=len(clips) - 1, key=lambda clip: -estimate(clip))
    return float(clips[at])


def fit_cap(
    cap: int, weights: int, estimate: Callable[[float], float], total: Callable[[float], int]
) -> tuple[float, int]:
    """Return the clipping range whose file has between ``(1 - SLACK) cap`` and ``cap`` bytes, and its bytes.

    The file may be smaller at `LEAST_CLIP`.

    Args:
        weights: Number of weights that the clipping range concerns.
        estimate: Total bytes at a clipping range, by the entropy of rounded weights.
        total: Function that compresses at a clipping range and returns the total bytes. Its last call is for
            the range that is returned.

    Raises:
        ValueError: not even the coarsest step fits.
    """
    target = cap * (1 - SLACK / 2)
    fitting: list[tuple[float, int]] = []
    clip = first_clip(cap, estimate)
    for _ in range(_TRIES):
        size = total(clip)
        if size <= cap:
            fitting.append((clip, size))
            if size >= cap * (1 - SLACK) or clip == LEAST_CLIP:
                return clip, size
        # Bytes change by weights/8 log2 of the clip.
        clip = max(LEAST_CLIP, clip * 2 ** ((size - target) * 8 / weights))
    if not fitting:
        raise ValueError(f"compress: no clip near {clip:.3g} gives a file of {cap:,} bytes; raise cap")
    clip, _ = max(fitting, key=lambda pair: pair[1])
    return clip, total(clip)


def _windows(data: Path, length: int) -> np.ndarray:
    """Return random windows of the train split, (N, T) uint16; the seed is derived from its digest."""
    shards = Shards(data, "train")
    if not shards.tokens:
        raise ValueError(f"{data}: has no training text to calibrate with")
    rng = np.random.default_rng(int(files.digest(["calibration", shards.digest]), 16))
    starts = rng.integers(0, shards.tokens, min(WINDOWS, -(-shards.tokens // length)))
    return shards.gather(np.sort(starts), length)


def needed_modules(path: Path) -> dict[str, Path]:
    """Return the path of each module of this project that reading the file at ``path`` imports, by name.

    A fresh process reads the file, predicts once and prints what it imported. Libraries are not counted, like
    the C library of any decompressor.
    """
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", _READ, str(path.resolve()), json.dumps(allowed_imports())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if process.returncode:
        raise ValueError(f"a fresh process cannot read {path}:\n{process.stderr.strip()}")
    found = json.loads(process.stdout.splitlines()[-1])
    return {name: Path(found[name]) for name in sorted(found)}


def source_size(modules: dict[str, Path]) -> int:
    """Return the size of the modules' concatenated source, packed by the strongest preset of xz."""
    source = b"".join(path.read_bytes() for path in modules.values())
    return len(lzma.compress(source, preset=9 | lzma.PRESET_EXTREME))
