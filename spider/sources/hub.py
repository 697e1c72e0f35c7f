"""Parquet files of a Hugging Face dataset repository, downloaded once at a pinned revision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from spider.config.data import Dataset, Files, Source


class HubSource(Source):
    """Named parquet files of a Hugging Face dataset repository at a pinned revision. Each file is a part."""

    LISTS: ClassVar = frozenset({"files"})

    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit (a branch may change during a run)."""
    files: Annotated[list[str], Field(min_length=1)]
    """Parquet files in the repository."""

    def items(self) -> list[str]:
        return self.files

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        from spider.data.hub import HubFile, download_file

        download_file(HubFile(self.repo, self.revision, self.item(part)), output)

    def probe(self, items: list[str], dataset: Dataset) -> int:
        from spider.data.encode import columns_in
        from spider.data.hub import HubFile, survey

        size, schema = survey(self.repo, self.revision, items)
        columns_in(schema, HubFile(self.repo, self.revision, items[0]), dataset)
        return size

    def learned_files(self) -> Files:
        return Files(f"hub {self.repo}", frozenset(self.files))

    @property
    def description(self) -> str:
        return f"{self.repo} at {self.revision}"

    @property
    def address(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def repository(self) -> str | None:
        return self.repo
