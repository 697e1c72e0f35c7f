"""Shards on disk: a memory-mapped view of a split, and checks of their content.

A dataset's folder holds ``{split}/{part}.bin`` (uint16 tokens, documents back to back), ``.idx`` (uint64 byte
offsets of the BOS tokens), ``.json`` (the encoder's counts) and ``metadata.json``. The index job makes the
latter from the records of all parts, and readers trust it alone. The view concatenates a split's shards in
the order of their parts, so windows may cross shard borders.

Trade-off: opening checks sizes only and takes a millisecond; `verify` reads every byte. Files are mapped, so
the page cache is the only copy in memory, and all ranks of a machine share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spider.data.metadata import COUNTS, DTYPE, Metadata, Shard, check_size, load_metadata
from spider.files import read_json, sha256
from spider.sealed import content_digest
from spider.tokens import Tokens

CHUNK = 1 << 22
"""Tokens checked at a time."""
HEADER_MAGIC = 20240520
HEADER_INTS = 256


# ----------------------------------------------------------------------------------------------- mapping


def headered(path: Path) -> np.ndarray:
    """Return the tokens of a headered shard, memory-mapped and read-only.

    The file is 256 little-endian int32 (20240520, 1, n, zeros), then n uint16. Raises `ValueError` if it is
    missing, or has another header or another size.
    """
    try:
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name an existing shard") from None
    if len(header) < HEADER_INTS or header[0] != HEADER_MAGIC or header[1] != 1:
        raise ValueError(f"{path}: not a headered shard, which begins with the int32 {HEADER_MAGIC} and 1")
    tokens = int(header[2])
    start = HEADER_INTS * header.itemsize
    expected = start + tokens * DTYPE.itemsize
    if size != expected:
        raise ValueError(
            f"{path}: {size} bytes instead of {expected} for the {tokens} tokens of its header; download it "
            "again"
        )
    return mapped(path, start, tokens)


def mapped(path: Path, start: int, tokens: int) -> np.ndarray:
    """Return the tokens of a file from a byte on, read-only.

    This is a plain array over the mapping, because slicing an `np.memmap` is slow.
    """
    if tokens == 0:
        return np.empty(0, DTYPE)
    return np.asarray(np.memmap(path, dtype=DTYPE, mode="r", offset=start, shape=(tokens,)))


# -------------------------------------------------------------------------------------------------- view


class Shards:
    """A read-only view of one split of an encoded dataset, as one sequence of ``tokens`` uint16 token ids.

    File s (``files[s]``, ``maps[s]``) holds the tokens ``borders[s]`` to ``borders[s + 1]``. ``digest``
    identifies the content for a resume. Opening compares every size with ``metadata.json``. Several threads
    may use a view.
    """

    def __init__(self, folder: Path, split: str) -> None:
        metadata = load_metadata(folder)
        if split not in metadata.splits:
            raise ValueError(f"{folder}: no split {split!r} (there are: {', '.join(metadata.splits)})")
        described = metadata.splits[split]
        self.name = f"{folder} ({split})"
        self.vocabulary = metadata.vocabulary
        self.digest = f"{metadata.digest}/{split}"
        self.files: list[Path] = []
        self.maps: list[np.ndarray] = []
        for shard in described.shards:
            path = folder / shard.file
            check_size(path, shard.tokens * DTYPE.itemsize)
            if shard.tokens:
                self.files.append(path)
                self.maps.append(mapped(path, 0, shard.tokens))
        self.borders = np.cumsum([0, *map(len, self.maps)])
        self.tokens = int(self.borders[-1])
        self._known_begins: dict[int, np.ndarray] = {}

    def locate(self, token: int) -> str:
        """Return the shard of a token and its position there, for messages."""
        s = int(np.searchsorted(self.borders, token, side="right")) - 1
        return f"{self.files[s]}, token {token - int(self.borders[s])}"

    def document(self, token: int) -> tuple[int, int, int, int]:
        """Return a token's file, and three positions there: its document's beginning, its own, and the end.

        Raises `ValueError` if the file lacks a document index.
        """
        s = int(np.searchsorted(self.borders, token, side="right")) - 1
        begins = self.begins(s)
        at = token - int(self.borders[s])
        d = int(np.searchsorted(begins, at, side="right"))
        end = int(begins[d]) if d < len(begins) else len(self.maps[s])
        return s, int(begins[d - 1]) if d else 0, at, end

    def begins(self, s: int) -> np.ndarray:
        """Return the first tokens of a file's documents, which are read once."""
        if s in self._known_begins:
            return self._known_begins[s]
        path = self.files[s].with_suffix(".idx")
        if not path.exists():
            raise ValueError(
                f"{path}: no index of documents, which an n-gram index needs; encode the text again"
            )
        begins = np.fromfile(path, "<u8").astype(np.int64) // DTYPE.itemsize
        return self._known_begins.setdefault(s, begins)

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy the tokens ``start`` to ``start + count``, across shard borders: (count,) uint16."""
        if not 0 <= start <= start + count <= self.tokens:
            raise ValueError(
                f"{self.name}: tokens {start} to {start + count} are outside its {self.tokens} tokens"
            )
        return self.gather(np.array([start]), count)[0]

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copy ``length`` tokens from each of ``starts`` (n,), below ``tokens``: (n, length) uint16.

        The split is a ring: its last token is followed by its first.
        """
        rows = np.empty((len(starts), length), DTYPE)
        if rows.size == 0:
            return rows
        shards = np.searchsorted(self.borders, starts, side="right") - 1
        offsets = starts - self.borders[shards]
        inside = starts + length <= self.borders[shards + 1]
        for s in np.unique(shards[inside]).tolist():
            chosen = np.flatnonzero(inside & (shards == s))
            # Indexing the view of all windows copies whole rows without (n, length) indices.
            rows[chosen] = sliding_window_view(self.maps[s], length)[offsets[chosen]]
        for i in np.flatnonzero(~inside).tolist():
            s = int(shards[i])
            filled = 0
            while filled < length:
                shard = self.maps[s % len(self.maps)]
                piece = shard[int(offsets[i]) if filled == 0 else 0 :][: length - filled]
                rows[i, filled : filled + len(piece)] = piece
                filled += len(piece)
                s += 1
        return rows


