"""Checkpoints on disk: directories that are whole or absent, and free of code; written here, read by `load`.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights
        model-00002-of-00002.safetensors    the optimizer's state
        model.safetensors.index.json        which tensor lies in which file
        tokenizer.json                      what its ids stand for, where that was learned
        manifest.json                       written last: step, spec, ..., the hashes of the files and its own
    checkpoints/best                        a link to that which validated best, which is kept

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``; where a stage averages its
weights, the average stands in a third file as ``ema.{parameter}``, and is what is evaluated. One process
writes, whole tensors, and each of several reads only its slices: a checkpoint does not tell how many trained.
torch's own package for that (DCP) would do both, but its import takes as long as that of half of torch, in
every job, and its default storage keeps an index in a pickle, which would run whatever a checkpoint that
someone gave you says.

A checkpoint is written into a hidden sibling, flushed to disk, and renamed. It is deleted the other way
round: renamed to a hidden name, then removed. So whatever the moment of a kill, a directory named
``step-...`` was complete once; that it still is, the hashes tell.

Hashing and flushing take seconds, during which training goes on from its own tensors: it waits only while
`Saver` copies the state. The copy costs its size once more in host memory, which is kept from one save to the
next (pinned, for a GPU copies into such memory several times as fast). So the first save of a training is the
slow one: it allocates and pins all of it, for each tensor up to the next power of two.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from spider import files
from spider.checkpoints.load import AVERAGE, Checkpoint
from spider.checkpoints.records import BEST, INDEX, MANIFEST, Manifest, best, step_of, steps
from spider.config import StageSettings
from spider.errors import CheckpointError
from spider.model.interface import weights_digest
from spider.processes.parallel import whole
from spider.processes.world import ALONE, World
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)

_FILE_BYTES = 2 << 30


class Saver:
    """Write checkpoints into ``root`` in the background and delete those that ``settings`` keeps no longer.

    Of several processes the first one writes, and the others help to gather what it does not hold. At most
    one save is under way. Whether it failed is known at the next step after its end; a kill before its end
    leaves the checkpoint before it as the newest. ``newest`` is the newest checkpoint that is safely on disk,
    as far as this process knows; ``begun`` the run's step of the last one that was begun, in every process.
    """

    def __init__(
        self,
        root: Path,
        settings: StageSettings,
        newest: Checkpoint | None,
        world: World = ALONE,
        tokenizer: Path | None = None,
    ) -> None:
        self.newest = newest
        self.begun: int | None = newest.manifest.global_step if newest else None
        self.root, self._settings, self._world, self._tokenizer = root, settings, world, tokenizer
        self._copies: dict[str, Tensor] = {}
        # It takes what the steps leave of the processor. A Linux thread has a priority of its own; elsewhere
        # ``nice`` would slow the whole process.
        nice: dict[str, Any] = {"initializer": os.nice, "initargs": (10,)} if sys.platform == "linux" else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", **nice)
        self._pending: Future[Checkpoint] | None = None

    def start(self, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Copy the tensors and begin to save the copy, after the save before has ended."""
        self.settle()
        began = time.perf_counter()
        self.begun = record["global_step"]
        for name, tensor in tensors.items():
            held = whole(tensor.detach())
            if self._world.first:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(held, device="cpu", pin_memory=held.is_cuda)
                self._copies[name].copy_(held, non_blocking=True)
        if not self._world.first:
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        copies = {name: self._copies[name] for name in tensors}
        self._pending = self._thread.submit(self._save, copies, record, began)

    def _save(self, tensors: dict[str, Tensor], record: dict[str, Any], started: float) -> Checkpoint:
        saved = save(self.root, tensors, record, self._tokenizer)
        megabytes = sum(file.stat().st_size for file in saved.path.iterdir()) / 1e6
        seconds = time.perf_counter() - started
        log.info("checkpoint saved: %s, %.1f MB, %.1f s", saved.path, megabytes, seconds)
        began = record["global_step"] - record["step"]
        retain(self.root, self._settings.keep_last, self._settings.keep_every, began)
        return saved

    def settle(self, *, wait: bool = True) -> None:
        """Take note of how the save under way has ended, if it has or after a ``wait``; raises its error."""
        if self._pending is not None and (wait or self._pending.done()):
            pending, self._pending = self._pending, None
            self.newest = pending.result()

    def close(self) -> None:
        """Wait for the save under way, whatever comes of it."""
        self._thread.shutdown(wait=True)


