"""Memory and time that jobs request by the size of their text, and the bounds on their buffers.

The first four constants bound the buffers of counting and merging, so the memory of these jobs does not grow
with the text. Packing holds a few numbers for each piece of a document. Running times grow with the text. All
figures were measured; requests are larger.

This module imports neither NumPy nor Numba, because Snakemake imports it for each job.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

from spider.config import Config

#: Symbols of a text that are counted at a time.
PIECE = 1 << 25
#: Pairs of key and count that are merged at a time.
SLICE = 1 << 22
#: Bytes of a part's text that are compared with earlier documents at a time.
BLOCK = 1 << 28
#: Entries of ``last.npy`` that are filled at a time.
ENTRIES = 1 << 26
#: Runs that are merged at a time. Each is two open files.
FAN_IN = 64

#: MB of a process that has imported NumPy and Numba and compiled its loops.
_STARTED = 400
#: The same with Arrow, and batches of the text of a part.
_BATCHES = 1000
#: Bytes held for each symbol that is counted at a time: its text, hashes, contexts, keys and counts.
_COUNTED = 28
#: Bytes held for each pair that is merged at a time, by each thread.
_MERGED = 120
#: Bytes held for each entry of ``last.npy`` that is filled at a time, and for each symbol read for it.
_ENTRY, _READ = 4, 32
#: Bytes held for each piece of a document that is packed.
_PACKED = 64
#: Bytes held for each document whose keys are compared with all others: of a share of the hashes with its id,
#: and of a band.
_HASHED, _BANDED = 300, 200
#: Bytes held for each document of a dataset while it is decided which ones are removed, if all are in pairs.
_PAIRED = 60
#: Fewest bytes of a document in a file of signatures, without and with bands.
_SIGNATURE = (30, 120)
#: Seconds for a symbol and a kind of contexts, to count and to merge, and for a packed piece. They are four
#: times what was measured, or more.
_SECONDS_COUNTED, _SECONDS_MERGED, _SECONDS_PACKED = 4e-7, 1e-7, 2e-5
#: The same for a byte of text whose shard is hashed; threads that hash one shard each.
_SECONDS_HASHED, _MOST_HASHING = 2e-8, 8
#: The same for a document whose hash or band is compared with all others, and for one that may be removed.
_SECONDS_KEYED, _SECONDS_PAIRED = 4e-6, 1e-4
#: Seconds for a byte of the text of a part, by rule, and with a tokenizer. Bytes held for it, and by pairs.
_OF_PART = {"signatures": 2e-7, "pairs": 3e-7, "held_out": 1e-7, "contaminated": 6e-7, "encode": 2e-8}
_SECONDS_TOKENS, _HELD, _IN_PAIRS = 6e-7, 0.3, 1.2
#: Bytes held for a byte of text: that is compared at a time, that is protected, that a tokenizer is learned
#: from. And seconds for a byte of the last one.
_COMPARED, _PROTECTED, _LEARNED, _SECONDS_LEARNED = 10, 20, 2, 4e-7
#: Seconds to read a byte of all parts, where near duplicates are compared.
_SECONDS_READ = 7e-9
#: Seconds to download a byte, at 1 MB/s, and minutes for a part of unknown size, such as a file of the hub.
_SECONDS_DOWNLOADED, _UNKNOWN = 1e-6, 240
#: MB held for each stage and each part that a page or the comparison shows. These are guesses.
_SHOWN, _LISTED = 10, 0.02


class Request(NamedTuple):
    mem_mb: int
    minutes: int


def packing(tokens: float, documents: float, seq_len: int) -> Request:
    """Return the request of a job that packs so many documents into rows of ``seq_len`` targets."""
    pieces = documents + tokens / seq_len
    return Request(round(_STARTED + _PACKED * pieces / 1e6), _minutes(_SECONDS_PACKED * pieces))


def _minutes(seconds: float) -> int:
    """Return a time limit in minutes: half an hour for starting and slow disks, and the work itself."""
    return 30 + round(seconds / 60)


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests of the jobs of a workflow, by the size of the datasets below ``root``.

    Sizes are estimates until a dataset is indexed. Snakemake evaluates a request again before its job starts.
    """

    config: Config
    root: Path

    def counting(self, dataset: str, counted: str, part: str) -> Request:
        """Return the request of a job that counts a part for the n-gram index of these settings."""
        symbols, _ = self.size(dataset, ("ngram", "train"), part)
        held = _STARTED + _COUNTED * min(symbols, PIECE) / 1e6
        return Request(round(held), _minutes(_SECONDS_COUNTED * symbols * self._kinds(dataset, counted)))

    def merging(self, dataset: str, counted: str, text: str, threads: int = 2) -> Request:
        """Return the request of a job that merges the counts of all parts, ``full`` or of the split."""
        symbols, _ = self.size(dataset, ("ngram", "train") if text == "full" else ("ngram",))
        tables = threads * _MERGED * min(2 * symbols, SLICE) / 1e6
        last = (_ENTRY * min(2 * symbols, ENTRIES) + _READ * min(symbols, SLICE)) / 1e6
        minutes = _minutes(_SECONDS_MERGED * symbols * self._kinds(dataset, counted))
        return Request(round(_STARTED + max(tables, last)), minutes)

    def of_part(self, rule: str, dataset: str, part: str, item: str) -> Request:
        """Return the request of a job of a rule that reads the text of one part."""
        spec, size = self.config.dataset(dataset), self._estimated(dataset, part, item)
        if rule == "download":
            size = spec.source.estimated_bytes(item)
            return Request(2 * _BATCHES, _minutes(_SECONDS_DOWNLOADED * size) if size else _UNKNOWN)
        slow = rule == "encode" and (spec.tokenizer or spec.format == "chat")
        seconds, held = _SECONDS_TOKENS if slow else _OF_PART[rule], _HELD * size
        if rule == "pairs" and self.config.near(dataset):  # originals may be in all row groups of all parts
            held += _IN_PAIRS * size + _COMPARED * min(size, BLOCK)
            seconds += _SECONDS_READ * len(self.config.parts(dataset))
        elif rule == "held_out":
            held += 4 * spec.validation * size
        elif rule == "contaminated":
            held += _PROTECTED * self._protected(dataset)
        return Request(round(_BATCHES + held / 1e6), _minutes(seconds * size))

    def protecting(self, dataset: str) -> Request:
        """Return the request of the job that collects the texts that a dataset is compared with."""
        size = self._protected(dataset)
        return Request(round(_BATCHES + _PROTECTED * size / 1e6), _minutes(_SECONDS_LEARNED * size))

    def learning(self, tokenizer: str) -> Request:
        """Return the request of the job that learns a tokenizer."""
        block = self.config.tokenizers[tokenizer]
        size = min(block.max_bytes, self._whole(block.data))
        return Request(round(_BATCHES + _LEARNED * size / 1e6), _minutes(_SECONDS_LEARNED * size))

    def showing(self, *runs: str) -> Request:
        """Return the request of a job that shows runs, with the costs of all jobs for their data."""
        stages = [(run, one.name) for run in runs for one in self.config.runs[run].stages]
        parts = sum(len(self.config.parts(name)) for name in {*chain(*starmap(self.config.learned, stages))})
        return Request(round(_STARTED + _SHOWN * len(stages) + _LISTED * parts), _minutes(0))

    def _protected(self, dataset: str) -> float:
        """Return the bytes of the text that a dataset is compared with: an estimate, or by its file."""
        file = self.root / "cleaning" / dataset / "protected.parquet"
        if file.exists():
            return 3.0 * file.stat().st_size
        names = self.config.protected(dataset)
        return sum(self.config.dataset(name).validation * self._whole(name) for name in names)

    def buckets(self, dataset: str) -> Request:
        """Return the request of a job that finds equal keys in a share of those of all parts."""
        documents = self._compared(dataset)
        jobs, cleaning = self.config.buckets(dataset), self.config.cleaning(dataset)
        near = bool(cleaning and cleaning.near)
        held = (_HASHED / jobs + _BANDED * near) * documents
        keys = documents * (1 + 24 / jobs * near)
        return Request(round(_STARTED + held / 1e6), _minutes(_SECONDS_KEYED * keys))

    def dropping(self, dataset: str) -> Request:
        """Return the request of the job that decides which documents of a dataset are removed."""
        documents = self._compared(dataset)
        return Request(round(_STARTED + _PAIRED * documents / 1e6), _minutes(_SECONDS_PAIRED * documents))

    def _compared(self, dataset: str) -> float:
        """Return the documents that those of a dataset are compared with, and its own.

        They are estimated from the files of signatures, or from the text, by 2 kB each.
        """
        documents = 0.0
        for name in (*self.config.dataset(dataset).against, dataset):
            signature = _SIGNATURE[self.config.near(name)]
            for part, item in self.config.parts(name).items():
                file = self.root / "cleaning" / name / "signatures" / f"{part}.parquet"
                size = file.stat().st_size / signature if file.exists() else 0
                documents += size or self._estimated(name, part, item) / 2000
        return documents

    def packing(self, dataset: str, seq_len: int) -> Request:
        """Return the request of a job that packs a dataset into rows of ``seq_len`` targets."""
        tokens, documents = self.size(dataset, ("train",))
        return packing(tokens, documents, seq_len)

    def index(self, dataset: str) -> tuple[int, int]:
        """Return the threads that hash the shards of a dataset, and the minutes that this may take."""
        size = self._whole(dataset)
        threads = min(_MOST_HASHING, 1 + round(size / 1e9))
        return threads, _minutes(_SECONDS_HASHED * size / threads)

    def size(
        self, dataset: str, splits: tuple[str, ...], part: str | None = None, unit: str = "tokens"
    ) -> tuple[float, float]:
        """Return the tokens or bytes, and the documents, of these splits of a dataset or of one part."""
        index = self.root / "shards" / dataset / "metadata.json"
        if not index.exists():
            items = self.config.parts(dataset)
            size = self._estimated(dataset, part, items[part]) if part else self._whole(dataset)
            return size, size / 1000
        described = _splits(index, index.stat().st_mtime_ns)
        shards = [shard for split in splits for shard in described.get(split, {"shards": []})["shards"]]
        shards = [shard for shard in shards if part in (None, shard["part"])]
        return sum(shard[unit] for shard in shards), sum(shard["documents"] for shard in shards)

    def _whole(self, dataset: str) -> float:
        """Estimate the bytes of text in all parts of a dataset, again after each new file."""
        folder = self.root / "raw" / self.config.raw(dataset)
        return self._sum(dataset, folder.stat().st_mtime_ns if folder.exists() else 0)

    @cache  # noqa: B019 - there is one for a workflow
    def _sum(self, dataset: str, changed: int) -> float:
        return sum(self._estimated(dataset, *part) for part in self.config.parts(dataset).items())

    def _estimated(self, dataset: str, part: str, item: str) -> float:
        """Estimate the bytes of text in a part: three times those of its file, or a gigabyte without one."""
        file = self.root / "raw" / self.config.raw(dataset) / f"{part}.parquet"
        source = self.config.dataset(dataset).source
        size = source.estimated_bytes(item)
        if file.exists():
            size = max(size, file.stat().st_size)
        return 3 * size if size else 1e9

    def _kinds(self, dataset: str, counted: str) -> int:
        """Return the number of kinds of contexts in an n-gram index."""
        ngram = self.config.runs[self.config.ngram_reader(dataset, counted)].model.ngram
        assert ngram is not None
        return len(ngram.contexts)


@cache
def _splits(index: Path, changed: int) -> dict[str, Any]:
    """Return the splits that an index describes, read once after each change."""
    splits: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["splits"]
    return splits
