"""Take row groups of parquet files on the hub by ranged requests, and write lock files.

Only footers and the configured columns of the chosen row groups are requested, at most `CHUNK_BYTES` at a
time. Each range that arrived is a file beside the output until the output is complete, so the next process
after a killed one requests none of them again. A range is kept under the hash of its file, and ranges of
another content are not used.

What is checked: each answer has the requested length, and comes from a file with the hash that the hub stated
at the beginning (``X-Linked-ETag``). The footer and the pages must decode, with the checksums of pages that
have them. What does not decode is requested once more. The SHA-256 of a whole file cannot be compared without
reading all of it.
"""

from __future__ import annotations

import fnmatch
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from spider.common.files import write_bytes
from spider.config import Dataset
from spider.config.text_files import Lock, LockedFile, Section, is_pattern
from spider.data import hub
from spider.data.hub import PATIENCE, DownloadError, HubFile, Patience
from spider.data.take import RowGroup, choose, row_groups, write_groups

log = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteFile(io.RawIOBase):
    """A file of the hub, whose ranges are requested, or read from a folder where they are stored.

    Without a folder none is stored. Raises `DownloadError` like `spider.data.hub.look_up`.
    """

    def __init__(
        self, file: HubFile, folder: Path | None, patience: Patience, locked: str | None = None
    ) -> None:
        super().__init__()
        self.file = file
        self._size, self._expected = hub.look_up(file, patience, locked)
        self.used: list[Path] = []
        """Ranges that were read since the list was cleared."""
        self._folder = folder and folder / self._expected.partition(":")[2]
        self._patience = patience
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin = self._at
        last = min(begin + len(view), self._size)
        while self._at < last:
            end = min(self._at + hub.CHUNK_BYTES, last)
            view[self._at - begin : end - begin] = self._range(self._at, end)
            self._at = end
        return self._at - begin

    def __str__(self) -> str:
        return str(self.file)

    def parquet(self) -> pq.ParquetFile:
        """Return the file as parquet, of which each request reads a column of a row group or a part of it.

        Raises `DownloadError` if the footer does not decode.
        """
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": hub.CHUNK_BYTES}
        opened = partial(pq.ParquetFile, self, page_checksum_verification=True, **options)
        return _decoded(self, "the footer", opened)

    def _range(self, begin: int, end: int) -> bytes:
        path = self._folder and self._folder / f"{begin}-{end}"
        if path:
            self.used.append(path)
            if path.exists():
                return path.read_bytes()
        data = self._patience.call(self.file, partial(hub.read_range, self.file, begin, end, self._expected))
        if path:
            write_bytes(path, data)
        return data


class RemoteFiles:
    """The parquet files that row groups are taken from."""

    def __init__(
        self, files: list[HubFile], dataset: Dataset, lock: Lock | None = None, patience: Patience = PATIENCE
    ) -> None:
        self.files = {file.name: file for file in files}
        self.dataset = dataset
        self._lock = lock
        self._patience = patience
        self._opened: dict[str, tuple[pq.ParquetFile, RemoteFile | None]] = {}

    def row_groups(self, folder: Path) -> list[RowGroup]:
        """Return all row groups, by the lock file or else by the footers of all files."""
        if self._lock is None:
            opened = {name: self._open(name, folder) for name in self.files}
            return [one for name, file in opened.items() for one in row_groups(name, file, self.dataset)]
        if self._lock.text_column != self.dataset.text_column:
            was, now = self._lock.text_column, self.dataset.text_column
            raise ValueError(
                f"datasets.*.source.lock: was written for text_column: {was}, but the configuration says "
                f"{now}; {Lock.REMEDY}"
            )
        return [
            RowGroup(file.name, number, rows, size)
            for file in self._lock.files
            for number, (rows, size) in enumerate(zip(file.rows, file.text_bytes, strict=True))
        ]

    def read(self, group: RowGroup, columns: list[str], folder: Path) -> pa.Table:
        """Return those of the named columns that a row group has."""
        parquet = self._open(group.file, folder)
        present = [name for name in columns if name in parquet.schema_arrow.names]
        remote = self._opened[group.file][1]
        read = partial(parquet.read_row_group, group.number, columns=present, use_threads=False)
        return _decoded(remote, f"row group {group.number}", read) if remote else read()

    def _open(self, name: str, folder: Path) -> pq.ParquetFile:
        if name not in self._opened:
            file = self.files[name]
            remote = None
            if constants.HF_HUB_OFFLINE:
                parquet = pq.ParquetFile(hub.cached(file, self._patience))
            else:
                locked = {one.name: one.hash for one in self._lock.files}[name] if self._lock else None
                remote = RemoteFile(file, folder, self._patience, locked)
                parquet = remote.parquet()
            self._opened[name] = parquet, remote
        return self._opened[name][0]