# ------------------------------------------------------------------------------------------------ checks


def verify(folder: Path, full: bool = True) -> dict[str, int]:
    """Check a dataset's shards against its description.

    Always: sizes, totals and the digest of the description. ``full``: SHA-256 of every shard, every id
    below the vocabulary's size, and a document index that points at exactly the BOS tokens. Returns what was
    checked: shards, documents, tokens, bytes. ``ValueError`` lists every problem with its shard and token.
    """
    metadata, path = load_metadata(folder), folder / "metadata.json"
    problems = []
    if content_digest(read_json(path)) != metadata.digest:  # of all that stands there, ours or not
        problems.append(f"{path}: edited since it was written, its digest does not match")
    checked = dict.fromkeys(("shards", *COUNTS), 0)
    for split, described in metadata.splits.items():
        for key in COUNTS:
            said, total = getattr(described, key), sum(getattr(shard, key) for shard in described.shards)
            checked[key] += total
            if said != total:
                problems.append(f"{split}: {said} {key} described, its shards add up to {total}")
        for shard in described.shards:
            checked["shards"] += 1
            problems += _shard_problems(folder, shard, metadata, full)
    if problems:
        raise ValueError("\n".join([*problems, f"{len(problems)} problems; encode the named parts again"]))
    return checked


def _shard_problems(folder: Path, shard: Shard, metadata: Metadata, full: bool) -> list[str]:
    path, vocabulary = folder / shard.file, metadata.vocabulary
    index_path = path.with_suffix(".idx")
    try:
        check_size(path, shard.tokens * DTYPE.itemsize)
        check_size(index_path, shard.documents * 8)
    except ValueError as error:
        return [str(error)]
    problems = []
    of_text, text = vocabulary.bytes_of[vocabulary.bytes_of > 0], shard.tokens - 2 * shard.documents
    least = 0 if metadata.written_as == "chat" else int(of_text.min())  # who speaks stands there as well
    if not text * least <= shard.bytes <= text * int(of_text.max()):
        problems.append(
            f"{path}: {shard.tokens} tokens cannot be {shard.documents} documents of {shard.bytes} bytes"
        )
    if full:
        if sha256(path) != shard.sha256:
            problems.append(f"{path}: SHA-256 differs from metadata.json")
        problems += _content_problems(path, mapped(path, 0, shard.tokens), vocabulary, shard.bytes)
    return problems


