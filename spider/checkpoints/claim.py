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
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from spider import files
from spider.checkpoints import format as checkpoint
from spider.config import StageSpec
from spider.errors import TrainingError

log = logging.getLogger(__name__)

FORMAT = 1
CHECKPOINTS, METRICS, ORIGIN = "checkpoints", "metrics.jsonl", "origin.json"


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only trainer in ``folder``. The kernel drops the lock when its holder dies, however it dies.

    Raises:
        TrainingError: another process holds it (which, where, since when), or the folder cannot be written.
    """
    card = folder / ".lock.json"
    lock = filelock.FileLock(folder / ".lock", timeout=0)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        files.write_json(card, {"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    except filelock.Timeout:
        raise TrainingError(f"{folder}: {_holder(card)}; wait for it, or stop it, and run again") from None
    except OSError as error:
        lock.release(force=True)
        raise TrainingError(
            f"{folder}: cannot write there: {error.strerror}; free some space or give another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _holder(card: Path) -> str:
    try:
        who = files.read_json(card)
        return f"another trainer is at work here: process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another trainer is at work here"


def claim(folder: Path, origin: dict[str, Any]) -> checkpoint.Checkpoint | None:
    """Apply the rule above; the caller holds the lock.

    Args:
        origin: ``identity`` and the JSON-like fields it stands for, under ``fields``.

    Returns:
        the checkpoint to go on from, or None to start at the stage's beginning.

    Raises:
        TrainingError: the folder holds unfinished work of another origin, or was made by another version.
    """
    root = folder / CHECKPOINTS
    checkpoint.clean(root)
    before = _read_origin(folder)
    if before is None:
        if checkpoint.steps(root):
            raise TrainingError(
                f"{root}: checkpoints without {ORIGIN}, whose they are is unknown; move the folder away"
            )
    elif changed := differences(StageSpec.deciding_in(before["fields"]), origin["fields"]):
        _retire(folder, before, changed)
    good, bad = checkpoint.newest_good(root)
    for path in bad:
        log.warning("%s: damaged, kept as %s", path, checkpoint.quarantine(path).name)
    if good is not None:
        log.info("%s: going on from %s", folder, good.path.name)
    elif bad:
        log.warning("%s: no checkpoint is usable, starting at the beginning of the stage", folder)
    files.write_json(folder / ORIGIN, {"format": FORMAT, **origin})
    return good


def _read_origin(folder: Path) -> dict[str, Any] | None:
    path = folder / ORIGIN
    if not path.exists():
        return None
    origin = files.read_json(path)
    version = origin.get("format") if isinstance(origin, dict) else None
    if version != FORMAT:
        raise TrainingError(
            f"{path}: results of format {version!r}, this Spider writes {FORMAT}; move {folder} away, or use "
            "the version that made it"
        )
    return origin


def _retire(folder: Path, before: dict[str, Any], changed: list[str]) -> None:
    root = folder / CHECKPOINTS
    names = checkpoint.steps(root)
    if names and not _finished(names[-1]):
        raise TrainingError(
            f"{folder}: holds unfinished training (up to {names[-1].name}) under other settings:\n  "
            + "\n  ".join(changed)
            + f"\nRestore these settings to go on with it, move {folder} away to start afresh, or train in "
            "another folder (--ckpt_dir)."
        )
    n = 0
    while (aside := folder / f"superseded-{before['identity']}-{n}").exists():
        n += 1
    aside.mkdir()
    # The origin goes last: a kill in between finds it still there and moves the rest.
    for name in (CHECKPOINTS, METRICS, "train.json", ORIGIN):
        if (folder / name).exists():
            os.rename(folder / name, aside / name)
    files.fsync_dir(folder)
    log.warning(
        "%s: settings changed, starting afresh; the old training is in %s:\n  %s",
        folder,
        aside.name,
        "\n  ".join(changed),
    )


def _finished(path: Path) -> bool:
    try:
        return bool(checkpoint.read_manifest(path).get("final"))
    except checkpoint.CheckpointError:
        return False


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """Leaves that differ between two JSON values, as ``settings.lr: 0.0003 -> 0.0002``."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in {**before, **now}:
            where = f"{at}.{key}" if at else key
            found += differences(before.get(key), now.get(key), where)
        return found
    return [] if before == now else [f"{at}: {before} -> {now}"]
