"""A dataset on disk: its description, a memory-mapped view of a split, and checks of what is read.

A folder holds ``metadata.json`` and for each part of a split ``{split}/{part}.bin`` (uint16 tokens, documents
back to back), ``.idx`` (uint64 byte offsets of the BOS tokens), ``.rows`` (uint32 rows of the raw file, for
people) and ``.json`` (the encoder's record). The index job makes ``metadata.json`` from the records of all
parts. It holds the source, the settings and the vocabulary, and the counts and the SHA-256 of each shard.
Readers trust it alone, and its digest identifies the dataset in a training. A view concatenates a split's
shards in the order of their parts, so windows may cross shard borders. Files are mapped, so the page cache is
the only copy in memory, and all ranks of a machine share it.

Opening checks sizes only and takes a millisecond; `verify` reads every byte. In between, a reader compares a
block of 64 KiB before it first uses any of it, once in a process: a damaged disk or copy is noticed, memory
that fails later is not. The digests, the XXH3-64 of each block of ``.bin`` and ``.idx``, are in the part's
record and take 1/4096 of their size. Where a page of a mapped file is not in memory, Linux reads the 128 KiB
around it, and the block of the page is among them. So random windows read hardly more of the disk than
without. A row in a new block takes the loader's thread 8 us, 1% of what a GPU needs
for a row of a small model. CRC-32 of zlib takes 5 times as long, and would cost a sixth of the speed of
encoding bytes; XXH3 costs half of that.

The record of a held-out part has the groups of its documents (``split_by``), as pairs of a name and a number
of documents. They are not in ``metadata.json``, so they do not change a dataset's digest. `balanced` chooses
documents so that no group dominates.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from pydantic import BaseModel, PrivateAttr
from xxhash import xxh3_64, xxh3_64_hexdigest

from spider.common.errors import DamagedShard
from spider.common.files import read_json, sha256, write_json
from spider.common.record import Record
from spider.common.sealed import content_digest
from spider.config import Dataset
from spider.tokens import BYTES, Tokens
from spider.tokens.sentencepiece import SentencePieceTokens
from spider.tokens.stored import copy_tokenizer, read_tokens, tokens_in

logger = logging.getLogger(__name__)
_tell = cache(logger.info)

BLOCK_BYTES = 1 << 16
"""Bytes of a block; the last one of a file may be shorter."""
_DIGITS = 16
"""Hexadecimal digits of a digest."""
BLOCKS_KEY = "xxh3_64"
"""Key of the digests in the record of a part: those of ``bin`` and of ``idx``, one after the other."""


class BlockWriter:
    """Write values to a file, and keep the digests of its blocks, in hexadecimal."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digests: list[str] = []
        self._hash = xxh3_64()
        self._filled = 0

    def write(self, values_N: np.ndarray) -> None:
        """Append the bytes of values (N,).

        They are written block by block, because the page cache takes twice as long for large pieces.
        """
        data = values_N.view(np.uint8).data
        while len(data):
            if not self._filled:
                self._hash.reset()
                self.digests.append("")
            piece, data = data[: BLOCK_BYTES - self._filled], data[BLOCK_BYTES - self._filled :]
            self.file.write(piece)
            self._hash.update(piece)
            self.digests[-1] = self._hash.hexdigest()
            self._filled = (self._filled + len(piece)) % BLOCK_BYTES


