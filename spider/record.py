"""The JSON files that one job leaves and others read: one shape each, read in one way.

A record is frozen once it is made. A reader checks its ``format`` before anything else, and what is wrong
with a file is said with its path and with what to do. ``FORMAT`` is raised when the meaning of a field
changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from spider import files
from spider.config.block import key_path


class Record(BaseModel):
    """Base of all of them; a subclass says what it is, its format, and how one is made again."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str]
    """``a receipt``"""
    REMEDY: ClassVar[str]
    """``train that stage again``"""
    ERROR: ClassVar[type[ValueError]] = ValueError

    format: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record at ``path``.

        Raises:
            ValueError: the record is missing, malformed, incomplete or of another format. The class of the
                error is `ERROR`.
        """
        try:
            plain = files.read_json(path)
        except ValueError as error:
            raise cls.ERROR(str(error)) from None
        return cls.parse(plain, path)

    @classmethod
    def parse(cls, plain: Any, path: Path) -> Self:
        """Validate what was read from ``path``."""
        version = plain.get("format") if isinstance(plain, dict) else None
        if version != cls.FORMAT:
            problem = f"of format {version!r}, this Spider reads {cls.FORMAT}"
            raise cls.ERROR(f"{path}: {cls.WHAT} {problem}; {cls.REMEDY}")
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            wrong = "; ".join(f"{key_path(one['loc'])}: {one['msg']}" for one in error.errors()[:3])
            raise cls.ERROR(f"{path}: {cls.WHAT} that is not whole ({wrong}); {cls.REMEDY}") from None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> Self:
        """Write it whole or not at all, and return it."""
        files.write_json(path, self.plain())
        return self
