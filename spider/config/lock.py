"""The lock file of a hub source: the files that its globs match at one commit, with their row groups.

``spider data resolve`` writes it once, with a network. It is committed beside the configuration, so reading a
configuration uses no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from spider import files
from spider.config.block import ConfigError
from spider.record import Record

COMMAND = "run `spider data resolve CONFIG`, which needs a network"


class LockedFile(BaseModel):
    """A file of the repository at the commit."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    name: str
    size: int
    hash: str
    """``sha256:...`` or ``git:...``, as the hub states it."""
    rows: list[int]
    """Rows of each row group. A file that is not parquet has none."""
    text_bytes: list[int]
    """Bytes of text in each row group."""


class Lock(Record):
    """The files that a hub source names, as they are at one commit."""

    WHAT: ClassVar[str] = "a lock file"
    REMEDY: ClassVar[str] = COMMAND
    ERROR: ClassVar[type[ValueError]] = ConfigError

    repo: str
    revision: str
    """Revision of the configuration, which may be a branch."""
    commit: str
    patterns: list[str]
    """Names and globs of the configuration."""
    text_column: str
    files: list[LockedFile]

    def save(self, path: Path) -> None:
        """Write the lock with one line for each file."""
        head = json.dumps(self.model_dump(mode="json", exclude={"files"}), indent=1)
        lines = ",\n".join(one.model_dump_json() for one in self.files)
        files.write_text(path, f'{head[:-2]},\n "files": [\n{lines}\n ]\n}}\n')
