"""An n-gram index on disk: a folder of arrays that are mapped into memory, and ``index.json``.

    {kind}.first.npy, {kind}.rows.npy       the table of each kind of context (`spider.data.ngram.table`)
    text.npy                                the symbols that were counted, a byte each
    last.npy                                the last position after each context in them
    index.json                              description, sizes and digests; written last

Opening compares sizes and costs a millisecond; `verify` reads every byte.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from spider.common import files, sealed
from spider.common.formatting import Pace
from spider.common.record import Record
from spider.config.model import NgramConfig, kind_of, name_of
from spider.config.requests import PIECE
from spider.data.ngram import table
from spider.data.ngram.layout import symbols_of
from spider.data.ngram.table import Reader, growing, length_of, runs_of, write_runs
from spider.data.shards import Metadata, Shards, encode_again, load_metadata

MARK = "index.json"
COPY_AGAIN = "copy the exported folder whole, or export again"


class ContextTable(BaseModel, frozen=True):
    """Size of the table of one kind of context."""

    contexts: int
    left_out: int
    """Contexts that occur once and are left out."""


class IndexDescription(Record):
    """``index.json``."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "the description of an n-gram index"

    dataset: str
    data_digest: str
    splits: list[str]
    """Splits of the dataset whose text is counted."""
    bytes: int
    """Symbols of that text, including the ends of documents."""
    counted: str
    """Digest of the settings that the text was counted with."""
    contexts: dict[str, ContextTable]
    files: dict[str, sealed.SealedFile]
    digest: str
    """`spider.common.sealed.content_digest` of the other fields."""


@dataclass(frozen=True)
class NgramIndex:
    """An opened n-gram index."""

    folder: Path
    description: IndexDescription
    tables: table.Tables

    def check(self, data_digest: str | None, splits: Sequence[str]) -> None:
        """Raise `ValueError` if the n-gram index is of another dataset, or of other splits of it."""
        described = self.description
        if described.data_digest != data_digest:
            raise ValueError(
                f"{self.folder}: an n-gram index of other data than the training data ({described.dataset}, "
                f"{described.data_digest}, not {data_digest}); train on that dataset, or "
                + _count_anew(self.folder)
            )
        if described.splits != list(splits):
            raise ValueError(
                f"{self.folder}: holds the text of {' and '.join(described.splits)}, not of "
                f"{' and '.join(splits)}; an index must not hold the text that its model trains on: "
                + _count_anew(self.folder)
            )

    def check_counted(self, config: NgramConfig) -> None:
        """Raise `ValueError` if the index was counted with other settings than those of ``config``."""
        if self.description.counted != config.counted:
            raise ValueError(
                f"{self.folder}: counted with other settings than those of model.ngram (contexts "
                f"{', '.join(self.description.contexts)} instead of "
                f"{', '.join(map(name_of, config.context_kinds))}); {_count_anew(self.folder)}"
            )


def count_part(shards: Path, metadata: Metadata, part: str, config: NgramConfig, output: Path) -> None:
    """Count the ngram and the train split of one part of a dataset, into ``output/{split}``.

    Raises:
        ValueError: The part does not exist, or a shard is damaged.
    """
    symbols = symbols_of(metadata.vocabulary)
    for split in ("ngram", "train"):
        if all(shard.part != part for shard in metadata.splits[split].shards):
            raise ValueError(f"{shards}: no part {part!r} in the {split} split")
        file = shards / split / f"{part}.bin"
        with growing(output / split / "text.npy", np.uint8) as append:
            for tokens in Shards(shards, split).pieces(file, PIECE):
                if tokens.max() >= len(symbols):
                    raise ValueError(f"{file}: holds tokens outside the vocabulary; {encode_again(file)}")
                append(symbols[tokens])
        write_runs(output / split, config.context_kinds)


