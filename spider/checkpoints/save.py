"""Save checkpoints: folders that are whole or absent, and that hold no code. `load` reads them.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights
        model-00002-of-00002.safetensors    the state of the optimizer
        model.safetensors.index.json        the file of each tensor
        tokenizer.json                      the vocabulary, if the data has a learned one
        manifest.json                       step, spec, ..., the hashes of the files and its own digest
    checkpoints/best                        a link to the checkpoint that validated best, which is kept

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``. If a stage averages its
weights, a third file holds the average as ``ema.{parameter}``, and evaluation reads that. One process writes
whole tensors, and each of several processes reads only its slices. So a checkpoint does not depend on the
number of processes.

torch's distributed checkpoints (DCP) also do this, but their import takes as long as half of torch's, in
every job. Their default storage keeps its index in a pickle, and reading a pickle runs the code in it.

A checkpoint is a sealed folder (`spider.common.sealed`). A process can be killed at any moment: a folder
named ``step-...`` was complete once. Its hashes show whether it is still complete.

Writing takes seconds, and training continues meanwhile with its own tensors and with the interpreter:
``safetensors`` writes without a copy and without Python's lock. The digest of the weights is another hash of
the same bytes. So weights and their average are hashed twice, and the optimizer's state once.

Training waits only while `Saver` copies the state and looks for numbers that are not finite. The copy takes
its size once more in host memory, which is reused for the next save. It is pinned for a GPU, because copies
into pinned memory are several times as fast. The first save of a training is slower, because it allocates
this memory, rounded up to a power of two for each tensor.

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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spider.checkpoints.load import AVERAGE, Checkpoint, not_finite
from spider.checkpoints.records import BEST, INDEX, MANIFEST, NEWEST, Manifest, Origin, at_shares, best, steps
from spider.common import files, sealed
from spider.common.errors import CheckpointError, Diverged, TrainingError
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.config.spec import recut
from spider.model.interface import weights_digest
from spider.processes.parallel import full_tensor
from spider.processes.world import ALONE, World
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)

_FILE_BYTES = 2 << 30


class Saver:
    """Save checkpoints into ``root`` in the background, and delete those that `retain` does not keep.

    Of several processes the first one writes, and the others take part in gathering the tensors that they
    hold. At most one save is in progress. Its error is raised at the next step after its end. A kill before
    its end leaves the checkpoint before it as the newest.

    Attributes:
        newest: the newest checkpoint on disk, as far as this process has noticed.
        begun: the run's step of the last save that was begun, in every process.
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
        self._tokenizer = tokenizer
        self._copies: dict[str, Tensor] = {}
        # Lower the priority of the thread, so that it does not slow the steps. Only a Linux thread has a
        # priority of its own; elsewhere ``nice`` would slow the whole process.
        nice: dict[str, Any] = {"initializer": os.nice, "initargs": (10,)} if sys.platform == "linux" else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", **nice)
        self._pending: Future[Checkpoint] | None = None

    def start(self, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Copy the tensors and begin to save the copy; wait for the save before it first.

        Raises:
            Diverged: in every process, if a tensor is not finite. Nothing is saved then.
        """
        self.settle()
        began = time.perf_counter()
        self.begun = record["global_step"]
        # The saver's thread does not check, because OpenMP would start threads for it that slow every step.
        if wrong := not_finite(self._copy(tensors)):
            raise Diverged(f"the state is {wrong}")
        if not self._world.first:
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        copies = {name: self._copies[name] for name in tensors}
        self._pending = self._thread.submit(self._save, copies, record, began)

    def _copy(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Copy each tensor to the host, in the first process, and yield it whole in every process."""
        for name, tensor in tensors.items():
            gathered = full_tensor(tensor.detach())
            if self._world.first:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(gathered, device="cpu", pin_memory=gathered.is_cuda)
                self._copies[name].copy_(gathered, non_blocking=True)
            yield name, gathered

    def _save(self, tensors: dict[str, Tensor], record: dict[str, Any], started: float) -> Checkpoint:
        saved = save(self.root, tensors, record, self._tokenizer)
        megabytes = sum(file.stat().st_size for file in saved.path.iterdir()) / 1e6
        seconds = time.perf_counter() - started
        log.info("checkpoint saved: %s, %.1f MB, %.1f s", saved.path, megabytes, seconds)
        retain(self.root, self._shares)
        return saved

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
    root: Path, tensors: Mapping[str, Tensor], record: dict[str, Any], tokenizer: Path | None = None
) -> Checkpoint:
    """Save a checkpoint as ``root/step-{record["global_step"]}``.

    Args:
        tensors: the tensors, by their names in the checkpoint.
        record: the fields of the manifest that describe the training.
        tokenizer: the ``tokenizer.json`` to copy into it.

    Raises:
        CheckpointError: the file system refuses. Nothing of the attempt remains, and earlier checkpoints are
            intact.
    """
    folder = root / f"step-{record['global_step']:08d}"
    try:
        with sealed.writing(folder) as beside:
            hashed = _write_tensors(beside, tensors)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, beside / TOKENIZER)
            averaged = {
                n.replace(AVERAGE, "model.", 1): t for n, t in tensors.items() if n.startswith(AVERAGE)
            }
            fields = {
                "format": Manifest.FORMAT,
                **record,
                "weights": weights_digest(tensors),
                "averaged_weights": weights_digest({**tensors, **averaged}) if averaged else None,
                "files": hashed,
            }
            plain = sealed.seal(beside, MANIFEST, fields, digest=True)
            manifest = Manifest.parse(plain, beside / MANIFEST)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"{folder}: saving failed: {reason}; {space_needed(tensors, root)}. "
            f"Earlier checkpoints are intact: free some space and run again to continue"
        ) from error
    return Checkpoint(folder, manifest)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, sealed.SealedFile]:
    """Write each kind of tensors into files of its own, and the index of all files; return the former."""
    parts: list[dict[str, Tensor]] = []
    filled = 0
    previous = ""
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        if kind != previous or filled + tensor.nbytes > _FILE_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
        previous = kind
    file_of: dict[str, str] = {}
    hashed: dict[str, sealed.SealedFile] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, folder / file)
        hashed[file] = sealed.SealedFile.of(folder / file)
        file_of |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
    return hashed


def space_needed(tensors: Mapping[str, Tensor], folder: Path) -> str:
    """Return how many bytes the tensors need and how many are free, for an error message."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed = sum(t.nbytes for t in tensors.values())
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
