"""Take whole row groups of parquet files, in an order over all files.

The order is that of a hash of the file's name and the number of the row group. It is the same on every
machine, spreads over all files, and does not depend on the amount, so a larger amount extends a smaller one.

The size of a row group is the ``total_uncompressed_size`` of its text column in the footer of the file. It
counts the text as it is encoded, with four bytes for the length of each document, and the headers of pages.
Texts that repeat within a row group may be counted once. Only the configured columns are read and written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spider.common.files import replacing
from spider.config import Dataset
from spider.config.text_files import Section
from spider.data.documents import as_text, columns_in, text_bytes


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
