"""Files of text: which ones a source lists, and how much of them it takes.

A part of a glob that exists is a name: `corpus [v].jsonl` is that file if there is one. `**` stands for any
number of folders, the last of which may be a link. A folder that is read whole follows no links to folders,
and both leave hidden names out. The cost is one listing of each folder, and one `stat` of each file.

``take: 30 MB`` is an amount of text, ``take: 5%`` a share of the rows. Row groups of all files are read in
one order until the amount is reached (`spider.data.take`). The parts of the dataset are sections of that
order, so a larger amount adds parts and keeps those that are full.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Hashable, Iterable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from spider.config.block import ConfigError
from spider.config.data import Dataset, Source

#: The kinds of files, for messages.
KINDS = (
    ".parquet, .arrow, .feather, .jsonl (or .ndjson), .json, .csv, .txt (the last four also .gz or .zst), "
    "or a folder"
)
#: The kinds of files that may be compressed.
COMPRESSIBLE = (".jsonl", ".json", ".csv", ".txt")
ARROW = (".arrow", ".feather")
_KINDS = (*COMPRESSIBLE, *ARROW, ".parquet")

#: Why a path that was found is not read.
HIDDEN, UNKNOWN, LINKED, REPEATED = "hidden", "of another kind", "a link to a folder", "named again"


def kind_of(name: str) -> str:
    """Return the kind of a file by its name, as ``.jsonl``; "" for a file that cannot be imported."""
    stem, kind = os.path.splitext(name.lower())
    packed = kind in (".gz", ".zst")
    kind = os.path.splitext(stem)[1] if packed else kind
    kind = ".jsonl" if kind == ".ndjson" else kind
    return kind if kind in (COMPRESSIBLE if packed else _KINDS) else ""


class Listing(NamedTuple):
    """The files that a list of names, globs and folders stands for."""

    files: dict[str, list[str]]
    """The files of each part, by its item: a file, or a folder with its texts. Each file is in one part."""
    left_out: dict[str, list[str]]
    """Paths that were found and are not read, by the reason."""


def list_files(patterns: list[str]) -> Listing:
    """Return the files that names, globs and folders stand for. A file belongs to the first that finds it.

    Raises:
        ConfigError: one of them finds no file of a known kind, or a folder has texts and other files.
    """
    files: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = {}
    seen: set[Hashable] = set()
    for pattern in patterns:
        paths = matches("files", pattern)
        found: dict[str, list[str]] = {}
        for path in paths:
            if os.path.isdir(path):
                found |= _parts_of(path, left_out)
                seen.add(same_file(path))
            elif kind_of(path) or paths == [pattern]:
                found[path] = [path]
            else:
                left_out.setdefault(UNKNOWN, []).append(path)
        if not found:
            raise ConfigError(f"source.files: {pattern} holds no file of a known kind; give {KINDS}")
        for item, names in found.items():
            for name in names:
                if (file := same_file(name)) in seen:
                    left_out.setdefault(REPEATED, []).append(name)
                else:
                    seen.add(file)
                    files.setdefault(item, []).append(name)
    for reason, paths in sorted(left_out.items()):
        unread = [one for one in once(sorted(paths)) if reason == REPEATED or same_file(one) not in seen]
        left_out.pop(reason)
        left_out |= {reason: unread} if unread else {}
    return Listing(files, left_out)


def _parts_of(folder: str, left_out: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what the parts of a folder are imported from: its files, or the folder itself for texts."""
    found = [str(path) for path in below(Path(folder), left_out)]
    texts = [path for path in found if kind_of(path) == ".txt"]
    others = [path for path in found if kind_of(path) != ".txt"]
    if texts and others:
        both = f"holds texts ({Path(texts[0]).name}) and other files ({Path(others[0]).name})"
        raise ConfigError(f"source.files: {folder} {both}; name the files to take, as in {folder}/*.jsonl")
    return {folder: texts} if texts else {path: [path] for path in others}


def texts_in(folder: Path) -> list[Path]:
    """Return the texts in a folder and below it, in order of their paths; hidden files are left out."""
    return [path for path in below(folder, {}) if kind_of(path.name) == ".txt"]


def below(folder: Path, left_out: dict[str, list[str]]) -> list[Path]:
    """Return the files of known kinds in a folder and below it, in order of their paths; add the others."""
    found = []
    for entry in walk(str(folder)):
        hidden, linked = entry.name.startswith("."), entry.is_symlink()
        if not entry.is_dir() and not hidden and kind_of(entry.name):
            found.append(Path(entry.path))
        elif hidden or linked or not entry.is_dir():
            reason = HIDDEN if hidden else LINKED if entry.is_dir() else UNKNOWN
            left_out.setdefault(reason, []).append(entry.path)
    return sorted(found, key=Path.as_posix)


# ------------------------------------------------------------------------------------- names and globs


def expand(key: str, patterns: Iterable[str]) -> list[str]:
    """Return the paths that globs and names stand for, each file once."""
    return once(path for pattern in patterns for path in matches(key, pattern))


def matches(key: str, pattern: str) -> list[str]:
    """Return the paths that a glob matches, sorted, or a path that is no glob as it is.

    Raises:
        ConfigError: it is a glob that matches nothing, or a folder cannot be read.
    """
    if not is_pattern(pattern):
        return [pattern]
    prefix = "" if pattern.startswith("./") else "./"
    names = re.sub(r"(^|/)(\*\*/)+", r"\1**/", pattern).split("/")
    found = {path.removeprefix(prefix) for path in _matches("", names)}
    if not found:
        raise ConfigError(f"source.{key}: no file matches {pattern!r}")
    return sorted(found)


