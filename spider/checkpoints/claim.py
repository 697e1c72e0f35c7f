"""Decide who may train in a stage's folder: one process at a time, and only the spec that began it.

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
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import filelock

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, Origin, steps
from spider.checkpoints.save import clean, link_best, set_aside
from spider.common import files
from spider.common.errors import CheckpointError, TrainingError
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.config.spec import recut

log = logging.getLogger(__name__)


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
    for path in (stage.checkpoints, stage.metrics, stage.samples, stage.receipt, stage.origin):
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
