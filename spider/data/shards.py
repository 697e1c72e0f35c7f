"""Shards on disk: a memory-mapped view of a split, and checks of their content.

A dataset's folder holds ``{split}/{part}.bin`` (uint16 tokens, documents back to back), ``.idx`` (uint64 byte
offsets of the BOS tokens), ``.rows`` (uint32 rows of the raw file, for people), ``.json`` (the encoder's
counts) and ``metadata.json``. The index job makes the latter from the records of all parts, and readers trust
it alone. The view concatenates a split's shards in the order of their parts, so windows may cross shard
borders.

Trade-off: opening checks sizes only and takes a millisecond; a block is compared when it is first read
(`spider.data.blocks`); `verify` reads every byte. Files are mapped, so the page cache is the only copy in
memory, and all ranks of a machine share it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spider.data.blocks import Blocks, encode_again
from spider.data.metadata import COUNTS, DTYPE, Metadata, Shard, check_size, load_metadata
from spider.files import read_json
from spider.sealed import content_digest

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
    identifies the content for a resume. Opening compares every size with ``metadata.json``. Methods that
    return tokens or beginnings raise `DamagedShard` for a block that differs from its digest. Several threads
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
        self._blocks: list[Blocks] = []
        for shard in described.shards:
            path = folder / shard.file
            check_size(path, shard.tokens * DTYPE.itemsize)
            if shard.tokens:
                self.files.append(path)
                self.maps.append(mapped(path, 0, shard.tokens))
                intact = partial(_has_sha256, self.maps[-1], shard.sha256)
                self._blocks.append(Blocks(path, self.maps[-1], intact))
        self.borders = np.cumsum([0, *map(len, self.maps)])
        self.tokens = int(self.borders[-1])
        self._known_begins: dict[int, np.ndarray] = {}

    def locate(self, token: int) -> tuple[Path, int]:
        """Return the shard of a token and its position there."""
        s = int(np.searchsorted(self.borders, token, side="right")) - 1
        return self.files[s], token - int(self.borders[s])

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
            raise ValueError(f"{path}: no index of documents; {encode_again(path)}")
        offsets = np.fromfile(path, "<u8")
        intact = partial(_is_index, offsets, self.maps[s], self.vocabulary.bos)
        Blocks(path, offsets, intact).check(0, offsets.nbytes)
        return self._known_begins.setdefault(s, offsets.astype(np.int64) // DTYPE.itemsize)

    def pieces(self, file: Path, size: int) -> Iterator[np.ndarray]:
        """Yield the tokens of a file, ``size`` at a time. An empty one has none."""
        for s in [s for s, one in enumerate(self.files) if one == file]:
            for at in range(0, len(self.maps[s]), size):
                yield self.within(s, at, at + size)

    def within(self, s: int, begin: int, end: int) -> np.ndarray:
        """Return the tokens ``begin`` to ``end`` of a file, or to its end, uint16 that are not copied."""
        self._blocks[s].check(begin * DTYPE.itemsize, end * DTYPE.itemsize)
        return self.maps[s][begin:end]

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy the tokens ``start`` to ``start + count``, across shard borders: (count,) uint16.

        Within a file this is one slice, which takes less than a tenth of the time of `gather`.
        """
        assert 0 <= start <= start + count <= self.tokens
        s = bisect_right(self.borders, start) - 1
        if count and start + count <= self.borders[s + 1]:
            begin = start - int(self.borders[s])
            return self.within(s, begin, begin + count).copy()
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
            for begin in offsets[chosen].tolist():
                self.within(s, begin, begin + length)
            # Indexing the view of all windows copies whole rows without (n, length) indices.
            rows[chosen] = sliding_window_view(self.maps[s], length)[offsets[chosen]]
        for i in np.flatnonzero(~inside).tolist():
            s = int(shards[i])
            filled = 0
            while filled < length:
                begin = int(offsets[i]) if filled == 0 else 0
                piece = self.within(s % len(self.maps), begin, begin + length - filled)
                rows[i, filled : filled + len(piece)] = piece
                filled += len(piece)
                s += 1
        return rows