def _decoded(remote: RemoteFile, what: str, read: Callable[[], T]) -> T:
    """Return what ``read`` decodes. Ranges that do not decode are requested once more."""
    for again in (False, True):
        remote.used.clear()
        try:
            return read()
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            for path in remote.used:
                path.unlink(missing_ok=True)
            problem = f"{remote.file}: {what} does not decode ({str(error).splitlines()[0]})"
            if again:
                remedy = "if it happens again, the file is damaged or not a parquet file: leave it out"
                raise DownloadError(f"{problem}, twice; run again, and {remedy}") from None
            log.warning("%s; downloading it once more", problem)
    raise AssertionError


def take(files: RemoteFiles, section: Section, output: Path, origin: str) -> None:
    """Write the row groups of a section of files on the hub as a parquet file.

    A second process waits for the first. Raises `DownloadError` like `spider.data.hub.download_file`, and
    `ValueError` if the files hold too little text or lack a column.
    """
    folder = output.with_name(f".{output.name}.ranges")
    with hub.writing(origin, output):
        chosen = choose(files.row_groups(folder), section, origin)
        size, of = sum(one.size for one in chosen), len({one.file for one in chosen})
        log.info("%s: %d row groups of %d files, %.1f MB of text", origin, len(chosen), of, size / 1e6)
        write_groups(chosen, partial(files.read, folder=folder), output, files.dataset)
        shutil.rmtree(folder, ignore_errors=True)


def survey(files: list[HubFile], table: HubFile | None) -> tuple[int, pa.Schema | None]:
    """Return the size of files of one dataset repository, and the columns of the parquet file ``table``.

    This reads no more than the end of that file. Offline it reads the copies in the cache.

    Raises:
        DownloadError: the hub refuses, within seconds, because retries are for a download.
    """
    if constants.HF_HUB_OFFLINE:
        paths = {file: hub.in_cache(file, hub.HURRY) for file in files}
        return sum(map(os.path.getsize, paths.values())), pq.read_schema(paths[table]) if table else None
    where: dict[str, Any] = {"repo_type": "dataset", "revision": files[0].revision}
    names = [file.name for file in files]
    infos = hub.HURRY.call(files[0], lambda: HfApi().get_paths_info(files[0].repo, names, **where))
    sizes = {info.path: info.size for info in infos if isinstance(info, RepoFile)}
    for file in files:
        if file.name not in sizes:
            hub.look_up(file, hub.HURRY)  # raises
    schema = RemoteFile(table, None, hub.HURRY).parquet().schema_arrow if table else None
    return sum(sizes.values()), schema


def resolve(
    repo: str, revision: str, patterns: list[str], dataset: Dataset, is_whole: Callable[[str], bool]
) -> Lock:
    """Look up the commit of a revision, the files that globs match, and their row groups.

    A file that is read whole (``is_whole``) has none.

    Raises:
        DownloadError: a glob matches no file, a match is of no known kind, or the hub cannot be read.
    """
    api = HfApi()
    where = HubFile(repo, revision, patterns[0])
    commit = str(PATIENCE.call(where, lambda: api.dataset_info(repo, revision=revision)).sha)
    found: dict[str, RepoFile] = {}
    for pattern in patterns:
        listed = _matches(api, HubFile(repo, commit, pattern), PATIENCE)
        if not listed:
            raise DownloadError(f"{HubFile(repo, revision, pattern)}: no file matches; correct source.files")
        found |= {info.path: info for info in listed}
    remote = RemoteFiles([HubFile(repo, commit, name) for name in found if not is_whole(name)], dataset)
    with tempfile.TemporaryDirectory() as folder:
        groups = remote.row_groups(Path(folder))
    files = []
    for name, info in found.items():
        own = [group for group in groups if group.file == name]
        rows, sizes = [group.rows for group in own], [group.size for group in own]
        files.append(
            LockedFile(name=name, size=info.size, hash=hub.hash_of(info), rows=rows, text_bytes=sizes)
        )
    return Lock(
        format=Lock.FORMAT,
        repo=repo,
        revision=revision,
        commit=commit,
        patterns=patterns,
        text_column=dataset.text_column,
        files=files,
    )


def _matches(api: HfApi, pattern: HubFile, patience: Patience) -> list[RepoFile]:
    """Return the files that a name or a glob matches, sorted. ``*`` also matches slashes, as on the hub."""
    folders = pattern.name.split("/")[:-1]
    fixed = next((i for i, one in enumerate(folders) if is_pattern(one)), len(folders))
    inside = "/".join(folders[:fixed]) or None

    def listed() -> list[RepoFile]:
        tree = api.list_repo_tree(
            pattern.repo, inside, recursive=True, revision=pattern.revision, repo_type="dataset"
        )
        return [info for info in tree if isinstance(info, RepoFile)]

    infos = patience.call(pattern, listed)
    return sorted(
        (info for info in infos if fnmatch.fnmatchcase(info.path, pattern.name)), key=lambda info: info.path
    )