class Blocks:
    """The blocks of a ``.bin`` or ``.idx``, compared with the digests in the part's record.

    Digests that differ from a file that is ``intact`` are not used, and a warning says so. A file may have
    none, because another tool or an earlier Spider made it; the log says so once. Several threads may use
    this.
    """

    def __init__(self, file: Path, values_N: np.ndarray, intact: Callable[[], bool]) -> None:
        self._file = file
        self._bytes = values_N.view(np.uint8).data
        self._intact = intact

    def check(self, begin: int, end: int) -> None:
        """Compare the blocks of the bytes ``begin`` to ``end``, except those that were equal before.

        Raises `DamagedShard`.
        """
        block, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        while (block := self._unread.find(1, block, last)) >= 0:
            digest = xxh3_64_hexdigest(self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            if digest != self._digests[block * _DIGITS : (block + 1) * _DIGITS]:
                if not self._intact():
                    raise damaged(self._file, f"block {block} of {BLOCK_BYTES} bytes")
                logger.warning("%s: intact, but its record has other digests; they are not used", self._file)
                self._unread = bytearray(len(self._unread))
            self._unread[block] = 0

    @cached_property
    def _unread(self) -> bytearray:
        """A byte for each block, 1 until it is compared."""
        count = -(-len(self._bytes) // BLOCK_BYTES)
        known = len(self._digests) == count * _DIGITS
        if not known:
            _tell("%s: no digests of the blocks of its shards, so damage is not noticed", self._file.parent)
        return bytearray([known]) * count

    @cached_property
    def _digests(self) -> str:
        try:
            return str(read_json(self._file.with_suffix(".json"))[BLOCKS_KEY][self._file.suffix[1:]])
        except (ValueError, LookupError, TypeError):
            return ""


def encode_again(shard: Path) -> str:
    """Return the remedy for a damaged file of a part. Snakemake makes the part if both files are lost."""
    folder = shard.parents[1]
    lost = f"{folder / 'metadata.json'} and {folder / 'train' / shard.stem}.json"
    return f"delete {lost}, and run `snakemake datasets/{folder.name}`, which encodes the part again"


def damaged(shard: Path, place: str, problem: str = "differs from what was encoded") -> DamagedShard:
    """Return the error of a shard that is damaged at a place."""
    remedy = f"{encode_again(shard)}. Then run again (`spider data verify` finds other damage)"
    return DamagedShard(f"{shard}, {place}: {problem}, the shard is damaged; {remedy}")


DTYPE = np.dtype("<u2")
COUNTS = ("tokens", "documents", "bytes")

#: Fields of `Metadata` that all parts of a dataset are encoded with.
SETTINGS = (
    "text_column",
    "id_column",
    "validation",
    "ngram",
    "split_by",
    "max_document_bytes",
    "cleaning",
    "written_as",
    "tokenizer",
)


class Shard(BaseModel, frozen=True):
    """The documents of one part in a split."""

    file: str
    part: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class Split(BaseModel, frozen=True):
    """A split of a dataset; its counts are the sums over its shards."""

    tokens: int
    documents: int
    bytes: int
    shards: list[Shard]


class Metadata(Record):
    """``metadata.json``. The order of its fields is that of the file."""

    WHAT: ClassVar[str] = "the description of a dataset"

    dataset: str
    dtype: str
    vocab_size: int
    special_ids: dict[str, int]
    source: dict[str, Any]
    text_column: str | None = None
    id_column: str | None = None
    validation: float | None = None
    """Share of documents held out. For published shards this and the columns are None."""
    ngram: float = 0.0
    split_by: dict[str, str | int] | None = None
    max_document_bytes: int | None = None
    cleaning: dict[str, Any] | None = None
    """The block ``cleaning:``; None: all documents are kept."""
    left_out: dict[str, int] | None = None
    """Documents that it left out, by filter and by reason."""
    written_as: str = "text"
    """``chat``: conversations (`spider.data.chat`)."""
    tokenizer: str | None = None
    """Digest of the ``tokenizer.json`` in the same folder; None: bytes."""
    tokenizer_kind: str | None = None
    """``sentencepiece``; None: bytes or BPE."""
    lossless: bool = True
    """Whether decoding gives the text back; a published tokenizer may have changed it."""
    splits: dict[str, Split]
    digest: str = ""
    _vocabulary: Tokens = PrivateAttr(default_factory=lambda: BYTES)

    def plain(self) -> dict[str, Any]:
        """Return the description as JSON, without the fields at their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def without(self) -> str:
        """Description of what cleaning left out; empty if it left out nothing."""
        counts = described_counts(self.left_out or {})
        return f"left out: {counts}" if counts else ""

    @property
    def vocabulary(self) -> Tokens:
        """The vocabulary of its tokens."""
        return self._vocabulary

    @property
    def imported(self) -> bool:
        """Whether its shards were made from published tokens instead of text."""
        return self.text_column is None


def build_metadata(
    folder: Path,
    name: str,
    dataset: Dataset,
    *,
    source: dict[str, Any],
    parts: Sequence[str],
    tokenizer: Path | None = None,
    threads: int = 1,
) -> Metadata:
    """Write ``folder/metadata.json`` for the encoded ``parts``, and copy their ``tokenizer`` into the folder.

    ``source`` describes the origin of their text. Each thread hashes one shard at a time, and the hashes are
    kept in a hidden folder.

    Raises:
        ValueError: A part is missing, was encoded with other settings, or its files have other sizes or
            blocks than in its record.
    """
    tokens = read_tokens(tokenizer) if tokenizer else BYTES
    settings = dataset.encoding() | ({"tokenizer": tokens.digest} if tokenizer else {})
    splits = {}
    for split in dataset.splits:
        shards = [_record_of_part(folder, split, part, settings) for part in parts]
        with ThreadPoolExecutor(threads) as pool:
            hashes = pool.map(_checked_sha256, [folder / shard["file"] for shard in shards])
        whole = [Shard(**shard, sha256=value) for shard, value in zip(shards, hashes, strict=True)]
        splits[split] = Split(**{key: sum(getattr(s, key) for s in whole) for key in COUNTS}, shards=whole)
    metadata = Metadata(
        format=Metadata.FORMAT,
        dataset=name,
        dtype=DTYPE.str,
        vocab_size=tokens.size,
        special_ids=dict(tokens.specials),
        source=source,
        **settings,
        left_out=left_out(folder, parts) if dataset.cleaning else None,
        tokenizer_kind=tokens.kind if isinstance(tokens, SentencePieceTokens) else None,
        lossless=tokens.lossless,
        splits=splits,
    )
    if tokenizer:
        copy_tokenizer(tokenizer, folder)
    content = content_digest(metadata.plain())
    return metadata.model_copy(update={"digest": content}).write(folder / "metadata.json")


def _checked_sha256(shard: Path) -> str:
    """Return the SHA-256 of a shard. It is kept, so a killed job hashes no shard again, nor do new parts."""
    state = shard.stat()
    of_file = [state.st_size, state.st_mtime_ns]
    kept = shard.parents[1] / ".sha256" / shard.parent.name / f"{shard.stem}.json"
    known = read_json(kept) if kept.exists() else [None]
    if known[:-1] != of_file:
        if state.st_size:
            Blocks(shard, np.memmap(shard, np.uint8, "r"), intact=lambda: False).check(0, state.st_size)
        known = [*of_file, sha256(shard)]
        write_json(kept, known)
    return str(known[-1])


def left_out(folder: Path, parts: Sequence[str]) -> dict[str, int]:
    """Return how many documents of these parts were left out, by filter and by reason."""
    counts = Counter[str]()
    for path in (folder / "train" / f"{part}.json" for part in parts):
        counts.update(read_json(path).get("rows", {}).get("left_out", {}) if path.exists() else {})
    return dict(counts)


def described_counts(counts: dict[str, int]) -> str:
    """Return such counts as words, without zeros."""
    return ", ".join(f"{count:,} by {reason}" for reason, count in counts.items() if count)


def _record_of_part(folder: Path, split: str, part: str, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / split / f"{part}.json"
    if not path.exists():
        raise ValueError(f"{path}: part {part} of the {split} split is missing; encode it first")
    record = read_json(path, encode_again(path))
    for key in SETTINGS:
        default = Metadata.model_fields[key].default
        was, value = record.get(key, default), settings.get(key, default)
        if was != value:
            raise ValueError(
                f"{path}: part {part} was encoded with {key} = {was!r}, not {value!r}; encode it again"
            )
    shard = {key: record[key] for key in ("file", "part", *COUNTS)}
    check_size(folder / shard["file"], shard["tokens"] * DTYPE.itemsize)
    check_size((folder / shard["file"]).with_suffix(".idx"), shard["documents"] * 8)
    return shard


def check_size(path: Path, expected: int) -> None:
    """Raise `ValueError` if a file is missing or has another size than expected."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: no such shard; {encode_again(path)}") from None
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: {kind}, {size} bytes instead of {expected}; {encode_again(path)}")


def load_metadata(folder: Path) -> Metadata:
    """Read the description of a dataset.

    Raises:
        ValueError: The description is missing, or has another format or vocabulary.
    """
    path = folder / "metadata.json"
    if not path.exists():
        raise ValueError(f"{path}: the dataset is not encoded; run `snakemake datasets/{folder.name}`")
    metadata = Metadata.read(path)
    metadata._vocabulary = tokens_in(folder, metadata.tokenizer)
    if metadata.dtype != DTYPE.str or metadata.vocab_size != metadata.vocabulary.size:
        raise ValueError(
            f"{folder}: its tokens are {metadata.dtype} of {metadata.vocab_size} ids, this Spider reads "
            f"{DTYPE.str} of {metadata.vocabulary.size}; delete it and run `snakemake datasets/{folder.name}`"
        )
    return metadata


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
        shards = np.searchsorted(self.borders, starts, side="right") - 1
        offsets = starts - self.borders[shards]
        for row, s, begin in zip(rows, shards.tolist(), offsets.tolist(), strict=True):
            left = row
            while len(left):
                piece = self.within(s % len(self.maps), begin, begin + len(left))
                left[: len(piece)] = piece
                left, s, begin = left[len(piece) :], s + 1, 0
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


#: Most documents of a part, and of a dataset, whose groups are recorded and read.
MOST_DOCUMENTS = 4096
#: Most bytes of a recorded name.
NAME_BYTES = 100


def held_out_groups(folder: Path) -> list[str]:
    """Return the groups of the first documents of the validation split, at most `MOST_DOCUMENTS`.

    The list is empty without ``split_by``, for published shards, and for shards of an earlier Spider.
    """
    names: list[str] = []
    for shard in load_metadata(folder).splits["validation"].shards:
        record = (folder / shard.file).with_suffix(".json")
        runs = read_json(record).get("groups", []) if record.exists() else []
        names += [name for name, documents in runs for _ in range(documents)]
        if len(names) >= MOST_DOCUMENTS or sum(documents for _, documents in runs) < shard.documents:
            break
    return names[:MOST_DOCUMENTS]


def scored_groups(folder: Path, max_bytes: int, largest_group: float | None) -> list[str]:
    """Return the groups of the first documents that an evaluation scores, as far as they are recorded."""
    if largest_group is None:
        return held_out_groups(folder)
    return balanced(folder, max_bytes, largest_group)[1]


def balanced(folder: Path, max_bytes: int, largest_group: float) -> tuple[np.ndarray, list[str]]:
    """Choose held-out documents so that no group has more than ``largest_group`` of their bytes.

    As many bytes as possible are chosen, the same limit for each group, and from each group its first
    documents within the limit.

    Args:
        folder: Shards folder of the dataset.
        max_bytes: Most bytes of all chosen documents.
        largest_group: Largest share of one group, above 0 and at most 1.

    Returns:
        The ids of the chosen documents, in the order of the split, and the group of each document.

    Raises:
        ValueError: The groups are not recorded, or there are too few of them.
    """
    groups = held_out_groups(folder)
    if not groups:
        raise ValueError(
            f"{folder}: the shards do not record the groups of held-out documents, which "
            "evaluation.largest_group needs; delete "
            f"{folder} and run `snakemake datasets/{folder.name}` with split_by, or leave the key out"
        )
    shards = Shards(folder, "validation")
    begins_D = np.concatenate([shards.begins(s) + shards.borders[s] for s in range(len(shards.maps))])
    bounds_D = np.append(begins_D, shards.tokens)[: len(groups) + 1]
    tokens_N = shards.read(0, int(bounds_D[-1]))
    bytes_D = np.add.reduceat(shards.vocabulary.bytes_of[tokens_N], bounds_D[:-1], dtype=np.int64)
    so_far = Counter[str]()
    end_D = np.zeros_like(bytes_D)
    for document, (group, size) in enumerate(zip(groups, bytes_D.tolist(), strict=True)):
        so_far[group] += size
        end_D[document] = so_far[group]
    # In the order of their ends within their groups, the last chosen document ends the largest group.
    order_D = np.argsort(end_D, kind="stable")
    total_D = np.cumsum(bytes_D[order_D])
    fits_D = (total_D <= max_bytes) & (end_D[order_D] <= largest_group * total_D)
    if not fits_D.any():
        raise ValueError(
            f"{folder}: {len(so_far)} groups are held out, too few or too uneven for a text with at most "
            f"{largest_group:.0%} from each (evaluation.largest_group); raise validation, the share of "
            "groups, or evaluation.max_bytes, or leave largest_group out"
        )
    chosen_D = np.sort(order_D[: np.flatnonzero(fits_D)[-1] + 1])
    ids = np.concatenate([tokens_N[bounds_D[i] : bounds_D[i + 1]] for i in chosen_D.tolist()])
    return ids, [groups[i] for i in chosen_D.tolist()]
