"""Find documents with text that models are measured with: held-out documents, tasks, and files of the user.

A document is contaminated if it has a sequence of words (13 by default) in common with a protected text. A
shorter protected text counts as a whole, down to 8 words. The hash of each sequence of a document is looked
up: a bitmap of the hashes' top bits rejects most of them, and a binary search finds the others. Then the
words themselves are compared, so equal hashes alone remove nothing.

Text that many documents of a part hold, such as a license, tells nothing about a measurement. So a sequence
of held-out text does not count if more than 10 documents of a part hold it (``common``, as for GPT-3).
Questions and files of the user always count.

Memory: about ten times the protected text, and the matches. The training text is read once, in batches.

Shapes: T protected texts, S protected sequences of one length, W words and D documents of a batch, M matches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.config.cleaning import SHORTEST
from spider.data.cleaning import evidence
from spider.data.cleaning.words import SYMBOLS, Words, sequences, words
from spider.data.encode import plain_documents
from spider.data.ngram.contexts import compiled, inner
from spider.data.split import truncate

SCHEMA = pa.schema(
    [
        ("source", pa.string()),  # a dataset, the key of a task, or a file
        ("document", pa.large_string()),  # its id, or its place in the file
        ("text", pa.large_string()),
        ("held_out", pa.bool_()),
    ]
)
#: Name and version of this rule in the evidence.
RULE = "contaminated/1"
#: Length of a match, in words.
WORDS = 13
#: Most documents of a part with the same match in held-out text. Text that more of them hold, such as a
#: license, does not count.
COMMON = 10
#: Most bytes of matched words that are shown.
SHOWN_BYTES = 400
_SEPARATORS = bytes(np.flatnonzero(SYMBOLS == 0).tolist())


def write_held_out(parquet: Path, output: Path, name: str, dataset: Dataset) -> int:
    """Write the held-out documents of a part, and return their number; raises like `encode_part`."""
    found = [SCHEMA.empty_table()]
    for documents, held_out in plain_documents(parquet, dataset):
        chosen = documents.filter(pa.array(held_out))
        size = len(chosen.rows)
        places = pa.array([f"{output.stem}/{row}" for row in chosen.rows.tolist()], pa.large_string())
        ids = pc.coalesce(chosen.ids, places)
        columns = [pa.repeat(name, size), ids, chosen.texts, pa.repeat(True, size)]
        found.append(pa.table(columns, SCHEMA))
    evidence.write(output, table := pa.concat_tables(found))
    return len(table)


def find_contaminated(parquet: Path, part: str, dataset: Dataset, protected: Path) -> tuple[pa.Table, int]:
    """Return the evidence of a part, and the number of sequences that too many documents hold.

    Held-out documents are not searched. Raises like `encode_part`.
    """
    known = Protected(pq.read_table(protected), WORDS, SHORTEST, COMMON)
    columns: dict[int, dict[str, Any]] = {}
    for documents, held_out in plain_documents(parquet, dataset):
        chosen = documents.filter(pa.array(~held_out))
        before = known.searched
        for number in known.search(chosen.texts).tolist():
            size = pc.binary_length(chosen.texts[number]).as_py()
            id = chosen.ids[number].as_py()
            columns[before + number] = {"row": int(chosen.rows[number]), "id": id, "bytes": size}
    shared = {"part": part, "reason": "contaminated", "removed": True, "rule": RULE}
    rows = [
        columns[found.document]
        | shared
        | {"kept_dataset": found.source, "kept_id": found.text_document, "words": found.words}
        | {"matches": found.sequences, "containment": found.share}
        for found in known.matches()
    ]
    return pa.Table.from_pylist(rows, evidence.SCHEMA), known.common()


def write_protected(
    output: Path, given: Iterable[tuple[str, str, list[str]]], held_out: Iterable[Path], shortest: int
) -> dict[str, tuple[int, int]]:
    """Write the texts of tasks and of files, and those of held-out documents, into one file.

    Args:
        given: source, name and texts of each question or document.
        held_out: files of held-out documents.
        shortest: fewest words of a text that can be found.

    Returns:
        Numbers by source: of documents, and of those without a text of ``shortest`` words.
    """
    protects: dict[tuple[str, str], bool] = {}
    rows = []
    for source, document, texts in given:
        protects[source, document] = False
        rows += [(source, document, text, False) for text in texts]
    columns = list(map(list, zip(*rows, strict=True))) or [[]] * len(SCHEMA)
    own = pa.table(columns, SCHEMA)
    table = pa.concat_tables([own, *(pq.read_table(path, schema=SCHEMA) for path in held_out)])
    evidence.write(output, table)
    long_T = np.diff(words(_array(table)).bounds_D) >= shortest
    names = zip(table["source"].to_pylist(), table["document"].to_pylist(), strict=True)
    for name, is_long in zip(names, long_T.tolist(), strict=True):
        protects[name] = protects.get(name, False) or is_long
    documents = Counter(source for source, _ in protects)
    short = Counter(source for (source, _), is_long in protects.items() if not is_long)
    return {source: (count, short[source]) for source, count in documents.items()}


def _array(table: pa.Table) -> pa.Array:
    return table["text"].combine_chunks()


class Sequences(NamedTuple):
    """Protected sequences of words, in the order of the hashes of their first words."""

    hash_S: np.ndarray
    word_S: np.ndarray
    """Number of the first word among the words of all protected texts."""
    length_S: np.ndarray
    limit_S: np.ndarray
    """Most documents that may hold the sequence, so that it counts."""
    count_S: np.ndarray
    """Documents that held it so far, and at ``last_S`` the number of the last one."""
    last_S: np.ndarray
    bits: np.ndarray
    shift: np.uint64
    """The top bits of a hash, above ``shift``, are the number of its bit."""


class Match(NamedTuple):
    """The protected text that has most sequences in common with a document."""

    document: int
    """Number of the document among those that were searched."""
    source: str
    text_document: str
    words: str
    """The longest run of common words, as the protected text has them."""
    sequences: int
    """Number of its different sequences that the document holds."""
    share: float
    """Share of its sequences that the document holds."""


class Protected:
    """Protected texts, and what was found of them in the documents that were searched."""

    def __init__(self, texts: pa.Table, length: int, shortest: int, common: int | None) -> None:
        self._texts = texts
        self._words = words(_array(texts))
        self._joined = _Text.of(self._words)
        self._words_T = np.diff(self._words.bounds_D)
        self._length, self._shortest = length, shortest
        none = np.iinfo(np.int32).max
        self._limit_T = np.where(texts["held_out"].to_numpy(), none if common is None else common, none)
        hashes, firsts = sequences(self._words, length)
        hash_S, index = np.unique(hashes, return_index=True)
        self._known = {length: self._sequences(hash_S, firsts[index])}
        is_short_T = (self._words_T >= shortest) & (self._words_T < length)
        if is_short_T.any():
            self._known[shortest] = self._short(is_short_T, shortest)
        self._hits = {size: [np.empty((0, 3), np.int64)] for size in self._known}
        self.searched = 0
        """Number of documents that were searched."""

    def _short(self, is_short_T: np.ndarray, shortest: int) -> Sequences:
        """Return the whole texts that are shorter than a sequence, by the hashes of their first words."""
        bounds = self._words.bounds_D
        different: dict[bytes, int] = {}
        for first, end in zip(bounds[:-1][is_short_T].tolist(), bounds[1:][is_short_T].tolist(), strict=True):
            different.setdefault(self._words.hash_W[first:end].tobytes(), first)
        word_S = np.fromiter(different.values(), np.int64)
        hashes, firsts = sequences(self._words, shortest)
        hash_S = hashes[np.searchsorted(firsts, word_S)]
        order = np.argsort(hash_S, kind="stable")
        return self._sequences(hash_S[order], word_S[order])

    def _sequences(self, hash_S: np.ndarray, word_S: np.ndarray) -> Sequences:
        text_S = self._text_of(word_S)
        bits = len(hash_S).bit_length() + 5
        bitmap, shift = np.zeros(1 << bits >> 3, np.uint8), np.uint64(64 - bits)
        _mark(hash_S, bitmap, shift)
        return Sequences(
            hash_S=hash_S,
            word_S=word_S,
            length_S=np.minimum(self._words_T[text_S], self._length),
            limit_S=self._limit_T[text_S].astype(np.int32),
            count_S=np.zeros(len(hash_S), np.int32),
            last_S=np.full(len(hash_S), -1, np.int32),
            bits=bitmap,
            shift=shift,
        )

    def _text_of(self, word_M: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._words.bounds_D, word_M, side="right") - 1

    def search(self, texts: pa.Array) -> np.ndarray:
        """Search further documents, and return the numbers of those, in this batch, that may have a match."""
        found = words(texts)
        text = _Text.of(found)
        numbers = [np.empty(0, np.int64)]
        for length, known in self._known.items():
            hashes, firsts = sequences(found, length)
            # Several texts may begin with the same words, but those of one length differ.
            hits = np.empty((len(hashes) * (self._length - self._shortest + 1), 3), np.int64)
            count = _find(hashes, firsts, text, known, self._joined, self.searched, hits)
            self._hits[length].append(hits[:count].copy())
            numbers.append(hits[:count, 0] - self.searched)
        self.searched += len(texts)
        return np.unique(np.concatenate(numbers))

    def matches(self) -> Iterator[Match]:
        """Yield the match of each document that has one, in the order of the documents."""
        found = [np.empty((0, 3), np.int64)]
        for length, known in self._known.items():
            hits = np.concatenate(self._hits[length])
            counts = known.count_S[hits[:, 2]] <= known.limit_S[hits[:, 2]]
            found.append(np.column_stack([hits[counts, :2], known.word_S[hits[counts, 2]]]))
        rows = np.concatenate(found)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        for own in np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1):
            if len(own):
                yield self._match(own)

    def _match(self, hit_M: np.ndarray) -> Match:
        """Return the match of a document from its hits: document, first word there, first protected word."""
        text_M = self._text_of(hit_M[:, 2])
        texts, counts = np.unique(self._text_of(np.unique(hit_M[:, 2])), return_counts=True)
        best, count = int(texts[counts.argmax()]), int(counts.max())
        own = hit_M[text_M == best, 1:]
        begins = np.flatnonzero((np.diff(own, axis=0, prepend=-2) != 1).any(1))
        sizes = np.diff(np.append(begins, len(own)))
        at = int(begins[sizes.argmax()])
        length = min(int(self._words_T[best]), self._length)
        first = int(own[at, 1])
        end = first + int(sizes.max()) - 1 + length
        shown = (
            self._joined.data[self._joined.begin_W[first] : self._joined.begin_W[end]]
            .tobytes()
            .rstrip(_SEPARATORS)
        )
        return Match(
            document=int(hit_M[0, 0]),
            source=self._texts["source"][best].as_py(),
            text_document=self._texts["document"][best].as_py(),
            words=truncate(shown, SHOWN_BYTES).decode(errors="replace"),
            sequences=count,
            share=count / (int(self._words_T[best]) - length + 1),
        )

    def common(self) -> int:
        """Return the number of sequences that did not count, because too many documents held them."""
        return sum(int((known.count_S > known.limit_S).sum()) for known in self._known.values())


class _Text(NamedTuple):
    """Documents for compiled loops; their words as in `Words`, with the end of the text as another begin."""

    data: np.ndarray
    begin_W: np.ndarray
    bounds_D: np.ndarray

    @classmethod
    def of(cls, found: Words) -> _Text:
        return cls(found.data, np.append(found.begin_W, len(found.data)), found.bounds_D)


@compiled
def _mark(hash_S: np.ndarray, bits: np.ndarray, shift: np.uint64) -> None:
    """Set the bit of each hash."""
    for s in range(len(hash_S)):
        bit = hash_S[s] >> shift
        bits[bit >> np.uint64(3)] |= np.uint8(1) << np.uint8(bit & np.uint64(7))


@compiled
def _find(
    hashes: np.ndarray,
    firsts: np.ndarray,
    text: _Text,
    known: Sequences,
    protected: _Text,
    before: int,
    hits: np.ndarray,
) -> int:
    """Fill a row of ``hits`` for each protected sequence, and return the number of rows.

    A row is the document, the first word there, and the number of the sequence. A sequence that too many
    documents hold gets no further row, so there are few rows.
    """
    count, document = 0, 0
    for i in range(len(hashes)):
        bit = hashes[i] >> known.shift
        if not (known.bits[bit >> np.uint64(3)] >> np.uint8(bit & np.uint64(7))) & 1:
            continue
        while text.bounds_D[document + 1] <= firsts[i]:
            document += 1
        s = np.searchsorted(known.hash_S, hashes[i])
        while s < len(known.hash_S) and known.hash_S[s] == hashes[i]:
            length = known.length_S[s]
            inside = firsts[i] + length <= text.bounds_D[document + 1]
            if inside and _same(text, firsts[i], protected, known.word_S[s], length):
                if known.last_S[s] != before + document:
                    known.last_S[s] = before + document
                    known.count_S[s] += 1
                if known.count_S[s] <= known.limit_S[s]:
                    hits[count, 0] = before + document
                    hits[count, 1] = firsts[i]
                    hits[count, 2] = s
                    count += 1
            s += 1
    return count


@inner
def _same(a: _Text, v: int, b: _Text, w: int, length: int) -> bool:
    """Return whether the words from number ``v`` of a text on are those from number ``w`` of another on."""
    for k in range(length):
        i, j = a.begin_W[v + k], b.begin_W[w + k]
        while True:  # a word ends before a separator, or where the next document begins
            x = SYMBOLS[a.data[i]] if i < a.begin_W[v + k + 1] else 0
            y = SYMBOLS[b.data[j]] if j < b.begin_W[w + k + 1] else 0
            if x != y:
                return False
            if not x:
                break
            i += 1
            j += 1
    return True