def once(paths: Iterable[str]) -> list[str]:
    """Return the first name of each file, in their order."""
    first: dict[Hashable, str] = {}
    for path in paths:
        first.setdefault(same_file(path), path)
    return list(first.values())


def same_file(path: str) -> Hashable:
    """Return a value that all names of a file share, those of links among them."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.abspath(path)
    return found.st_dev, found.st_ino


def walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield all that is in a folder and below it, but nothing below a hidden folder or a link to one."""
    for entry in _inside(folder):
        yield entry
        if entry.is_dir(follow_symlinks=False) and not _hidden(entry):
            yield from walk(entry.path)


def _inside(folder: str) -> list[os.DirEntry[str]]:
    """Return what a folder holds. Raise `ConfigError` if it cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            return list(entries)
    except PermissionError:
        raise ConfigError(f"source: {folder} cannot be read; check its permissions") from None


def _matches(folder: str, names: list[str]) -> Iterator[str]:
    """Yield what the parts of a glob match in a folder, whose path is empty or ends in a slash."""
    name, *rest = names
    if not is_pattern(name) or os.path.lexists(folder + name):
        found = [folder + name]
    elif not os.path.isdir(folder or "."):
        return
    elif name != "**":
        written = re.compile(fnmatch.translate(name.replace("[^", "[!")))
        entries = [one for one in _inside(folder) if name.startswith(".") or not _hidden(one)]
        found = [folder + one.name for one in entries if written.match(one.name)]
    else:
        inside = [one for one in walk(folder) if not _hidden(one)]
        if rest in ([], ["*"]):  # all files, so no folder is read whole
            yield from (one.path for one in inside if not one.is_dir())
            return
        yield from _matches(folder, rest)
        found = [one.path for one in inside if one.is_dir()]  # a link to one too, but nothing deeper in it
    for path in found:
        if rest:
            yield from _matches(f"{path}/", rest)
        elif os.path.lexists(path):
            yield path


def _hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
#: Bytes of text in a part.
PART_BYTES = 4 * 10**9


class Section(NamedTuple):
    """A section of the order of row groups. It holds the row groups that begin in it."""

    first: Decimal
    last: Decimal
    of_rows: bool
    """Whether the limits are shares of all rows. Otherwise they are bytes of text."""

    @property
    def name(self) -> str:
        """Name for records and messages."""
        if self.of_rows:
            return f"row groups with {(100 * self.last).normalize():f}% of the rows"
        return f"row groups from {self.first:,} to {self.last:,} bytes of text"


def sections(take: str) -> list[Section]:
    """Return the section of each part.

    Raises:
        ValueError: the text is not an amount.
    """
    found = re.fullmatch(r"([-+]?\d+(?:\.\d+)?) ?([a-zA-Z]+|%)", take.strip())
    if not found or found[2] not in (*_UNITS, "%"):
        raise ValueError(f"must be a size or a share, such as 30 MB, 10 GB or 5% (got {take!r})")
    amount = Decimal(found[1])
    if amount <= 0:
        raise ValueError(f"must be above 0 (got {take!r})")
    if found[2] == "%":
        if amount > 100:
            raise ValueError(f"must be at most 100% (got {take!r})")
        return [Section(Decimal(0), amount / 100, of_rows=True)]
    size = int(amount * _UNITS[found[2]])
    if not size:
        raise ValueError(f"must be at least 1 B (got {take!r})")
    begins = range(0, size, PART_BYTES)
    return [Section(Decimal(at), Decimal(min(at + PART_BYTES, size)), of_rows=False) for at in begins]


@cache
def _by_name(take: str, part_bytes: int) -> dict[str, Section]:
    return {section.name: section for section in sections(take)}


def _checked(take: Any) -> Any:
    if take is not None:
        sections(str(take))
    return None if take is None else str(take).strip()


class TakingSource(Source):
    """Base class of the sources of files that have the key `take`."""

    take: Annotated[str | None, BeforeValidator(_checked)] = None
    """Read only so much text, such as ``30 MB``, or such a share of the rows, as ``5%`` (null: all)."""

    def files_of_parts(self) -> list[str]:
        """Return the file of each part without `take`. With it, row groups of all of them are taken."""
        raise NotImplementedError

    def items(self) -> list[str]:
        files = self.files_of_parts()
        return files if self.take is None else [*_by_name(self.take, PART_BYTES)]

    def section(self, part: str) -> Section:
        """Return the section of a part."""
        assert self.take is not None
        self.item(part)
        return sections(self.take)[int(part)]

    def taken(self, size: int) -> int:
        """Estimate how many bytes are taken of files of ``size`` bytes."""
        if self.take is None:
            return size
        last = sections(self.take)[-1]
        return int(size * last.last) if last.of_rows else min(size, int(last.last))

    @property
    def text_bytes(self) -> int | None:
        last = sections(self.take)[-1] if self.take else None
        return None if last is None or last.of_rows else int(last.last)

    def estimated_bytes(self, item: str) -> int:
        if self.take is None:
            return super().estimated_bytes(item)
        section = _by_name(self.take, PART_BYTES)[item]
        size = 0 if section.of_rows else int(section.last - section.first)
        return size // 3  # of compressed text

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that decide a part. A part that is taken has the configured columns."""
        decides = super().identity(item, dataset)
        if self.take is not None:
            del decides["take"]
            decides |= {"of": self.files_of_parts(), "columns": list(dataset.columns)}
        return decides


def is_pattern(name: str) -> bool:
    """Return whether a name is a glob."""
    return bool(re.search(r"[*?\[]", name))
