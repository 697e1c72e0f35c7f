"""The key ``take`` of a source: how much of its text is read, and which part of the dataset holds what.

``take: 30 MB`` is an amount of text, ``take: 5%`` a share of the rows. Row groups of all files are read in
one order until the amount is reached (`spider.data.take`). The parts of the dataset are sections of that
order, so a larger amount adds parts and keeps those that are full.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from spider.config.data import Dataset, Source

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

    def contents(self) -> Any:
        """Return what identifies the content of all files."""
        return self.files_of_parts()

    def items(self) -> list[str]:
        files = self.files_of_parts()
        return files if self.take is None else [section.name for section in sections(self.take)]

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
        section = sections(self.take)[self.items().index(item)]
        size = 0 if section.of_rows else int(section.last - section.first)
        return size // 3  # of compressed text

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that decide a part. A part that is taken has the configured columns."""
        decides = super().identity(item, dataset)
        if self.take is not None:
            del decides["take"]
            decides |= {"of": self.contents(), "columns": list(dataset.columns)}
        return decides


def is_pattern(name: str) -> bool:
    """Return whether a name is a glob."""
    return bool(re.search(r"[*?\[]", name))
