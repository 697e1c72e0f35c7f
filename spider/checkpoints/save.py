"""Save checkpoints: folders that are whole or absent, and that hold no code. `load` reads them.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights
        model-00002-of-00002.safetensors    the state of the optimizer
        model.safetensors.index.json        the file of each tensor
        tokenizer.json                      the vocabulary, if the data has a learned one
        manifest.json                       step, spec, ..., the hashes of the files and its own digest
    checkpoints/best                        a link to the checkpoint that validated best, which is kept

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``. If a stage averages its
weights, a third file holds the average as ``ema.{parameter}``, and evaluation reads that.

Each of several processes writes the rows that it holds into files of its own (`spider.checkpoints.parts`),
and reads only the rows that it needs. `Checkpoint` joins the rows. So any number of processes reads a
checkpoint, and no other module knows how it is cut. The digest of the weights is that of the whole tensors.
So the first process reads all weights again, from the files, after all processes have written theirs.

torch's distributed checkpoints (DCP) also write slices, but their import takes as long as half of torch's, in
every job. Their default storage keeps its index in a pickle, and reading a pickle runs the code in it. Their
storage of safetensors lacks an index of the slices until one process joins them. Neither has digests.

A checkpoint is a sealed folder (`spider.common.sealed`). A process can be killed at any moment: a folder
named ``step-...`` was complete once. Its hashes show whether it is still complete.

Writing takes seconds, and training continues meanwhile with its own tensors and with the interpreter:
``safetensors`` writes without a copy and without Python's lock. The digest of the weights is another hash of
the same bytes. So weights and their average are hashed twice, and the optimizer's state once.

The threads of several processes exchange the name of the hidden folder, the hashes of the files and errors,
over connections of their own (`World.aside`). If one cannot write its files, all fail with the same error.

Training waits only while `Saver` copies the state and looks for numbers that are not finite. The copy takes
the size of the process's share once more in host memory, which is reused for the next save. It is pinned for
a GPU, because copies into pinned memory are several times as fast. The first save of a training is slower,
because it allocates this memory, rounded up to a power of two for each tensor.

One process at a time trains in a stage's folder (`hold`), and only the spec that began it (`claim`).
``origin.json`` is written before the first step. It identifies the training that the folder's checkpoints and
metrics belong to: its spec, the digest of its data, and the digest of its initial weights. What happens to a
stage that starts with another origin depends on the old training:

- It *finished*: its checkpoints, metrics and samples are moved to ``superseded-{identity}-{n}/``, and the
  stage starts at its beginning. The user changed the configuration and requested the run again.
- It is *unfinished* and has checkpoints: the stage is refused, and each field that differs is named. A typo
  must not discard days of work.
- It lacks a checkpoint: the stage starts at its beginning, because nothing is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spider.checkpoints.load import AVERAGE, Checkpoint, first_three, not_finite
from spider.checkpoints.parts import Piece, keys_of, parts_of
from spider.checkpoints.records import BEST, INDEX, MANIFEST, NEWEST, Manifest, Origin, at_shares, best, steps
from spider.common import files, sealed
from spider.common.errors import CheckpointError, Diverged, TrainingError
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.config.spec import recut
from spider.model.interface import weights_digest
from spider.processes.parallel import local
from spider.processes.world import ALONE, World
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)


class Saver:
    """Save checkpoints into ``root`` in the background, and delete those that `retain` does not keep.

    Several processes save together, and a save succeeds or fails in all of them. At most one is in progress.
    All processes raise its error when they wait for it (`settle`), which they do once it ``failed`` in one of
    them. A kill before its end leaves the checkpoint before it as the newest.

    Attributes:
        newest: the newest checkpoint on disk, as far as this process has noticed.
        begun: the run's step of the last save that was begun.
    """

    def __init__(
        self,
        root: Path,
        newest: Checkpoint | None,
        world: World = ALONE,
        tokenizer: Path | None = None,
        shares: int = 0,
    ) -> None:
        self.root = root
        self.newest = newest
        self.begun: int | None = newest.manifest.global_step if newest else None
        self._shares = shares
        self._world = world
        self._aside = world.aside()
        self._tokenizer = tokenizer
        self._copies: dict[str, Tensor] = {}
        # Lower the priority of the thread, so that it does not slow the steps. Only a Linux thread has a
        # priority of its own; elsewhere ``nice`` would slow the whole process.
        nice: dict[str, Any] = {"initializer": os.nice, "initargs": (10,)} if sys.platform == "linux" else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", **nice)
        self._pending: Future[Checkpoint] | None = None

    def start(self, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Copy what this process writes of the tensors and begin to save it; wait for the save before it.

        Raises:
            Diverged: in every process, if a tensor is not finite. Nothing is saved then.
        """
        self.settle()
        began = time.perf_counter()
        self.begun = record["global_step"]
        parts = parts_of(tensors, self._world.size)
        own = [piece for part in parts.values() for piece in part if piece.rank == self._world.rank]
        # The saver's thread does not check, because OpenMP would start threads for it that slow every step.
        wrong = not_finite(self._copy(tensors, own))
        found = self._world.sum_ints(*(name in wrong for name in tensors))
        if wrong := [name for name, processes in zip(tensors, found, strict=True) if processes]:
            raise Diverged(f"the state is not finite: {first_three(wrong)}")
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        copies = {piece.key: self._copies[piece.key] for piece in own}
        write = partial(save, self.root, copies, record, self._tokenizer, parts, self._aside)
        self._pending = self._thread.submit(self._save, write, began)

    def _copy(self, tensors: Mapping[str, Tensor], own: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Copy the pieces of this process to the host, and yield each with the name of its tensor."""
        for piece in own:
            held = local(tensors[piece.name].detach())
            assert held.nbytes == piece.bytes, f"{piece} is not what this process holds"
            if piece.key not in self._copies:  # `empty_like` would keep torchao's class of a weight in fp8
                plain = torch.empty(held.shape, dtype=held.dtype, pin_memory=held.is_cuda)
                self._copies[piece.key] = plain
            self._copies[piece.key].copy_(held, non_blocking=True)
            yield piece.name, held

    def _save(self, write: Callable[[], Checkpoint], started: float) -> Checkpoint:
        saved = write()
        if not self._world.first:
            return saved
        megabytes = sum(file.stat().st_size for file in saved.path.iterdir()) / 1e6
        seconds = time.perf_counter() - started
        log.info("checkpoint saved: %s, %.1f MB, %.1f s", saved.path, megabytes, seconds)
        retain(self.root, self._shares)
        return saved

    @property
    def failed(self) -> bool:
        """Return whether the save in progress has failed, as far as this process knows."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def settle(self, *, wait: bool = True) -> None:
        """Update ``newest`` if the save in progress has ended, or wait for its end; raise its error."""
        if self._pending is not None and (wait or self._pending.done()):
            pending = self._pending
            self._pending = None
            self.newest = pending.result()

    def close(self) -> None:
        """Wait for the save in progress, and ignore its error."""
        self._thread.shutdown(wait=True)


def save(
    root: Path,
    tensors: Mapping[str, Tensor],
    record: dict[str, Any],
    tokenizer: Path | None = None,
    parts: dict[str, list[Piece]] | None = None,
    world: World = ALONE,
) -> Checkpoint:
    """Save a checkpoint as ``root/step-{record["global_step"]}``.

    Args:
        tensors: the tensors that this process writes, by their keys in the checkpoint.
        record: the fields of the manifest that describe the training.
        tokenizer: the ``tokenizer.json`` to copy into it.
        parts: the pieces in each file (default: those of one process).
        world: the processes that save together; all return the checkpoint or raise the same error.

    Raises:
        CheckpointError: the file system refuses. Nothing of the attempt remains, and earlier checkpoints are
            intact.
    """
    folder = root / f"step-{record['global_step']:08d}"
    parts = parts or parts_of(tensors, 1)
    try:
        with contextlib.ExitStack() as stack:
            beside = world.from_first(lambda: stack.enter_context(sealed.writing(folder)))
            hashed = world.gather(lambda: _write_parts(beside, parts, tensors, world.rank))

            def seal() -> Manifest:
                if tokenizer is not None:
                    shutil.copyfile(tokenizer, beside / TOKENIZER)
                manifest = _seal(beside, parts, record, dict(ChainMap(*hashed)))
                stack.close()  # renames the folder
                return manifest

            return Checkpoint(folder, world.from_first(seal))
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        needed = sum(piece.bytes for part in parts.values() for piece in part)
        raise CheckpointError(
            f"{folder}: saving failed: {reason}; {space_needed(needed, root)}. "
            f"Earlier checkpoints are intact: free some space and run again to continue"
        ) from error


def _write_parts(
    folder: Path, parts: dict[str, list[Piece]], tensors: Mapping[str, Tensor], rank: int
) -> dict[str, sealed.SealedFile]:
    """Write the files of this process, and flush them to disk."""
    own = {file: part for file, part in parts.items() if part[0].rank == rank}
    for file, part in own.items():
        save_file({piece.key: tensors[piece.key].contiguous() for piece in part}, folder / file)
    hashed = {file: sealed.SealedFile.of(folder / file) for file in own}
    for file in own:  # after all are written, because a flush waits for what others write as well
        files.fsync(folder / file)
    return hashed


def _seal(
    folder: Path, parts: dict[str, list[Piece]], record: dict[str, Any], hashed: dict[str, sealed.SealedFile]
) -> Manifest:
    """Write the index of all files and the manifest; the weights are read again for their digests."""
    file_of = {piece.key: file for file, part in parts.items() for piece in part}
    total = sum(piece.bytes for part in parts.values() for piece in part)
    files.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
    opened = {file: safe_open(folder / file, "pt") for file in parts}
    tensors = {
        name: [opened[file_of[key]].get_tensor(key) for key in keys]  # mapped, not read
        for name, keys in keys_of(file_of).items()
    }
    averaged = {n.replace(AVERAGE, "model.", 1): t for n, t in tensors.items() if n.startswith(AVERAGE)}
    fields = {
        "format": Manifest.FORMAT if len(file_of) == len(tensors) else Manifest.SLICED,
        **record,
        "weights": weights_digest(tensors),
        "averaged_weights": weights_digest({**tensors, **averaged}) if averaged else None,
        "files": hashed,
    }
    plain = sealed.seal(folder, MANIFEST, fields, digest=True)
    return Manifest.parse(plain, folder / MANIFEST)


def space_needed(needed: int, folder: Path) -> str:
    """Return how many bytes are ``needed`` and how many are free, for an error message."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"it needs {needed:,} bytes, {shutil.disk_usage(existing).free:,} are free"


def retain(root: Path, shares: int = 0) -> None:
    """Delete checkpoints; keep the `NEWEST`, the best, and those `at_shares` of the stage."""
    kept = {link_best(root), *at_shares(root, shares)}
    for path in steps(root)[:-NEWEST]:
        if path not in kept:
            sealed.remove(path)


def link_best(root: Path) -> Path | None:
    """Point the link ``best`` at the best checkpoint; return that checkpoint, or None if there is none.

    `best` chooses it by the manifests. After a kill the next save or start corrects the link.
    """
    found = best(root)
    path = found[0] if found else None
    link = root / BEST
    beside = root / f".{BEST}.tmp"
    try:
        if path is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != path.name:
            beside.unlink(missing_ok=True)
            beside.symlink_to(path.name)
            os.replace(beside, link)
    except OSError as error:
        log.warning(
            "%s: cannot be linked (%s); `spider checkpoint list` shows the best checkpoint",
            link, error.strerror,
        )  # fmt: skip
    return path


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to ``{why}-{name}``, so that nothing takes it for a good one."""
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    link_best(path.parent)
    return aside


def clean(root: Path) -> None:
    """Remove the hidden folders of a killed process. Only the holder of the folder's lock may call it."""
    for path in root.glob(".step-[0-9]*.*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock on ``folder``, so that only this process trains in it.

    The kernel releases the lock when the process ends in any way.

    Raises:
        TrainingError: another process holds the lock (the message names it), or the folder cannot be written.
    """
    stage = StageFolder(folder)
    lock = filelock.FileLock(stage.lock, timeout=0)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        files.write_json(stage.holder, holder)
    except filelock.Timeout:
        raise TrainingError(f"{_holder(stage)}; wait for it, or stop it, and run again") from None
    except OSError as error:
        lock.release(force=True)
        raise TrainingError(
            f"{folder}: cannot be written: {error.strerror}; free some space or name another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def wait_for(folder: Path) -> None:
    """Wait until no process trains in ``folder``.

    The trainer of a killed workflow may still run. The next workflow continues from its checkpoints.
    """
    stage = StageFolder(folder)
    if not stage.lock.exists():
        return
    lock = filelock.FileLock(stage.lock)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.warning("%s; waiting for it to end", _holder(stage))
        lock.acquire()
    lock.release()


def _holder(stage: StageFolder) -> str:
    """Return a message that names the process that holds the lock."""
    message = f"{stage.path}: another trainer is at work here"
    with contextlib.suppress(ValueError, KeyError, TypeError):  # its file may not be written yet
        holder = files.read_json(stage.holder)
        message += f": process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return message


def claim(folder: Path, origin: Origin) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None to start at the beginning of the stage.

    Only the holder of the lock may call this. The module's docstring has the rule.

    Raises:
        TrainingError: the folder holds an unfinished training of another origin, or another version wrote it.
    """
    stage = StageFolder(folder)
    clean(stage.checkpoints)
    if stage.origin.exists():
        before = Origin.read(stage.origin)
        if changed := _changed(before.fields, origin.fields):
            _retire(stage, before.identity, changed)
    elif steps(stage.checkpoints):
        raise TrainingError(
            f"{stage.checkpoints}: checkpoints without {stage.origin.name}, so their training is unknown; "
            "move the folder away"
        )
    good, bad = Checkpoint.newest_good(stage.checkpoints)
    for path in bad:
        log.warning("%s: damaged, kept as %s", path, set_aside(path, "corrupt").name)
    link_best(stage.checkpoints)
    if good is not None:
        log.info("%s: going on from %s", folder, good.path.name)
    elif bad:
        log.warning("%s: no checkpoint is usable, starting at the beginning of the stage", folder)
    if good is not None:  # a digest of the same settings may be another one in another version
        origin = origin.model_copy(update={"identity": good.training.identity})
    origin.write(stage.origin)
    return good


def _retire(stage: StageFolder, identity: str, changed: list[str]) -> None:
    """Move a finished training of another origin to a folder of its own.

    Raises:
        TrainingError: the training is not finished.
    """
    folder = stage.path
    saved = steps(stage.checkpoints)
    differing = "\n  ".join(changed)
    finished = not saved
    with contextlib.suppress(CheckpointError):  # an unreadable manifest does not show that it finished
        finished = finished or Manifest.read(saved[-1] / MANIFEST).final
    if not finished:
        raise TrainingError(
            f"{folder}: holds unfinished training (up to {saved[-1].name}) under other settings:\n"
            f"  {differing}\n"
            f"Restore these settings to continue it, move {folder} away to start again, or train in "
            "another folder (--ckpt-dir)."
        )
    candidates = (folder / f"superseded-{identity}-{n}" for n in count())
    aside = next(path for path in candidates if not path.exists())
    aside.mkdir()
    # The origin is moved last, so that the next start after a kill in between moves the rest.
    for path in (
        stage.checkpoints, stage.scores, stage.metrics, stage.samples, stage.receipt, stage.origin
    ):  # fmt: skip
        if path.exists():
            os.rename(path, aside / path.name)
    files.fsync(folder)
    log.warning(
        "%s: settings changed, starting again; the old training is in %s:\n  %s",
        folder, aside.name, differing,
    )  # fmt: skip


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the `differences` between two origins, with the defaults that the files leave out."""
    with contextlib.suppress(ValueError):  # compare them as written if this version lacks one of their keys
        before, now = StageSpec.with_defaults(recut(before)), StageSpec.with_defaults(now)
    # Without `strict_code` any code may continue a training.
    before = {key: value for key, value in before.items() if key in now or key != "code"}
    # The origin has the windows of a step there, so that another cut of the same windows continues.
    return [line.replace(".micro_batch:", ".micro_batch x grad_accum:") for line in differences(before, now)]


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """Return the leaves that differ between two JSON values, as ``settings.lr: 0.0003 -> 0.0002``."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {key: f"{at}.{key}" if at else key for key in {**before, **now}}
        return [leaf for k, to in keys.items() for leaf in differences(before.get(k), now.get(k), to)]
    return [] if before == now else [f"{at}: {before} -> {now}"]
