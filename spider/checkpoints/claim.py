"""Who may train in a stage's folder: one process at a time, and only the spec that began it.

``origin.json``, written before the first step, says what the folder's checkpoints and metrics belong to: the
spec, the data's digest, the digest of the weights the stage started from. A stage that comes back with
another origin

- and whose old training *finished*: the old checkpoints and metrics are moved to
  ``superseded-{identity}-{n}/``, and the stage starts afresh (the user changed the configuration and asked
  for the run again);
- and whose old training stands *unfinished*, with checkpoints: is refused, naming each field that differs.
  Nobody abandons days of work by a typo;
- and which never reached a checkpoint: starts afresh, there is nothing to lose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import filelock

from spider import files
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, Origin, steps
from spider.checkpoints.save import clean, name_best
from spider.config import StageSpec
from spider.errors import CheckpointError, TrainingError
from spider.results import StageFolder

log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only trainer in ``folder``. The kernel drops the lock when its holder dies, however it dies.
    `TrainingError` says which process, where, since when holds it, or that nothing can be written."""
    stage = StageFolder(folder)
    lock = filelock.FileLock(stage.lock, timeout=0)
    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        files.write_json(stage.holder, me)
    except filelock.Timeout:
        raise TrainingError(f"{_who(stage)}; wait for it, or stop it, and run again") from None
    except OSError as error:
        lock.release(force=True)
        raise TrainingError(
            f"{folder}: cannot write there: {error.strerror}; free some space or give another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def wait_for(folder: Path) -> None:
    """Until nobody trains in ``folder``. A workflow that was killed leaves its trainer at work; the next one
    takes over what that has made."""
    stage = StageFolder(folder)
    if not stage.lock.exists():
        return
    lock = filelock.FileLock(stage.lock)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.warning("%s; waiting for it to end", _who(stage))
        lock.acquire()
    lock.release()


def _who(stage: StageFolder) -> str:
    who = f"{stage.path}: another trainer is at work here"
    with contextlib.suppress(ValueError, KeyError, TypeError):  # it may not have said yet
        card = files.read_json(stage.holder)
        who += f": process {card['pid']} on {card['host']}, since {card['since']}"
    return who


def claim(folder: Path, origin: Origin) -> Checkpoint | None:
    """Apply the rule above, by the holder of the lock: the checkpoint to go on from, or None to start at the
    stage's beginning. Raises `TrainingError` where the folder holds unfinished work of another origin, or was
    made by another version."""
    stage = StageFolder(folder)
    clean(stage.checkpoints)
    if stage.origin.exists():
        before = Origin.read(stage.origin)
        if changed := _changed(before.fields, origin.fields):
            _retire(stage, before.identity, changed)
    elif steps(stage.checkpoints):
        raise TrainingError(
            f"{stage.checkpoints}: checkpoints without {stage.origin.name}, whose they are is unknown; "
            "move the folder away"
        )
    good, bad = Checkpoint.newest_good(stage.checkpoints)
    for path in bad:  # out of the numbered ones, so that retention does not take it for a good one
        aside = path.with_name(f"corrupt-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        log.warning("%s: damaged, kept as %s", path, path.rename(aside).name)
    name_best(stage.checkpoints)
    if good is not None:
        log.info("%s: going on from %s", folder, good.path.name)
    elif bad:
        log.warning("%s: no checkpoint is usable, starting at the beginning of the stage", folder)
    origin.write(stage.origin)
    return good


def _retire(stage: StageFolder, identity: str, changed: list[str]) -> None:
    """Move a finished training of another origin out of the way."""
    folder, saved, told = stage.path, steps(stage.checkpoints), "\n  ".join(changed)
    finished = not saved
    with contextlib.suppress(CheckpointError):  # of which nobody knows: it may not have been
        finished = finished or Manifest.read(saved[-1] / MANIFEST).final
    if not finished:
        raise TrainingError(
            f"{folder}: holds unfinished training (up to {saved[-1].name}) under other settings:\n  {told}\n"
            f"Restore these settings to go on with it, move {folder} away to start afresh, or train in "
            "another folder (--ckpt_dir)."
        )
    asides = (folder / f"superseded-{identity}-{n}" for n in count())
    aside = next(path for path in asides if not path.exists())
    aside.mkdir()
    # The origin goes last: a kill in between finds it still there and moves the rest.
    for path in (stage.checkpoints, stage.metrics, stage.receipt, stage.origin):
        if path.exists():
            os.rename(path, aside / path.name)
    files.fsync_dir(folder)
    log.warning(
        "%s: settings changed, starting afresh; the old training is in %s:\n  %s", folder, aside.name, told
    )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the `differences` of what decided two trainings, with the defaults that are not written down."""
    with contextlib.suppress(ValueError):  # a key that this version does not know: as they were written
        before, now = StageSpec.with_defaults(before), StageSpec.with_defaults(now)
    return differences(before, now)


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """Leaves that differ between two JSON values, as ``settings.lr: 0.0003 -> 0.0002``."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {key: f"{at}.{key}" if at else key for key in {**before, **now}}
        return [leaf for k, to in keys.items() for leaf in differences(before.get(k), now.get(k), to)]
    return [] if before == now else [f"{at}: {before} -> {now}"]
