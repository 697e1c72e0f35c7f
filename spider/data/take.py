"""Take whole row groups of parquet files, of the hub or on this machine, in an order over all files.

The order is that of a hash of the file's name and the number of the row group. It is the same on every
machine, spreads over all files, and does not depend on the amount, so a larger amount extends a smaller one.

The size of a row group is the ``total_uncompressed_size`` of its text column in the footer of the file. It
counts the text as it is encoded, with four bytes for the length of each document, and the headers of pages.
Texts that repeat within a row group may be counted once. Only the configured columns are read and written.

A range of a file of the hub that arrived is a file beside the output until the output is complete, so the
next process after a killed one requests none of them again. It is kept under the hash of its file, and ranges
of another content are not used.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants

from spider.common.files import replacing
from spider.config import Dataset
from spider.data import hub
from spider.data.documents import as_text, columns_in, text_bytes
from spider.data.hub import HubFile
from spider.data.listing import Section

log = logging.getLogger(__name__)


class RowGroup(NamedTuple):
    """A row group of a file."""

    file: str
    number: int
    rows: int
    size: int
    """Bytes of its text column."""


def row_groups(name: str, file: pq.ParquetFile, dataset: Dataset) -> list[RowGroup]:
    """Return the row groups of a file by its footer. Raise `ValueError` if it lacks a column of strings."""
    columns_in(file.schema_arrow, name, dataset)
    found = []
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        found.append(RowGroup(name, number, group.num_rows, text_bytes(group, dataset)))
    return found


def choose(groups: Iterable[RowGroup], section: Section, origin: str) -> list[RowGroup]:
    """Return the row groups that begin in a section of the order.

    Raises:
        ValueError: the files hold less text than the section ends at.
    """
    ordered = sorted(groups, key=_rank)
    total = sum(group.size for group in ordered)
    scale = sum(group.rows for group in ordered) if section.of_rows else 1
    if not section.of_rows and total < section.last:
        held = f"{origin} holds {total:,} bytes of text in {len(ordered):,} row groups"
        raise ValueError(
            f"datasets.*.source.take: {section.last:,} bytes are more than there are; {held}. Take less, or "
            "leave take out"
        )
    chosen = []
    begin = 0
    for group in ordered:
        if section.first * scale <= begin < section.last * scale:
            chosen.append(group)
        begin += group.rows if section.of_rows else group.size
    return chosen


def _rank(group: RowGroup) -> bytes:
    return hashlib.blake2b(f"{group.file}\0{group.number}".encode(), digest_size=16).digest()


def write_groups(
    chosen: list[RowGroup], read: Callable[[RowGroup, list[str]], pa.Table], output: Path, dataset: Dataset
) -> None:
    """Write the configured columns of row groups as a parquet file, each as text.

    ``read`` returns the columns with these names that a row group has. An absent one is null.
    """
    schema = pa.schema([(name, pa.large_string()) for name in dataset.columns])
    with replacing(output) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for group in chosen:
            table = read(group, list(dataset.columns))
            columns = [
                as_text(table[name], is_id=name == dataset.id_column)
                if name in table.column_names
                else pa.nulls(len(table), pa.large_string())
                for name in dataset.columns
            ]
            writer.write_table(pa.table(columns, schema=schema))


def take_files(files: dict[str, Path], section: Section, output: Path, dataset: Dataset) -> None:
    """Write the row groups of a section of the parquet files at these paths, by name."""
    groups = []
    for name, path in files.items():
        with pq.ParquetFile(path) as file:
            groups += row_groups(name, file, dataset)

    def read(group: RowGroup, columns: list[str]) -> pa.Table:
        try:
            with pq.ParquetFile(files[group.file], page_checksum_verification=True) as file:
                present = [name for name in columns if name in file.schema_arrow.names]
                return file.read_row_group(group.number, columns=present, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            problem = f"row group {group.number} does not decode ({str(error).splitlines()[0]})"
            raise ValueError(f"{group.file}: {problem}; copy the file again") from None

    write_groups(choose(groups, section, "the source"), read, output, dataset)


class RemoteFiles:
    """The parquet files that row groups are taken from."""

    def __init__(self, files: list[HubFile], dataset: Dataset) -> None:
        self.files = {file.name: file for file in files}
        self.dataset = dataset
        self._opened: dict[str, tuple[pq.ParquetFile, hub.RemoteFile | None]] = {}

    def row_groups(self, folder: Path) -> list[RowGroup]:
        """Return all row groups, by the footers of all files."""
        opened = {name: self._open(name, folder) for name in self.files}
        return [one for name, file in opened.items() for one in row_groups(name, file, self.dataset)]

    def read(self, group: RowGroup, columns: list[str], folder: Path) -> pa.Table:
        """Return those of the named columns that a row group has."""
        parquet = self._open(group.file, folder)
        present = [name for name in columns if name in parquet.schema_arrow.names]
        remote = self._opened[group.file][1]
        read = partial(parquet.read_row_group, group.number, columns=present, use_threads=False)
        return hub.decoded(remote, f"row group {group.number}", read) if remote else read()

    def _open(self, name: str, folder: Path) -> pq.ParquetFile:
        if name not in self._opened:
            file = self.files[name]
            remote = None
            if constants.HF_HUB_OFFLINE:
                parquet = pq.ParquetFile(hub.cached(file, hub.PATIENCE))
            else:
                remote = hub.RemoteFile(file, folder, hub.PATIENCE)
                parquet = remote.parquet()
            self._opened[name] = parquet, remote
        return self._opened[name][0]


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
