"""Files of a Hugging Face dataset repository, downloaded once at a pinned revision.

A parquet file is kept as it is. Any other file is imported like a file of the user (`local`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from spider.config.block import wrong_key
from spider.config.data import Dataset, Files
from spider.data.listing import TakingSource, is_pattern
from spider.data.sources.local import import_local, imported, kind_of

if TYPE_CHECKING:
    from spider.data.hub import HubFile


class HubSource(TakingSource):
    """Files of a Hugging Face dataset repository at a pinned revision, of any kind that ``local`` reads.
    Each file is a part."""

    LISTS: ClassVar = frozenset({"files"})

    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit (a branch may change during a run)."""
    files: Annotated[list[str], Field(min_length=1)]
    """Files in the repository, each by its name; `spider data files` lists those that match a glob."""

    def files_of_parts(self) -> list[str]:
        return list(dict.fromkeys(self.files))

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        decides = super().identity(item, dataset)
        return decides | imported(dataset) if self._is_imported(item) else decides

    def check(self, dataset: Dataset) -> None:
        if pattern := next(filter(is_pattern, self.files), None):
            problem = f"{pattern} is a glob; write what `spider data files {self.repo} '{pattern}'` prints"
            raise wrong_key("source.files", problem)
        other = next((name for name in self.files if kind_of(name) not in ("", ".parquet")), None)
        if other is None or self._is_imported(other):
            return
        remedy = "leave take out, or download the file and set source.kind: local"
        problem = f"take reads only parquet files (got {other}); {remedy}"
        if self.STREAMED:
            problem = f"a stream reads only parquet files (got {other}); set source.kind: hub"
        raise wrong_key("source.files", problem)

    def _is_imported(self, item: str) -> bool:
        """Return whether an item is a whole file that is not parquet."""
        return self.take is None and not self.STREAMED and kind_of(item) not in ("", ".parquet")

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        from spider.data.hub import download_file

        if self.take is not None:
            from spider.data.take import RemoteFiles, take

            files = RemoteFiles(self.addresses(self.files_of_parts()), dataset)
            take(files, self.section(part), output, self.description)
            return
        item = self.item(part)
        (file,) = self.addresses([item])
        if not self._is_imported(item):
            download_file(file, output)
            return
        folder = output.with_name(f".{output.name}.imported")  # It stays until the file is imported.
        download_file(file, folder / Path(item).name)
        try:
            import_local(folder / Path(item).name, output, dataset)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        shutil.rmtree(folder)

    def addresses(self, names: list[str]) -> list[HubFile]:
        """Return the addresses of files."""
        from spider.data.hub import HubFile

        return [HubFile(self.repo, self.revision, name) for name in names]

    def probe(self, items: list[str], dataset: Dataset) -> int:
        from spider.data.documents import columns_in
        from spider.data.hub import survey

        files = self.addresses(items if self.take is None else self.files_of_parts())
        table = next((file for file in files if not self._is_imported(file.name)), None)
        size, schema = survey(files, table)
        if table:
            columns_in(schema, table, dataset)
        return self.taken(size)

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
