"""An n-gram index on disk: a folder of arrays without pickle, mapped and never loaded, and ``index.json``.

    {kind}.first.npy, {kind}.rows.npy       the table of each kind of contexts (`spider.ngram.table`)
    text.npy                                the symbols that were counted, a byte each
    last.npy                                where in them contexts stood last
    index.json                             written last: of which text, what is in it, sizes and digests

Opening compares sizes and costs a millisecond; `verify` reads every byte.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from spider import files, sealed
from spider.config.ngram import NgramConfig
from spider.data.metadata import DTYPE, Metadata, check_size, load_metadata
from spider.ngram import table
from spider.ngram.contexts import kind_of, name_of
from spider.ngram.count import runs_of, write_runs
from spider.ngram.layout import symbols_of
from spider.ngram.runs import Reader, growing, length_of
from spider.record import Record
from spider.requests import PIECE

MARK = "index.json"


class ContextTable(BaseModel, frozen=True):
    contexts: int
    left_out: int
    """Contexts that occur once and are not kept."""


class IndexDescription(Record):
    """``index.json``."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "the description of an n-gram index"
    REMEDY: ClassVar[str] = "delete its folder and run again"

    dataset: str
    data_digest: str
    splits: list[str]
    """Of the dataset, whose text is in it."""
    bytes: int
    """Symbols of that text, ends of documents among them."""
    counted: str
    """Digest of the settings that it was counted with."""
    contexts: dict[str, ContextTable]
    files: dict[str, sealed.SealedFile]
    digest: str
    """`spider.sealed.content_digest` of the other fields."""


@dataclass(frozen=True)
class NgramIndex:
    """An opened n-gram index."""

    folder: Path
    description: IndexDescription
    tables: table.Tables

    def check(self, data_digest: str | None, splits: Sequence[str]) -> None:
        """Refuse, by a `ValueError`, an n-gram index of another dataset, or of other splits of it."""
        described = self.description
        if described.data_digest != data_digest:
            raise ValueError(
                f"{self.folder}: an n-gram index of other data than is trained on ({described.dataset}, "
                f"{described.data_digest}, not {data_digest}); run its jobs again, or train on that dataset"
            )
        if described.splits != list(splits):
            raise ValueError(
                f"{self.folder}: holds the text of {' and '.join(described.splits)}, not of "
                f"{' and '.join(splits)}; a model may not be trained on what its index holds: delete the "
                "folder and run its jobs again"
            )

    def check_counted(self, config: NgramConfig) -> None:
        """Refuse, by a `ValueError`, an index that was counted with other settings than ``config`` has."""
        if self.description.counted != config.counted:
            raise ValueError(
                f"{self.folder}: counted with other settings than model.ngram has (it has contexts of "
                f"{', '.join(self.description.contexts)}, asked for are "
                f"{', '.join(map(name_of, config.contexts))}); run its jobs again"
            )


def count_part(shards: Path, metadata: Metadata, part: str, config: NgramConfig, output: Path) -> None:
    """Count one part of a dataset, each split that an n-gram index may hold, into ``output/{split}``.

    Raises:
        ValueError: there is no such part, or a shard of another size than the description says.
    """
    symbols = symbols_of(metadata.vocabulary)
    for split in ("ngram", "train"):
        described = metadata.splits[split].shards
        shard = next((one for one in described if one.part == part), None)
        if shard is None:
            raise ValueError(f"{shards}: no part {part!r} in the {split} split")
        check_size(shards / shard.file, shard.tokens * DTYPE.itemsize)
        _write_symbols(shards / shard.file, symbols, output / split / "text.npy")
        write_runs(output / split, config.contexts)


def _write_symbols(shard: Path, symbols: np.ndarray, text: Path) -> None:
    """Write the symbols of a shard's ids; `ValueError` where there are other ids."""
    with shard.open("rb") as file, growing(text, np.uint8) as append:
        while len(tokens := np.fromfile(file, DTYPE, PIECE)):
            if tokens.max() >= len(symbols):
                raise ValueError(f"{shard}: holds ids outside the vocabulary; encode its part again")
            append(symbols[tokens])