def build(
    counts: Sequence[Path],
    metadata: Metadata,
    splits: Sequence[str],
    config: NgramConfig,
    output: Path,
    threads: int = 1,
) -> IndexDescription:
    """Merge the counts of all parts (``part/{split}``, in the order of the parts) into an n-gram index.

    Raises:
        ValueError: The splits are empty.
    """
    if not sum(metadata.splits[split].bytes for split in splits):
        raise ValueError(
            f"datasets.{metadata.dataset}: the {splits[0]} split has no document; raise `ngram` (the share "
            "of documents for the n-gram index), or give more text"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).unlink(missing_ok=True)
    folders = [part / split for split in splits for part in counts]
    # The sizes of finished tables, so that an attempt continues after a kill, unless it is of other text.
    finished = output / f".finished-{files.digest([metadata.digest, splits, config.counted])}"
    for other in set(output.glob(".finished-*")) - {finished}:
        shutil.rmtree(other)
    finished.mkdir(exist_ok=True)

    pace = Pace("merged {done} of {total} tables", len(config.context_kinds))

    def build_table(kind: int) -> ContextTable:
        name = name_of(kind)
        record = finished / f"{name}.json"
        if not record.exists():
            runs = [run for folder in folders for run in runs_of(folder, kind)]
            least = 1 if 0 < kind < config.rare else 2
            contexts, left_out = table.build(runs, kind, least, output)
            files.write_json(record, {"contexts": contexts, "left_out": left_out})
            pace(len(list(finished.glob("*.json"))))
        return ContextTable(**files.read_json(record))

    with ThreadPoolExecutor(threads) as pool:
        sizes = list(pool.map(build_table, config.context_kinds))
    tables = {name_of(kind): size for kind, size in zip(config.context_kinds, sizes, strict=True)}
    with growing(output / "text.npy", np.uint8) as append:
        for folder in folders:
            with Reader(folder / "text.npy") as text:
                for start in range(0, text.length, PIECE):
                    append(text.read(start, start + PIECE))
    symbols = length_of(output / "text.npy")
    with growing(output / "last.npy", np.uint32) as append:
        for block in table.last_positions(output / "text.npy", table.position_bits(symbols)):
            append(block)
    names = [f"{name}.{array}.npy" for name in tables for array in ("first", "rows")]
    described = IndexDescription(
        format=IndexDescription.FORMAT,
        dataset=metadata.dataset,
        data_digest=metadata.digest,
        splits=list(splits),
        bytes=symbols,
        counted=config.counted,
        contexts=tables,
        files={name: sealed.SealedFile.of(output / name) for name in [*names, "text.npy", "last.npy"]},
        digest="",
    )
    digest = sealed.content_digest(described.plain())
    description = described.model_copy(update={"digest": digest}).write(output / MARK)
    shutil.rmtree(finished)
    return description


def build_indexes(shards: Path, config: NgramConfig, split: Path, full: Path) -> None:
    """Build both n-gram indexes of a small dataset without the workflow.

    An index that exists is kept if it is complete and of this dataset, these splits and settings.
    """
    metadata = load_metadata(shards)
    for output, splits in ((split, ["ngram"]), (full, ["ngram", "train"])):
        with contextlib.suppress(ValueError):
            existing = open_index(output)
            existing.check(metadata.digest, splits)
            existing.check_counted(config)
            continue
        with tempfile.TemporaryDirectory(dir=shards) as scratch:
            counts = [Path(scratch) / shard.part for shard in metadata.splits["ngram"].shards]
            for part in counts:
                count_part(shards, metadata, part.name, config, part)
            build(counts, metadata, splits, config, output)


def open_index(folder: Path) -> NgramIndex:
    """Open an n-gram index, and map its arrays into memory.

    Raises:
        ValueError: The index or one of its files is missing, or a file has another size than described.
    """
    if not (folder / MARK).exists():
        raise ValueError(f"{folder}: no n-gram index lies there (no {MARK}); {_count_anew(folder)}")
    described = IndexDescription.read(folder / MARK)
    if damaged := sealed.damage(folder, described.files, quick=True):
        raise ValueError("\n".join([*damaged, _count_anew(folder)]))

    def mapped(name: str) -> np.ndarray:
        return np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))

    of = [(mapped(f"{name}.first.npy"), mapped(f"{name}.rows.npy")) for name in described.contexts]
    kinds = list(map(kind_of, described.contexts))
    tables = table.Tables(kinds, of, mapped("last.npy"), mapped("text.npy"))
    return NgramIndex(folder, described, tables)


def verify(folder: Path) -> IndexDescription:
    """Compare every byte of an n-gram index with its description, and return the description.

    Raises:
        ValueError: The index is missing, or differs. The message names each file that differs.
    """
    described = open_index(folder).description
    damaged = sealed.damage(folder, described.files)
    if sealed.content_digest(files.read_json(folder / MARK)) != described.digest:
        damaged.append(f"{folder / MARK}: edited since it was written, its digest does not match")
    if damaged:
        raise ValueError("\n".join([*damaged, _count_anew(folder)]))
    return described


def _count_anew(folder: Path) -> str:
    if (folder.parent / "config.json").exists():  # of an exported folder
        return COPY_AGAIN
    return f"delete {folder} and run {files.snakemake(folder / MARK)}, which counts the text anew"


def link(folder: Path, output: Path) -> None:
    """Verify an n-gram index and put it into the new folder ``output`` too, as `sealed.link` does.

    Raises:
        ValueError: The index is damaged.
        OSError: The new folder cannot be written.
    """
    sealed.link(folder, [*verify(folder).files, MARK], output)


def names_in(folder: Path) -> set[str]:
    """Return the names of the files of the n-gram index in a folder; none without a readable description."""
    try:
        return {MARK, *IndexDescription.read(folder / MARK).files}
    except ValueError:
        return set()