def _content_problems(path: Path, tokens: np.ndarray, vocabulary: Tokens, size: int) -> Iterator[str]:
    """The first foreign id, or another number of bytes than ``size``; where the index is not exactly the
    places of BOS, or no EOS ends a document."""
    begins, foreign, text = [np.empty(0, np.int64)], None, 0
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        begins.append(np.flatnonzero(chunk == vocabulary.bos) + start)
        if foreign is None and (bad := np.flatnonzero(chunk >= vocabulary.size)).size:
            foreign = start + int(bad[0])
        text += int(vocabulary.bytes_of[chunk[chunk < vocabulary.size]].sum())
    if foreign is None and text != size:
        yield f"{path}: its ids stand for {text:,} bytes, not {size:,}"
    if foreign is not None:
        yield f"{path}: id {tokens[foreign]} at token {foreign} is not of the {vocabulary.size} ids"
    index_path = path.with_suffix(".idx")
    index, places = np.fromfile(index_path, "<u8"), np.concatenate(begins)
    shared = min(len(index), len(places))
    differs = np.flatnonzero(index[:shared] != places[:shared].astype("<u8") * DTYPE.itemsize)
    entry = int(differs[0]) if len(differs) else shared
    if entry < len(places):
        yield f"{index_path}: entry {entry} should point at the BOS at token {places[entry]} of {path.name}"
    elif entry < len(index):
        yield f"{index_path}: {len(index)} entries, but the shard holds {len(places)} documents"
    elif len(index):
        ends = np.append(places[1:], len(tokens)) - 1
        bad = np.flatnonzero(tokens[ends] != vocabulary.eos)
        if places[0] != 0:
            yield f"{index_path}: the first document begins at token {places[0]}, not 0"
        elif len(bad):
            yield f"{index_path}: document {bad[0]} does not end with EOS at token {ends[bad[0]]}"


def inspect(folder: Path, first: int = 400) -> dict[str, Any]:
    """Return statistics of a dataset, as plain data.

    For each split: documents, tokens, bytes and shards; mean, median and largest document in bytes; the
    ``beginning`` of the first shard, decoded. The first 16 M tokens of each shard give the ten most frequent
    tokens of text with their shares, the bytes per token, and the order-0 entropy in bits per byte.
    """
    metadata = load_metadata(folder)
    vocabulary = metadata.vocabulary
    report: dict[str, Any] = {"dataset": metadata.dataset, "digest": metadata.digest, "splits": {}}
    for split, described in metadata.splits.items():
        view = Shards(folder, split)
        counts = np.zeros(vocabulary.size, np.int64)
        lengths = [np.empty(0, np.int64)]
        for path, tokens in zip(view.files, view.maps, strict=True):
            counts += np.bincount(tokens[: 1 << 24], minlength=vocabulary.size)
            index = np.fromfile(path.with_suffix(".idx"), "<u8").astype(np.int64) // DTYPE.itemsize
            lengths.append(np.add.reduceat(vocabulary.bytes_of[tokens], index, dtype=np.int64))
        counts[vocabulary.bytes_of == 0] = 0
        length = np.concatenate(lengths) if view.tokens else np.zeros(1, np.int64)
        share = counts / max(1, counts.sum())
        present = share[share > 0]
        bytes_per_token = float(share @ vocabulary.bytes_of) or 1.0
        top = np.argsort(-share, kind="stable")[:10]
        report["splits"][split] = {
            **described.model_dump(include=set(COUNTS)),
            "shards": len(described.shards),
            "document_bytes": {
                "mean": float(length.mean()),
                "median": float(np.median(length)),
                "max": int(length.max()),
            },
            "bytes_per_token": bytes_per_token,
            "top": [[vocabulary.decode([int(i)]), float(share[i])] for i in top if share[i]],
            "entropy_bits": float(-(present * np.log2(present)).sum()) / bytes_per_token,
            "beginning": vocabulary.decode(view.read(0, min(first, view.tokens))),
        }
    return report
