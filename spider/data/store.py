"""Share downloaded and encoded parts between results folders, by a digest of all that decides them.

An entry is a sealed folder ``{store}/{kind}/{digest}``. Its files are copied, because Snakemake sets the time
of each output. A hard link would change that time in all results folders, and their jobs would run again. A
file system with reflinks, such as XFS or Btrfs, stores the bytes once.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from spider.codefiles import deciding_code
from spider.config import Config
from spider.files import digest, replacing
from spider.record import Record
from spider.sealed import SealedFile, damage, seal, writing

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of how parts are made. It grows when the same settings make other files."""
MANIFEST = "entry.json"
FICLONE = 0x40049409
"""The request of Linux that makes a file share the bytes of another one."""


class Manifest(Record):
    """``entry.json``: the files of an entry, and what decides them."""

    WHAT: ClassVar[str] = "an entry of the store"
    REMEDY: ClassVar[str] = "delete its folder"

    of: dict[str, Any]
    files: dict[str, SealedFile]


@dataclass(frozen=True)
class Entry:
    """An entry of a store, which may not exist yet."""

    store: Path
    kind: str
    of: dict[str, Any]
    """All that decides its files."""

    @property
    def path(self) -> Path:
        return self.store / self.kind / digest({"format": FORMAT, **self.of})

    def take(self, outputs: Mapping[str, Path]) -> bool:
        """Copy the files to these paths, and return whether the entry exists and is whole."""
        if not self.path.exists():
            return False
        try:
            listed = Manifest.read(self.path / MANIFEST).files
            problems = damage(self.path, {name: listed[name] for name in outputs})
            if not problems:
                with ExitStack() as whole:  # renames in the order of the outputs
                    names = [*outputs][::-1]
                    beside = {name: whole.enter_context(replacing(outputs[name])) for name in names}
                    for name, path in beside.items():
                        _copy(self.path / name, path)
        except (OSError, ValueError, KeyError) as error:
            problems = [f"{self.path}: {error}"]
        for problem in problems:
            log.warning("%s; the entry of the store cannot be used, so the part is made again", problem)
        if not problems:
            log.info("%s: taken from the store", self.path)
        return not problems

    def put(self, outputs: Mapping[str, Path]) -> None:
        """Copy these files into the store. Log a warning if it cannot be written."""
        try:
            with writing(self.path) as folder:
                for name, path in outputs.items():
                    _copy(path, folder / name)
                seal(folder, MANIFEST, {"format": Manifest.FORMAT, "of": self.of}, digest=False)
        except OSError as error:
            if not self.path.exists():  # Else another process was faster.
                log.warning("%s: not put into the store (%s)", self.path, error)


def _copy(source: Path, target: Path) -> None:
    """Copy a file. Both share their bytes on the disk where the file system can do so."""
    try:
        with open(source, "rb") as read, open(target, "wb") as written:
            fcntl.ioctl(written, FICLONE, read.fileno())
    except OSError:
        shutil.copyfile(source, target)


def entry_of(config: Config, kind: str, of: dict[str, Any]) -> Entry | None:
    """Return the entry of files that ``of`` decides, or None without a store.

    With ``strict_code`` the code decides them too.
    """
    if config.store is None:
        return None
    return Entry(Path(config.store), kind, of | ({"code": deciding_code()} if config.strict_code else {}))


def raw_entry(config: Config, dataset: str, part: str) -> Entry | None:
    """Return the entry of a downloaded part, or None without a store or if its content may change."""
    spec = config.dataset(dataset)
    if not spec.source.pinned:
        return None
    return entry_of(config, "raw", spec.source.identity(spec.source.item(part), spec))


def is_stored(config: Config, dataset: str, part: str) -> bool:
    """Return whether a downloaded part is in the store."""
    entry = raw_entry(config, dataset, part)
    return entry is not None and entry.path.exists()
