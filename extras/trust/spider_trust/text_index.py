"""The index of the training text of a part: a suffix array, which finds any stretch of bytes.

The text of a shard is the bytes of its tokens, with a byte `END` for each special token, so no stretch
reaches from one document into the next. Text of at least 2^31 bytes is divided between documents. A piece
takes less than five bytes for each byte of its documents:

    {part}.json                    description, written last
    {part}-{split}-{n}.text        the bytes
    {part}-{split}-{n}.suffixes    positions in the text (int32), sorted by what follows there
    {part}-{split}-{n}.begins      the first position of each document (int32)

Positions with fewer than `SHORTEST` bytes of their document behind them are left out.
``extras/trust/benchmarks/trace.py`` measures the speed of building and of searching.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel

from spider.common.files import replacing
from spider.common.record import Record
from spider.common.results import Results
from spider.data.ngram.contexts import compiled, inner
from spider.data.shards import Metadata, Shards, check_size, load_metadata
from spider.tokens import Tokens

#: The byte that stands for a special token. UTF-8 never contains it.
END = 0xFF
#: Bytes of the shortest stretch that can be found.
SHORTEST = 8
#: Bytes of the largest piece, because positions are int32.
LARGEST = 2**31 - 1
#: Splits that models learn from or look up.
SPLITS = ("ngram", "train")


class PieceDescription(BaseModel, frozen=True):
    """A piece of the text of a shard: the documents from ``first`` on."""

    split: str
    first: int
    documents: int
    bytes: int
    suffixes: int


class TextIndex(Record):
    """``{part}.json``."""

    WHAT: ClassVar[str] = "the index of a training text"

    dataset: str
    part: str
    shards: dict[str, str]
    """SHA-256 of the part's shard in each split."""
    pieces: tuple[PieceDescription, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(one.bytes + 4 * (one.suffixes + one.documents) for one in self.pieces)


def described(results: Results, dataset: str, part: str) -> Path:
    """Return the path of the description of the index of a part."""
    return results.root / "text" / dataset / f"{part}.json"


# ----------------------------------------------------------------------------------------------- building


def build(folder: Path, part: str, output: Path, largest: int = LARGEST) -> TextIndex:
    """Index the training text of one part of an encoded dataset, and write its description to ``output``.

    Raises:
        ValueError: the part does not exist, a shard is damaged, or a document is larger than a piece.
    """
    metadata = load_metadata(folder)
    shards = shards_of(metadata, part)
    if not shards:
        raise ValueError(f"{folder}: no part {part!r}; `spider data inspect {folder}` shows the dataset")
    output.parent.mkdir(parents=True, exist_ok=True)
    for old in [output, *output.parent.glob(f"{part}-*")]:
        old.unlink(missing_ok=True)
    pieces = []
    for split in shards:
        view = Shards(folder, split)
        file = folder / split / f"{part}.bin"
        texts = _texts(view, view.files.index(file), largest) if file in view.files else []
        for number, (first, begins, text) in enumerate(texts):
            suffixes = _suffixes(text)
            arrays = {"text": text, "suffixes": suffixes, "begins": begins}
            for name, array in arrays.items():
                with replacing(output.with_name(f"{part}-{split}-{number}.{name}")) as beside:
                    array.tofile(beside)
            sizes = {"documents": len(begins), "bytes": len(text), "suffixes": len(suffixes)}
            pieces.append(PieceDescription(split=split, first=first, **sizes))
    return TextIndex(
        format=TextIndex.FORMAT,
        dataset=metadata.dataset,
        part=part,
        shards=shards,
        pieces=tuple(pieces),
    ).write(output)


def shards_of(metadata: Metadata, part: str) -> dict[str, str]:
    """Return the SHA-256 of the shard of a part in each split that models learn from or look up."""
    splits = {name: metadata.splits[name] for name in SPLITS if name in metadata.splits}
    found = {(name, one.part): one.sha256 for name, split in splits.items() for one in split.shards}
    return {name: found[name, part] for name in splits if (name, part) in found}


def begins_of(view: Shards, s: int) -> np.ndarray:
    """Return the first tokens of a file's documents. A file may begin inside one, which then counts too."""
    begins = view.begins(s)
    return begins if len(begins) and begins[0] == 0 else np.append(0, begins)


def widths(tokens: np.ndarray, vocabulary: Tokens) -> np.ndarray:
    """Return the bytes of the text that each token stands for, (n,) uint8; 1 for a special token."""
    if tokens.max(initial=0) >= vocabulary.size:
        raise ValueError("a shard holds tokens outside the vocabulary; `spider data verify` finds it")
    return np.maximum(vocabulary.bytes_of, 1)[tokens]


def _texts(view: Shards, s: int, largest: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the first document, the beginnings of the documents and the text of each piece of a file."""
    tokens, begins = view.within(s, 0, len(view.maps[s])), begins_of(view, s)
    ends_D = np.cumsum(np.add.reduceat(widths(tokens, view.vocabulary), begins, dtype=np.int64))
    texts = [text or bytes([END]) for text in view.vocabulary.texts]
    flat = np.frombuffer(b"".join(texts), np.uint8)
    begin_V = np.cumsum([0, *map(len, texts)])
    first = done = 0
    while first < len(begins):
        last = int(np.searchsorted(ends_D, done + largest, side="right"))
        if last == first:
            where = f"{view.files[s]}, token {begins[first]}"
            raise ValueError(f"{where}: a document of more than {largest:,} bytes, which cannot be indexed")
        text = np.empty(int(ends_D[last - 1]) - done, np.uint8)
        _decode(tokens[begins[first] : begins[last] if last < len(begins) else None], begin_V, flat, text)
        yield first, (np.append(done, ends_D[first : last - 1]) - done).astype(np.int32), text
        first, done = last, int(ends_D[last - 1])


@compiled
def _decode(tokens: np.ndarray, begin_V: np.ndarray, flat: np.ndarray, text: np.ndarray) -> None:
    """Write the bytes of tokens to ``text``."""
    at = 0
    for token in tokens:
        for i in range(begin_V[token], begin_V[token + 1]):
            text[at] = flat[i]
            at += 1


def _suffixes(text: np.ndarray) -> np.ndarray:
    """Return the sorted positions of a text that `SHORTEST` bytes of the same document follow."""
    from pydivsufsort import divsufsort

    suffixes = divsufsort(text)
    return suffixes[: _keep(text, suffixes)]


@compiled
def _keep(text: np.ndarray, suffixes: np.ndarray) -> int:
    """Move the positions that `SHORTEST` bytes of a document follow to the front; return their number."""
    count = 0
    for at in suffixes:
        inside = at + SHORTEST <= len(text)
        for i in range(SHORTEST):
            inside = inside and text[at + i] != END
        if inside:
            suffixes[count] = at
            count += 1
    return count


# ---------------------------------------------------------------------------------------------- searching


class Occurrence(NamedTuple):
    """A stretch in the training text."""

    split: str
    part: str
    document: int
    """Number of the document in its shard, from 0."""
    begin: int
    """First byte in the document, BOS included as a byte."""


@dataclass(frozen=True)
class Piece:
    """An opened piece of an index."""

    described: PieceDescription
    part: str
    text: np.ndarray
    suffixes: np.ndarray
    begins: np.ndarray

    def occurrence(self, at: int) -> Occurrence:
        """Return the document of a position of the text."""
        number = int(np.searchsorted(self.begins, at, side="right")) - 1
        described = self.described
        return Occurrence(described.split, self.part, described.first + number, at - int(self.begins[number]))


def open_index(path: Path, folder: Path, splits: Sequence[str] = SPLITS) -> list[Piece]:
    """Open the pieces of these splits of an index of a part of the dataset in ``folder``.

    Raises:
        ValueError: the index is damaged, or of other text than the dataset has now.
    """
    index = TextIndex.read(path)
    if index.shards != shards_of(load_metadata(folder), index.part):
        raise ValueError(f"{path}: is of other text than {folder} has now; {TextIndex.remedy(path)}")
    pieces = []
    numbers = dict.fromkeys(SPLITS, 0)
    for one in index.pieces:
        name = f"{index.part}-{one.split}-{numbers[one.split]}"
        numbers[one.split] += 1
        if one.split in splits:
            lengths: dict[str, tuple[int, Any]] = {
                "text": (one.bytes, np.uint8),
                "suffixes": (one.suffixes, np.int32),
                "begins": (one.documents, np.int32),
            }
            arrays = {key: _mapped(path.with_name(f"{name}.{key}"), *how) for key, how in lengths.items()}
            pieces.append(Piece(one, index.part, **arrays))
    return pieces


def _mapped(path: Path, length: int, dtype: Any) -> np.ndarray:
    """Return an array of a file, read-only."""
    check_size(path, length * np.dtype(dtype).itemsize)
    return np.asarray(np.memmap(path, dtype, "r")) if length else np.empty(0, dtype)


def stretches(pieces: Sequence[Piece], text: bytes, least: int) -> Iterator[tuple[int, int]]:
    """Yield first byte and end of the stretches of at least so many bytes that stand in the indexed text.

    A stretch is as long as possible: with one more byte before or after it, it does not stand there.
    """
    query = np.frombuffer(text, np.uint8)

    def longest(begin: int) -> int:
        return max((_bound(one.text, one.suffixes, query[begin:], False)[1] for one in pieces), default=0)

    begin = 0
    while begin + least <= len(query):
        length = longest(begin)
        if length < least:
            begin += 1
            continue
        end = begin + length
        yield begin, end
        # What begins later ends later. The search for the first such stretch bisects, because the end of the
        # longest stretch rises with its beginning.
        later = range(begin + 1, max(begin + 1, end - least + 2))
        begin += 1 + bisect_left(later, True, key=lambda at: longest(at) > end - at)


def occurrences(pieces: Sequence[Piece], stretch: bytes, most: int) -> tuple[int, list[Occurrence]]:
    """Return how often a stretch stands in the indexed text, and its first occurrences there."""
    query = np.frombuffer(stretch, np.uint8)
    total = 0
    found: list[Occurrence] = []
    for one in pieces:
        low, high = (_bound(one.text, one.suffixes, query, upper)[0] for upper in (False, True))
        total += high - low
        places = np.sort(one.suffixes[low:high])[: most - len(found)]
        found += [one.occurrence(at) for at in places.tolist()]
    return total, found


@inner
def _common(text: np.ndarray, at: int, query: np.ndarray, known: int) -> int:
    """Return how many bytes the text from a position on shares with a query; ``known`` of them are."""
    most = min(len(text) - at, len(query))
    while known < most and text[at + known] == query[known] and query[known] != END:
        known += 1
    return known


@compiled
def _bound(text: np.ndarray, suffixes: np.ndarray, query: np.ndarray, upper: bool) -> tuple[int, int]:
    """Return the first suffix that is not below a query, and the most bytes that a suffix shares with it.

    With ``upper``, suffixes that begin with the query count as below it. The query ends before `END`.
    """
    low, high = 0, len(suffixes)
    shared_low = shared_high = best = 0
    while low < high:
        middle = (low + high) // 2
        at = suffixes[middle]
        shared = _common(text, at, query, min(shared_low, shared_high))
        best = max(best, shared)
        if shared == len(query) or query[shared] == END:
            below = upper
        else:
            below = at + shared == len(text) or text[at + shared] < query[shared]
        if below:
            low, shared_low = middle + 1, shared
        else:
            high, shared_high = middle, shared
    return low, best
