"""Sealed folders: files, and a manifest in JSON with the size and the SHA-256 of each of them.

Checkpoints, exported folders and n-gram indexes are sealed folders. The description of a dataset lists its
shards in another way, and takes its digest from here.

A new folder is written under a hidden name, flushed to disk, and renamed. It is removed the other way round:
renamed to a hidden name, then deleted. So a process that is killed at any moment never leaves half a folder
under a final name. Whether a folder is still what was written is checked by `damage`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from spider.common import files


class SealedFile(BaseModel, frozen=True):
    """The size and the hash of a file when it was written."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> SealedFile:
        """Hash the file at ``path``."""
        return cls(size=path.stat().st_size, sha256=files.sha256(path))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``folder``; rename it to ``folder`` on success, remove it on an error.

    An earlier ``folder`` is replaced. A kill between the two renames leaves it under its hidden name, because
    no portable step exchanges two directories.
    """
    beside = files.hidden(folder, "tmp")
    try:
        beside.mkdir(parents=True)
        yield beside
        old = _hide(folder) if folder.exists() else None
        os.rename(beside, folder)
        files.fsync(folder.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete a folder; a kill leaves it whole or under a hidden name."""
    shutil.rmtree(_hide(folder), ignore_errors=True)


def _hide(folder: Path) -> Path:
    old = files.hidden(folder, "old")
    os.rename(folder, old)
    return old


def seal(folder: Path, name: str, manifest: dict[str, Any], *, digest: bool) -> dict[str, Any]:
    """Write the manifest of a folder whose files are then all on disk, and return it as it was written.

    Args:
        name: the file name of the manifest.
        manifest: its other fields. ``files`` may have files that are hashed and on disk already; the others
            are read and flushed here.
        digest: add the `content_digest` of the manifest. A file that people may edit has none.
    """
    known = manifest.get("files", {})
    # On a network disk the list of the folder may lack files that another machine has just written.
    present = sorted({file.name for file in folder.iterdir()} | {*known})
    hashed = {file: known.get(file) or SealedFile.of(folder / file) for file in present}
    manifest = {**manifest, "files": {name: file.model_dump() for name, file in hashed.items()}}
    if digest:
        manifest["digest"] = content_digest(manifest)
    for file in hashed.keys() - known.keys():
        files.fsync(folder / file)
    files.write_json(folder / name, manifest)
    return manifest


def content_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest, computed without its field ``digest``."""
    return files.digest({key: value for key, value in manifest.items() if key != "digest"})


def damage(folder: Path, listed: Mapping[str, SealedFile], *, quick: bool = False) -> list[str]:
    """Return one line for each file that differs from the manifest; ``quick`` compares only the sizes."""
    damaged = []
    for name, expected in listed.items():
        file = folder / name
        if not file.is_file():
            damaged.append(f"{file}: missing")
        elif (size := file.stat().st_size) != expected.size:
            damaged.append(f"{file}: {size:,} bytes instead of {expected.size:,}")
        elif not quick and files.sha256(file) != expected.sha256:
            damaged.append(f"{file}: SHA-256 differs from the manifest")
    return damaged


def link(folder: Path, names: Iterable[str], output: Path) -> None:
    """Put files of a folder into the new folder ``output`` too: as hard links, or as copies on another disk.

    Files of a sealed folder are never written again, so two folders can share them.
    """
    output.mkdir()
    for name in names:
        try:
            os.link(folder / name, output / name)
        except OSError:
            shutil.copyfile(folder / name, output / name)
            files.fsync(output / name)
    files.fsync(output)
