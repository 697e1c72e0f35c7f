"""Find documents with text that models are measured with: held-out documents, tasks, and files of the user.

A document is contaminated if it has a sequence of words (13 by default) in common with a protected text. A
shorter protected text counts as a whole, down to 8 words. The hash of each sequence of a document is looked
up: a bitmap of the hashes' top bits rejects most of them, and a binary search finds the others. Then the
hashes of their words are compared, one by one.

Text that many documents of a part hold, such as a license, tells nothing about a measurement. So a sequence
of held-out text does not count if more than 10 documents of a part hold it (``common``, as for GPT-3).
Questions and files of the user always count.

Memory: about twenty times the protected text, and the matches. The training text is read once, in batches.

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
from spider.config.data import SHORTEST
from spider.data.cleaning import evidence
from spider.data.cleaning.words import SYMBOLS, sequences, words
from spider.data.documents import plain_documents, truncate

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
        chosen = documents.filter(held_out)
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
        chosen = documents.filter(~held_out)
        before = known.searched
        for number in known.search(chosen.texts).tolist():
            size = pc.binary_length(chosen.texts[number]).as_py()
            id = chosen.ids[number].as_py()
            columns[before + number] = {"row": int(chosen.rows[number]), "id": id, "bytes": size}
    shared = {"part": part, "reason": "contaminated", "rule": RULE}
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
        rows += [{"source": source, "document": document, "text": text, "held_out": False} for text in texts]
    own = pa.Table.from_pylist(rows, SCHEMA)
    table = pa.concat_tables([own, *(pq.read_table(path, schema=SCHEMA) for path in held_out)])
    evidence.write(output, table)
    long_T = np.diff(words(table["text"].combine_chunks()).bounds_D) >= shortest
    names = zip(table["source"].to_pylist(), table["document"].to_pylist(), strict=True)
    for name, is_long in zip(names, long_T.tolist(), strict=True):
        protects[name] = protects.get(name, False) or is_long
    documents = Counter(source for source, _ in protects)
    short = Counter(source for (source, _), is_long in protects.items() if not is_long)
    return {source: (count, short[source]) for source, count in documents.items()}


class Sequences(NamedTuple):
    """Protected sequences of words of one length, in the order of their hashes."""

    hash_S: np.ndarray
    word_S: np.ndarray
    """Number of the first word among the words of all protected texts."""
    limit_S: np.ndarray
    """Most documents that may hold the sequence, so that it counts."""
    count_S: np.ndarray
    """Documents that held it so far."""
    bitmap: np.ndarray
    """Whether a hash has these top bits."""

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these hashes are those of a sequence, and the numbers of these sequences."""
        shift = np.uint64(64 - (len(self.bitmap).bit_length() - 1))
        likely = np.flatnonzero(self.bitmap[hashes >> shift])
        number = np.minimum(np.searchsorted(self.hash_S, hashes[likely]), len(self.hash_S) - 1)
        same = self.hash_S[number] == hashes[likely]
        return likely[same], number[same]


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
        self._words = words(texts["text"].combine_chunks())
        #: Words of the sequences of each text.
        self._length_T = np.minimum(np.diff(self._words.bounds_D), length)
        none = np.iinfo(np.int64).max
        limit_T = np.where(texts["held_out"].to_numpy(), none if common is None else common, none)
        self._known: dict[int, Sequences] = {}
        for size in range(shortest, length + 1):
            hashes, firsts = sequences(self._words, size)
            own = self._length_T[self._text_of(firsts)] == size
            hash_S, index = np.unique(hashes[own], return_index=True)
            if len(hash_S):
                word_S = firsts[own][index]
                bits = len(hash_S).bit_length() + 4
                bitmap = np.zeros(1 << bits, bool)
                bitmap[hash_S >> np.uint64(64 - bits)] = True
                limit_S = limit_T[self._text_of(word_S)]
                self._known[size] = Sequences(hash_S, word_S, limit_S, np.zeros_like(word_S), bitmap)
        self._hits: dict[int, list[np.ndarray]] = {size: [] for size in self._known}
        self.searched = 0
        """Number of documents that were searched."""

    def _text_of(self, word_M: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._words.bounds_D, word_M, side="right") - 1

    def search(self, texts: pa.Array) -> np.ndarray:
        """Search further documents, and return the numbers of those, in this batch, that may have a match."""
        found = words(texts)
        numbers = [np.empty(0, np.int64)]
        for size, known in self._known.items():
            hashes, firsts = sequences(found, size)
            at, number = known.find(hashes)
            first, word = firsts[at], known.word_S[number]
            # Sequences that too many documents hold get no further row, so there are few rows.
            same = known.count_S[number] <= known.limit_S[number]
            for k in range(size):
                same &= found.hash_W[first + k] == self._words.hash_W[word + k]
            first, number = first[same], number[same]
            document = np.searchsorted(found.bounds_D, first, side="right") - 1
            holds = np.unique(np.column_stack([number, document]), axis=0)
            np.add.at(known.count_S, holds[:, 0], 1)
            self._hits[size].append(np.column_stack([self.searched + document, first, number]))
            numbers.append(document)
        self.searched += len(texts)
        return np.unique(np.concatenate(numbers))

    def matches(self) -> Iterator[Match]:
        """Yield the match of each document that has one, in the order of the documents."""
        found = [np.empty((0, 3), np.int64)]
        for size, known in self._known.items():
            hits = np.concatenate([np.empty((0, 3), np.int64), *self._hits[size]])
            hits = hits[known.count_S[hits[:, 2]] <= known.limit_S[hits[:, 2]]]
            found.append(np.column_stack([hits[:, :2], known.word_S[hits[:, 2]]]))
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
        first, length = int(own[begins[sizes.argmax()], 1]), int(self._length_T[best])
        end = first + int(sizes.max()) - 1 + length
        begin_W, data = np.append(self._words.begin_W, len(self._words.data)), self._words.data
        shown = data[begin_W[first] : begin_W[end]].tobytes().rstrip(_SEPARATORS)
        return Match(
            document=int(hit_M[0, 0]),
            source=self._texts["source"][best].as_py(),
            text_document=self._texts["document"][best].as_py(),
            words=truncate(shown, SHOWN_BYTES).decode(errors="replace"),
            sequences=count,
            share=count / int(np.diff(self._words.bounds_D)[best] - length + 1),
        )

    def common(self) -> int:
        """Return the number of sequences that did not count, because too many documents held them."""
        return sum(int((known.count_S > known.limit_S).sum()) for known in self._known.values())