# ------------------------------------------------------------------------------------------------ checks


def verify(folder: Path, full: bool = True) -> dict[str, int]:
    """Compare a dataset's shards with its description.

    The digest of the description and all sizes are checked. With ``full``, so are the SHA-256 of every shard,
    and that its document index holds exactly the positions of BOS.

    Returns the numbers of checked shards, documents, tokens and bytes.

    Raises:
        ValueError: It lists every problem with its file.
    """
    metadata = load_metadata(folder)
    path = folder / "metadata.json"
    problems: list[str] = []
    if content_digest(read_json(path)) != metadata.digest:
        problems.append(f"{path}: edited, its digest does not match; {Metadata.remedy(path)}")
    shards = [shard for described in metadata.splits.values() for shard in described.shards]
    for shard in shards:
        problems += _shard_problems(folder, shard, metadata.vocabulary.bos, full)
    if problems:
        raise ValueError("\n".join([*problems, f"{len(problems)} problems"]))
    counts = {key: sum(getattr(described, key) for described in metadata.splits.values()) for key in COUNTS}
    return {"shards": len(shards), **counts}


def _shard_problems(folder: Path, shard: Shard, bos: int, full: bool) -> Iterator[str]:
    """Yield what is wrong with the files of a shard."""
    path = folder / shard.file
    index_path = path.with_suffix(".idx")
    try:
        check_size(path, shard.tokens * DTYPE.itemsize)
        check_size(index_path, shard.documents * 8)
    except ValueError as error:
        yield str(error)
        return
    if not full:
        return
    tokens = mapped(path, 0, shard.tokens)
    if not _has_sha256(tokens, shard.sha256):
        yield f"{path}: SHA-256 differs from metadata.json; {encode_again(path)}"
        return
    if not _is_index(np.fromfile(index_path, "<u8"), tokens, bos):
        yield f"{index_path}: its entries are not the positions of BOS in {path.name}; {encode_again(path)}"


def _has_sha256(tokens_N: np.ndarray, sha256: str) -> bool:
    return hashlib.sha256(tokens_N.data).hexdigest() == sha256


def _is_index(offsets_D: np.ndarray, tokens_N: np.ndarray, bos: int) -> bool:
    """Return whether these are the byte offsets of all BOS."""
    found = [np.flatnonzero(tokens_N[at : at + CHUNK] == bos) + at for at in range(0, len(tokens_N), CHUNK)]
    return np.array_equal(offsets_D, np.concatenate([np.empty(0, np.int64), *found]) * DTYPE.itemsize)


def inspect(folder: Path, first: int = 400) -> dict[str, Any]:
    """Return statistics of a dataset, as plain data: what its cleaning left out, and its splits.

    For each split: documents, tokens, bytes and shards; mean, median and largest document in bytes; the
    ``beginning`` of the first shard, decoded. The first 16 M tokens of each shard give the ten most frequent
    tokens of text with their shares, the bytes per token, and the order-0 entropy in bits per byte.
    """
    metadata = load_metadata(folder)
    vocabulary = metadata.vocabulary
    report: dict[str, Any] = {"dataset": metadata.dataset, "digest": metadata.digest, "splits": {}}
    if metadata.left_out is not None:
        report["left_out"] = metadata.left_out
    for split, described in metadata.splits.items():
        view = Shards(folder, split)
        counts = np.zeros(vocabulary.size, np.int64)
        lengths = [np.empty(0, np.int64)]
        for s, tokens in enumerate(view.maps):
            counts += np.bincount(tokens[: 1 << 24], minlength=vocabulary.size)
            lengths.append(np.add.reduceat(vocabulary.bytes_of[tokens], view.begins(s), dtype=np.int64))
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
