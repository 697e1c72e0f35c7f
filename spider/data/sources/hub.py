"""Files of a Hugging Face dataset repository, downloaded once at a pinned revision.

A parquet file is kept as it is. Any other file is imported like a file of the user (`local`).
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from spider.config.block import ConfigError, wrong_key
from spider.config.data import Dataset, Files
from spider.config.text_files import COMMAND, Lock, TakingSource, is_pattern
from spider.data.sources.local import import_local, imported, kind_of

if TYPE_CHECKING:
    from spider.data.hub import HubFile


class HubSource(TakingSource):
    """Files of a Hugging Face dataset repository at a pinned revision, of any kind that ``local`` reads.
    Each file is a part."""

    LISTS: ClassVar = frozenset({"files", "lock"})

    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit (a branch may change during a run, unless there is a lock)."""
    files: Annotated[list[str], Field(min_length=1)]
    """Files in the repository. Globs, such as ``sample/10BT/*.parquet``, need a lock."""
    lock: str | None = None
    """Path of the lock file, which `spider data resolve` writes and which you commit (null: none)."""

    def files_of_parts(self) -> list[str]:
        lock = self.locked()
        return [file.name for file in lock.files] if lock else list(dict.fromkeys(self.files))

    def contents(self) -> Any:
        lock = self.locked()
        return {file.name: file.hash for file in lock.files} if lock else self.files

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        decides = super().identity(item, dataset)
        if self.lock and self.take is None:
            decides["hash"] = self.contents()[item]
        return decides | imported(dataset) if self._is_imported(item) else decides

    def locked(self) -> Lock | None:
        """Return the lock file, or None if only names of files are given.

        Raises:
            ConfigError: it is missing, malformed, or of other settings than these.
        """
        if self.lock is None:
            patterns = [name for name in self.files if is_pattern(name)]
            if patterns:
                wanted = f"is required for the glob {patterns[0]!r}; name a file, as in lock: texts.lock.json"
                raise ConfigError(f"source.lock: {wanted}, and {COMMAND}")
            return None
        path = Path(self.lock)
        if not path.exists():
            raise ConfigError(f"source.lock: {path}: no such file; {COMMAND}")
        try:
            lock = _read(path, path.stat().st_mtime_ns)
        except ConfigError as error:
            raise ConfigError(f"source.lock: {error}") from None
        for key, written in (("repo", lock.repo), ("revision", lock.revision), ("files", lock.patterns)):
            if written != (now := getattr(self, key)):
                raise ConfigError(
                    f"source.lock: {path} was written for {key}: {written}, but the configuration says "
                    f"{now}; {COMMAND}"
                )
        if problem := self._without_row_groups([file.name for file in lock.files]):
            raise ConfigError(f"source.files: {problem}")
        return lock

    def resolve(self, dataset: Dataset) -> Path | None:
        if self.lock is None:
            return None
        from spider.data.remote import resolve

        lock = resolve(self.repo, self.revision, self.files, dataset, self._is_imported)
        lock.save(Path(self.lock))
        return Path(self.lock)

    def check(self, dataset: Dataset) -> None:
        if problem := self._without_row_groups(self.files):
            raise wrong_key("source.files", problem)

    def _without_row_groups(self, names: list[str]) -> str:
        """Return the problem that a stream or `take` has with a file that is not parquet, or nothing."""
        other = next((name for name in names if kind_of(name) not in ("", ".parquet")), None)
        if other is None or self._is_imported(other):
            return ""
        if self.STREAMED:
            return f"a stream reads only parquet files (got {other}); set source.kind: hub"
        remedy = "leave take out, or download the file and set source.kind: local"
        return f"take reads only parquet files (got {other}); {remedy}"

    def _is_imported(self, item: str) -> bool:
        """Return whether an item is a whole file that is not parquet."""
        return self.take is None and not self.STREAMED and kind_of(item) not in ("", ".parquet")

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        from spider.data.hub import download_file
        from spider.data.remote import RemoteFiles, take

        lock = self.locked()
        if self.take is not None:
            files = RemoteFiles(self.addresses(self.files_of_parts()), dataset, lock)
            take(files, self.section(part), output, self.description)
            return
        item = self.item(part)
        locked = self.contents()[item] if lock else None
        (file,) = self.addresses([item])
        if not self._is_imported(item):
            download_file(file, output, locked=locked)
            return
        folder = output.with_name(f".{output.name}.imported")  # It stays until the file is imported.
        download_file(file, folder / Path(item).name, locked=locked)
        try:
            import_local(folder / Path(item).name, output, dataset)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        shutil.rmtree(folder)

    def addresses(self, names: list[str]) -> list[HubFile]:
        """Return the addresses of files, at the commit of the lock file or the given revision."""
        from spider.data.hub import HubFile

        lock = self.locked()
        return [HubFile(self.repo, lock.commit if lock else self.revision, name) for name in names]

    def probe(self, items: list[str], dataset: Dataset) -> int:
        from spider.data.documents import columns_in
        from spider.data.remote import survey

        files = self.addresses(items if self.take is None else self.files_of_parts())
        table = next((file for file in files if not self._is_imported(file.name)), None)
        size, schema = survey(files, table)
        if table:
            columns_in(schema, table, dataset)
        return self.taken(size)

    def learned_files(self) -> Files:
        try:
            names = self.files_of_parts()
        except ConfigError:  # without a lock file a glob stands for itself; another check reports it
            names = self.files
        return Files(f"hub {self.repo}", frozenset(names))

    @property
    def description(self) -> str:
        return f"{self.repo} at {self.revision}"

    @property
    def address(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def repository(self) -> str | None:
        return self.repo


@cache
def _read(path: Path, changed: int) -> Lock:
    """Return a lock file, read once after each change."""
    return Lock.read(path)