def build(
    counts: Sequence[Path], metadata: Metadata, splits: Sequence[str], config: NgramConfig, output: Path,
    threads: int = 1,
) -> IndexDescription:  # fmt: skip
    """Merge the counts of all parts (``part/{split}``, in the order of the parts) into an n-gram index.

    Raises:
        ValueError: there is no text in these splits.
    """
    if not sum(metadata.splits[split].bytes for split in splits):
        raise ValueError(
            f"datasets.{metadata.dataset}: the {splits[0]} split has no document; raise `ngram` (the share "
            "of documents that an n-gram index is made of), or give more text"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).unlink(missing_ok=True)
    folders = [part / split for split in splits for part in counts]
    unfinished = _Unfinished(output, files.digest([metadata.digest, splits, config.counted]))

    def one(kind: int) -> ContextTable:
        if (made := unfinished.made.get(name_of(kind))) is None:
            runs = [run for folder in folders for run in runs_of(folder, kind)]
            held, left_out = table.build(runs, kind, 1 if 0 < kind < config.rare else 2, output)
            made = ContextTable(contexts=held, left_out=left_out)
            unfinished.add(name_of(kind), made)
        return made

    with ThreadPoolExecutor(threads) as pool:
        made = dict(zip(map(name_of, config.contexts), pool.map(one, config.contexts), strict=True))
    with growing(output / "text.npy", np.uint8) as append:
        for folder in folders:
            with Reader(folder / "text.npy") as part_of_text:
                for start in range(0, part_of_text.length, PIECE):
                    append(part_of_text.read(start, start + PIECE))
    text = length_of(output / "text.npy")
    with growing(output / "last.npy", np.uint32) as append:
        for block in table.last_places(output / "text.npy", table.place_bits(text)):
            append(block)
    names = [f"{name}.{array}.npy" for name in made for array in ("first", "rows")]
    described = IndexDescription(
        format=IndexDescription.FORMAT,
        dataset=metadata.dataset,
        data_digest=metadata.digest,
        splits=list(splits),
        bytes=text,
        counted=config.counted,
        contexts=made,
        files={name: sealed.SealedFile.of(output / name) for name in [*names, "text.npy", "last.npy"]},
        digest="",
    )
    digest = sealed.content_digest(described.plain())
    description = described.model_copy(update={"digest": digest}).write(output / MARK)
    unfinished.path.unlink()
    return description


class _Unfinished:
    """The finished tables of an unfinished folder, from which the next attempt continues."""

    def __init__(self, folder: Path, counted: str) -> None:
        self.path, self._counted, self._lock = folder / "unfinished.json", counted, Lock()
        self.made: dict[str, ContextTable] = {}
        with contextlib.suppress(ValueError):  # there is no such file
            before = files.read_json(self.path)
            if before["counted"] == counted:
                self.made = {kind: ContextTable(**one) for kind, one in before["made"].items()}
        self._write()

    def add(self, kind: str, made: ContextTable) -> None:
        """Note that the table of one kind of contexts is on disk."""
        with self._lock:
            self.made[kind] = made
            self._write()

    def _write(self) -> None:
        made = {kind: one.model_dump() for kind, one in self.made.items()}
        files.write_json(self.path, {"counted": self._counted, "made": made})


def build_indexes(shards: Path, config: NgramConfig, split: Path, full: Path) -> None:
    """Make both n-gram indexes of a small dataset at once, without the workflow.

    An index that is there already is kept if it is whole, and of this dataset, these splits and settings.
    """
    metadata = load_metadata(shards)
    for output, splits in ((split, ["ngram"]), (full, ["ngram", "train"])):
        with contextlib.suppress(ValueError):
            made = open_index(output)
            made.check(metadata.digest, splits)
            made.check_counted(config)
            continue
        with tempfile.TemporaryDirectory(dir=shards) as scratch:
            counts = [Path(scratch) / shard.part for shard in metadata.splits["ngram"].shards]
            for part in counts:
                count_part(shards, metadata, part.name, config, part)
            build(counts, metadata, splits, config, output)


def open_index(folder: Path) -> NgramIndex:
    """Open an n-gram index, and map its arrays into memory.

    Raises:
        ValueError: there is no index, or a file is missing or has another size than its description says.
    """
    if not (folder / MARK).exists():
        raise ValueError(f"{folder}: no n-gram index lies there (no {MARK}); run its jobs again")
    described = IndexDescription.read(folder / MARK)
    if damaged := sealed.damage(folder, described.files, quick=True):
        raise ValueError(_with_remedy(damaged, folder))

    def mapped(name: str) -> np.ndarray:
        return np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))

    of = [(mapped(f"{name}.first.npy"), mapped(f"{name}.rows.npy")) for name in described.contexts]
    kinds = list(map(kind_of, described.contexts))
    tables = table.Tables(kinds, of, mapped("last.npy"), mapped("text.npy"))
    return NgramIndex(folder, described, tables)


def verify(folder: Path) -> IndexDescription:
    """Compare every byte of an n-gram index with its description, and return the description.

    Raises:
        ValueError: there is no index, or it differs. The message names each file that does.
    """
    described = open_index(folder).description
    damaged = sealed.damage(folder, described.files)
    if sealed.content_digest(files.read_json(folder / MARK)) != described.digest:
        damaged.append(f"{folder / MARK}: edited since it was written, its digest does not match")
    if damaged:
        raise ValueError(_with_remedy(damaged, folder))
    return described


def _with_remedy(damaged: list[str], folder: Path) -> str:
    return "\n".join([*damaged, f"delete {folder} and run again, the index is counted anew"])


def link(folder: Path, output: Path) -> None:
    """Verify an n-gram index and put it into the new folder ``output`` too, as `spider.sealed.link` does.

    Raises:
        ValueError: the index is damaged.
        OSError: the new folder cannot be written.
    """
    sealed.link(folder, [*verify(folder).files, MARK], output)


def names_in(folder: Path) -> set[str]:
    """Return the names of the files of the n-gram index in a folder; none without a readable description."""
    try:
        return {MARK, *IndexDescription.read(folder / MARK).files}
    except ValueError:
        return set()
