"""The base class of the JSON files that one job writes and others read.

A record is immutable. Reading it checks its ``format`` first. Each error names the file and the remedy.
``FORMAT`` grows when the meaning of a field changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from spider.common import files


class Record(BaseModel):
    """Base class of all records; a subclass sets the class attributes for its error messages."""

    # A job reads few of the kinds of records, so each is built at its first use.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), defer_build=True)

    FORMAT: ClassVar[int] = 1
    ALSO: ClassVar[tuple[int, ...]] = ()
    """Further formats that this version reads."""
    WHAT: ClassVar[str]
    """Name of the file in messages, such as ``a receipt``."""
    REMEDY: ClassVar[str] = "delete it and run {command}, which makes it again"
    """Remedy for a bad file. Snakemake makes a lost file only if it is named, or if another job needs it."""
    ERROR: ClassVar[type[ValueError]] = ValueError
    """Class of the errors of `read` and `parse`."""

    format: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record at ``path``.

        Raises:
            ValueError: the record is missing, malformed, incomplete or of another format (class `ERROR`).
        """
        try:
            plain = files.read_json(path, cls.remedy(path))
        except ValueError as error:
            raise cls.ERROR(str(error)) from None
        return cls.parse(plain, path)

    @classmethod
    def parse(cls, plain: Any, path: Path) -> Self:
        """Validate the JSON value that was read from ``path``; raise as `read`."""
        version = plain.get("format") if isinstance(plain, dict) else None
        known = (cls.FORMAT, *cls.ALSO)
        if version not in known:
            problem = f"of format {version!r}, this Spider reads {' and '.join(map(str, known))}"
            raise cls.ERROR(f"{path}: {cls.WHAT} {problem}; {cls.remedy(path)}")
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            wrong = "; ".join(f"{key_path(one['loc'])}: {one['msg']}" for one in error.errors()[:3])
            problem = f"that is not complete ({wrong})"
            raise cls.ERROR(f"{path}: {cls.WHAT} {problem}; {cls.remedy(path)}") from None

    @classmethod
    def remedy(cls, path: Path) -> str:
        """Return the remedy for the bad file at ``path``."""
        return cls.REMEDY.format(command=files.snakemake(path))

    def plain(self) -> dict[str, Any]:
        """Return the record as a JSON value."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> Self:
        """Write the record to ``path``, whole or not at all, and return it."""
        files.write_json(path, self.plain())
        return self


def key_path(loc: tuple[Any, ...]) -> str:
    """Return ``("runs", "demo", "stages", 1, "tokens")`` as ``runs.demo.stages[1].tokens``."""
    path = ""
    for part in loc:
        if part == "[key]":
            continue  # pydantic marks an error in a key with this part
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
