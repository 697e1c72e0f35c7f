"""Checkpoints on disk: directories that are whole or absent, and free of code; written here, read by `load`.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights, written by torch.distributed.checkpoint (DCP)
        model-00002-of-00002.safetensors    the optimizer's state
        model.safetensors.index.json        which tensor lies in which file
        manifest.json                       written last: step, spec, ..., the hashes of the files and its own

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``; where a stage averages its
weights, the average stands in a third file as ``ema.{parameter}``, and is what is evaluated. They go
through DCP (so that each of several processes reads only its slices) but through its safetensors storage, not
its default one: the default keeps its index in ``.metadata``, which DCP reads with a plain ``pickle.load``,
and that would run whatever a checkpoint someone gave you says. All that is not a tensor stands in the
manifest as JSON. One process writes, whole tensors: a checkpoint does not tell how many trained.

A checkpoint is written into a hidden sibling, flushed to disk, and renamed. It is deleted the other way
round: renamed to a hidden name, then removed. So whatever the moment of a kill, a directory named
``step-...`` was complete once; that it still is, the hashes tell.

An exported folder (`spider.checkpoints.export`) is read as a checkpoint too: its ``config.json`` is the
manifest, it holds weights only, and their names lack the ``model.``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from spider import files
from spider.checkpoints.load import AVERAGE, Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, step_of, steps
from spider.errors import CheckpointError

_FILE_BYTES = 2 << 30


def save(root: Path, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> Checkpoint:
    """Write ``root/step-{record["global_step"]}`` and return it. The tensors are ``model.*``, ``optimizer.*``
    and ``ema.*``, on any device; the record is what the manifest says besides its files, as plain JSON.

    Raises:
        CheckpointError: the file system refused; nothing of the attempt is left, earlier ones are untouched.
    """
    final = root / f"step-{record['global_step']:08d}"
    hidden = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
        _write_tensors(hidden, tensors)
        averaged = {n.replace(AVERAGE, "model.", 1): t for n, t in tensors.items() if n.startswith(AVERAGE)}
        digests = {
            "weights": weights_digest(tensors),
            "averaged_weights": weights_digest({**tensors, **averaged}) if averaged else None,
        }
        plain = seal(hidden, MANIFEST, {"format": Manifest.FORMAT, **record, **digests})
        manifest = Manifest.parse(plain, hidden / MANIFEST)
        if final.exists():
            _remove(final)
        os.rename(hidden, final)
        files.fsync_dir(root)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(
            f"{final}: saving failed: {error.strerror or error}; {room(tensors, root)}. "
            f"Earlier checkpoints are intact: make room and run again to go on"
        ) from error
    return Checkpoint(final, manifest)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """One DCP save; a failure inside it surfaces as the OSError that caused it."""
    file_of: dict[str, int] = {}
    index, filled, previous = 1, 0, ""
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        if filled and (filled + tensor.nbytes > _FILE_BYTES or kind != previous):
            index, filled = index + 1, 0
        file_of[name], filled, previous = index, filled + tensor.nbytes, kind
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
    try:
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as error:
        causes = (failure for failure, _ in error.failures.values() if isinstance(failure, Exception))
        raise next(causes, CheckpointError(str(error))) from error
    for file in folder.glob("*.safetensors"):
        _sort_header(file)


def _sort_header(file: Path) -> None:
    """Equal states give equal files: safetensors writes its free-form metadata in random order."""
    with open(file, "r+b") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(text) == length, "the sorted header has another length"
        f.seek(8)
        f.write(text)


def seal(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a folder of tensor files: write its manifest with their sizes and hashes, and flush everything.
    A checkpoint's manifest is hashed too, an exported folder's is not. Returns it as it was written."""
    present = sorted(folder.iterdir())
    listed = {f.name: {"size": f.stat().st_size, "sha256": files.sha256(f)} for f in present}
    manifest = {**manifest, "files": listed}
    if name == MANIFEST:
        manifest["digest"] = files.digest(manifest)
    files.write_json(folder / name, manifest)
    for file in folder.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    files.fsync_dir(folder)
    return manifest


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of them all."""
    return sum(t.nbytes for t in tensors.values())


def room(tensors: Mapping[str, Tensor], folder: Path) -> str:
    """What a person has to know where they could not be written into ``folder``."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"it needs {size_of(tensors):,} bytes, {shutil.disk_usage(there).free:,} are free"


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the ``model.*`` tensors' names, types, shapes and bytes, whatever files they lie in."""
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        t = tensors[name].detach()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def retain(root: Path, keep_last: int, keep_every: int | None = None, began: int = 0) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and every ``keep_every``-th step's, counted from
    ``began``, the run's step at which the stage began, as saving does."""
    for path in steps(root)[:-keep_last]:
        if not keep_every or (step_of(path) - began) % keep_every:
            _remove(path)


def clean(root: Path) -> None:
    """Remove what a killed process left under hidden names; only for the holder of the folder's lock."""
    for path in root.glob(".step-[0-9]*.*"):
        shutil.rmtree(path, ignore_errors=True)


def quarantine(path: Path) -> Path:
    """Move a bad checkpoint out of the numbered ones, so that retention does not take it for a good one."""
    aside = path.with_name(f"corrupt-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)
