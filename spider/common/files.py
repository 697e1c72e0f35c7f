"""Write files that are whole or absent: under a hidden name first, flushed to disk, then renamed.

A process that is killed at any moment never leaves half a file under a final name. `sealed` does the same for
folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Flush a file to disk, or the renames inside a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hidden(path: Path, end: str) -> Path:
    """Return a hidden path in the folder of ``path`` that no other process uses.

    Its random part is for containers that share a disk, because they may have processes of the same number.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{end}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside ``path``; on success flush it and rename it to ``path``, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = hidden(path, "tmp")
    try:
        yield beside
        fsync(beside)
        os.replace(beside, path)
        fsync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write text atomically, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, remedy: str = "delete it and run again") -> Any:
    """Parse a JSON file; raise ``ValueError`` with its path where it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {remedy}") from None


def snakemake(target: Path) -> str:
    """Return the command that makes a file of a results folder, for messages."""
    # Snakemake knows the files below the working folder by their relative paths.
    return f"`snakemake {shlex.quote(str(target).removeprefix(f'{Path.cwd()}/'))}`"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Return a short, stable hash of a JSON-like value; the order of keys does not change it."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive into ``folder``; raise ``tarfile.TarError`` for a member outside of it."""
    if hasattr(tarfile, "data_filter"):
        return archive.extractall(folder, filter="data")
    for member in archive.getmembers():  # Python before 3.11.4
        inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is not a file or folder inside")
    archive.extractall(folder)