def save(
    root: Path, tensors: Mapping[str, Tensor], record: dict[str, Any], tokenizer: Path | None = None
) -> Checkpoint:
    """Write ``root/step-{record["global_step"]}``, with the tensors in it, a copy of the ``tokenizer``, and a
    manifest that says of the training what the record does. Where the file system refuses, that is a
    `CheckpointError`, nothing of the attempt is left, and earlier ones are untouched."""
    final = root / f"step-{record['global_step']:08d}"
    hidden = files.hidden(final, "tmp")
    try:
        hidden.mkdir(parents=True)
        _write_tensors(hidden, tensors)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, hidden / TOKENIZER)
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
    """Each kind of tensors into files of its own, and which lies where into their index."""
    parts: list[dict[str, Tensor]] = []
    filled, previous = 0, ""
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        if kind != previous or filled + tensor.nbytes > _FILE_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor.contiguous()
        filled, previous = filled + tensor.nbytes, kind
    file_of: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # Not `save_file`, which makes an error of its own of what the file system says.
        (folder / file).write_bytes(safetensors.torch.save(part))
        file_of |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})


def seal(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a folder of tensor files: write its manifest with their sizes and hashes, and flush everything.
    A checkpoint's manifest is hashed too, an exported folder's is not. Returns it as it was written."""
    present = sorted(folder.iterdir())
    listed = {f.name: {"size": f.stat().st_size, "sha256": files.sha256(f)} for f in present}
    manifest = {**manifest, "files": listed}
    if name == MANIFEST:
        manifest["digest"] = files.digest(manifest)
    for file in present:
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    files.write_json(folder / name, manifest)
    return manifest


def room(tensors: Mapping[str, Tensor], folder: Path) -> str:
    """What a person has to know where they could not be written into ``folder``."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed = sum(t.nbytes for t in tensors.values())
    return f"it needs {needed:,} bytes, {shutil.disk_usage(there).free:,} are free"


def _remove(path: Path) -> None:
    hidden = files.hidden(path, "old")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def retain(root: Path, keep_last: int, keep_every: int | None = None, began: int = 0) -> None:
    """Delete all but the newest ``keep_last`` checkpoints, the `best`, and every ``keep_every``-th step's,
    counted from ``began``, the run's step at which the stage began, as saving does."""
    kept = name_best(root)
    for path in steps(root)[:-keep_last]:
        if path != kept and (not keep_every or (step_of(path) - began) % keep_every):
            _remove(path)


def name_best(root: Path) -> Path | None:
    """Have the link ``best`` point at the `best` checkpoint, and return that; none where there is none. The
    manifests decide: a link that a kill left behind is put right with the next checkpoint or start."""
    link, beside = root / BEST, root / f".{BEST}.tmp"
    path = found[0] if (found := best(root)) else None
    try:
        if path is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != path.name:
            beside.unlink(missing_ok=True)
            beside.symlink_to(path.name)
            os.replace(beside, link)
    except OSError as error:
        log.warning("%s: not made (%s); `spider checkpoint ls` tells which it is", link, error.strerror)
    return path


def clean(root: Path) -> None:
    """Remove what a killed process left under hidden names; only for the holder of the folder's lock."""
    for path in root.glob(".step-[0-9]*.*"):
        shutil.rmtree(path, ignore_errors=True)
