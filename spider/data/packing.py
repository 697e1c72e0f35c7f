"""Documents packed into rows that begin with a document: nothing is lost, and almost nothing is padding.

The ring of `spider.data.loader` cuts the text wherever a window ends. Here a row of S + 1 slots holds whole
documents, as far as they fit. One of more than S + 1 ids is cut into pieces that overlap by one id, which is
the last target of one and the first input of the next; so every id but a document's first is a target exactly
once, and only the ends of rows are padding.

Pieces are placed the longest first, each into the fullest row with room for it (best-fit decreasing: Johnson,
"Near-optimal bin packing algorithms", 1973; for documents: Ding et al., "Fewer Truncations Improve Language
Modeling", 2024). Lengths are small numbers and pieces many, so pieces of one length go at once into rows that
have the same room. Among pieces of one length, chance decides which goes where.

The plan is made once, by a job, and lies beside the shards; what a row holds is known by its number, so the
order of rows is shuffled and entered anywhere like that of windows. Best-fit puts one long piece and the
short ones that fill its row together: take rows in a shuffled order only.

    packed-2048.json    what it was made of, and its counts
    packed-2048.pieces  of each piece its first token in the split (uint64) and its ids (uint32), row by row
    packed-2048.rows    of each row its first piece (uint64), and the number of pieces
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np

from spider.data.metadata import DTYPE, check_size
from spider.data.shards import Shards
from spider.files import digest, replacing
from spider.record import Record
from spider.tokens.turns import answering, learned

#: Of which piece of a length goes where.
SEED = 0
PIECE = np.dtype([("first", "<u8"), ("length", "<u4")])


class Packing(Record):
    """``packed-{seq_len}.json``."""

    WHAT: ClassVar[str] = "a plan of packed rows"
    REMEDY: ClassVar[str] = "delete it and pack the dataset again (`spider pack`)"

    data: str
    """Digest of the split."""
    seq_len: int
    rows: int
    pieces: int
    most_pieces: int
    """Of a row."""
    targets: int
    filled: float
    """Share of the slots that hold an id."""

    @property
    def digest(self) -> str:
        return digest(["best_fit", self.format, self.data, self.seq_len, SEED])


class Plan(NamedTuple):
    """Which piece lies in which row."""

    pieces: np.ndarray
    """`PIECE`, row by row: (pieces,)."""
    rows: np.ndarray
    """First piece of each row, and the number of pieces: (rows + 1,) int64."""


def cut(begins_D: np.ndarray, tokens: int, seq_len: int) -> np.ndarray:
    """Return, in order, the pieces of documents that begin at these tokens; the last ends at ``tokens``."""
    targets_D = np.diff(np.append(begins_D, tokens)) - 1
    count_D = np.maximum(1, -(-targets_D // seq_len))
    pieces = np.empty(int(count_D.sum()), PIECE)
    before_P = np.arange(len(pieces))  # targets of the same document in earlier pieces
    before_P -= np.repeat(np.cumsum(count_D) - count_D, count_D)
    before_P *= seq_len
    pieces["first"] = np.repeat(begins_D, count_D)
    pieces["first"] += before_P.astype("<u8", copy=False)
    left_P = np.repeat(targets_D, count_D)
    left_P -= before_P
    pieces["length"] = np.minimum(left_P, seq_len, out=left_P)
    pieces["length"] += 1
    return pieces


def plan(pieces: np.ndarray, seq_len: int) -> Plan:
    """Place pieces of at most ``seq_len`` + 1 ids into rows of so many slots.

    Some 45 bytes a piece are held, those of ``pieces`` among them (`spider.requests.packing`).
    """
    slots = seq_len + 1
    number = np.uint32 if len(pieces) <= np.iinfo(np.uint32).max else np.int64
    order_P = np.arange(len(pieces), dtype=number)
    np.random.default_rng(SEED).shuffle(order_P)
    shorter_P = slots - pieces["length"][order_P]
    order_P = order_P[np.argsort(shorter_P, kind="stable")]
    del shorter_P
    row_P = np.empty(len(pieces), number)
    by_room: dict[int, list[np.ndarray]] = defaultdict(list)
    there = np.zeros(slots + 1, bool)
    made = placed = 0
    for length, count in zip(*_falling(pieces["length"]), strict=True):
        end = placed + count
        while placed < end:
            room = length + int(np.argmax(there[length:]))
            if not there[room]:
                new = -(-(end - placed) // (slots // length))
                by_room[slots].append(np.arange(made, made + new, dtype=number))
                made, room = made + new, slots
            rows = by_room[room].pop()
            taken, left = np.split(rows, [min(len(rows), end - placed)])
            if len(left):
                by_room[room].append(left)
            row_P[order_P[placed : placed + len(taken)]] = taken
            placed += len(taken)
            by_room[room - length].append(taken)
            there[room], there[room - length] = bool(by_room[room]), True
    del order_P, by_room
    first = np.zeros(made + 1, np.int64)
    np.cumsum(np.bincount(row_P, minlength=made), out=first[1:])
    return Plan(pieces[np.argsort(row_P, kind="stable")], first)


def _falling(length_P: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the lengths that occur, the longest first, and how many pieces have each."""
    counts = np.bincount(length_P)
    lengths = np.flatnonzero(counts)[::-1]
    return lengths.tolist(), counts[lengths].tolist()


def pack(folder: Path, seq_len: int) -> Packing:
    """Plan the training split of an encoded dataset and lay the plan beside its shards; `ValueError` where
    there is no text."""
    shards = Shards(folder, "train")
    if not shards.tokens:
        raise ValueError(f"{shards.name}: holds no text to pack; lower `validation` and encode again")
    pieces, rows = plan(cut(_begins(shards), shards.tokens, seq_len), seq_len)
    held = int(pieces["length"].sum())
    name = _name(folder, seq_len)
    name.with_suffix(".json").unlink(missing_ok=True)  # an earlier plan's must not vouch for these rows
    for suffix, values in ((".pieces", pieces), (".rows", rows.astype("<u8"))):
        with replacing(name.with_suffix(suffix)) as beside:
            beside.write_bytes(values.data)  # `tofile` does not notice that its last kilobytes find no room
    made = Packing(
        format=Packing.FORMAT,
        data=shards.digest,
        seq_len=seq_len,
        rows=len(rows) - 1,
        pieces=len(pieces),
        most_pieces=int(np.diff(rows).max()),
        targets=held - len(pieces),
        filled=held / ((len(rows) - 1) * (seq_len + 1)),
    )
    return made.write(name.with_suffix(".json"))


def _begins(shards: Shards) -> np.ndarray:
    """Return the first token of each document of a split: (documents,)."""
    borders = shards.borders[:-1].tolist()
    return np.concatenate([border + shards.begins(s) for s, border in enumerate(borders)])


def _name(folder: Path, seq_len: int) -> Path:
    return folder / f"packed-{seq_len}"


class PackedRows:
    """The rows of a plan, read from the shards that it was made of. Safe to use from several threads."""

    def __init__(self, shards: Shards, pieces: np.ndarray, rows: np.ndarray, packing: Packing) -> None:
        self.shards, self.packing = shards, packing
        self.pieces, self.first = pieces, rows

    @classmethod
    def open(cls, folder: Path, shards: Shards, seq_len: int) -> Self:
        """The plan of a dataset's training split; `ValueError` where there is none, or of another."""
        name = _name(folder, seq_len)
        remedy = f"run `spider pack {folder.name} {seq_len}`"
        if not name.with_suffix(".json").exists():
            raise ValueError(f"{name}.json: the dataset is not packed into rows of {seq_len}; {remedy}")
        packing = Packing.read(name.with_suffix(".json"))
        if packing.data != shards.digest or packing.seq_len != seq_len:
            raise ValueError(f"{name}.json: a plan of other text than lies there; {remedy}")
        maps: list[np.ndarray] = []
        for suffix, kind, count in ((".pieces", PIECE, packing.pieces), (".rows", "<u8", packing.rows + 1)):
            try:
                check_size(name.with_suffix(suffix), count * np.dtype(kind).itemsize)
            except ValueError:
                raise ValueError(f"{name}{suffix}: missing or damaged; {remedy}") from None
            maps.append(np.memmap(name.with_suffix(suffix), kind, "r"))
        return cls(shards, maps[0], maps[1], packing)

    @property
    def count(self) -> int:
        return self.packing.rows

    def answers(self, numbers: np.ndarray, ids_BT1: np.ndarray) -> np.ndarray:
        """Which targets of these rows an assistant says (`spider.tokens.turns`): (n, seq_len) bool. Who
        speaks at the beginning of a piece is looked up in what lies before it of its document."""
        said_BT1 = np.zeros(ids_BT1.shape, bool)
        for ids_T1, said_T1, row in zip(ids_BT1, said_BT1, numbers.tolist(), strict=True):
            at = 0
            for first, length in self._pieces(row).tolist():
                here = slice(at, at + length)
                said_T1[here] = learned(ids_T1[here], self._answering(first, ids_T1[at]))
                at += length
        return said_BT1[:, 1:]

    def _answering(self, first: int, begins_with: int) -> bool:
        if begins_with == self.shards.vocabulary.bos:
            return False
        _, begin, at, _ = self.shards.document(first)
        return answering(self.shards.read(first - (at - begin), at - begin))

    def spans(self, numbers: np.ndarray) -> np.ndarray:
        """The pieces of these rows: (pieces,) of `PIECE`."""
        return np.concatenate([self._pieces(row) for row in numbers.tolist()] or [np.empty(0, PIECE)])

    def _pieces(self, row: int) -> np.ndarray:
        return self.pieces[int(self.first[row]) : int(self.first[row + 1])]

    def rows(self, numbers: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of these rows, ``pad`` after their last, and which of its pieces each belongs to, from 1,
        with 0 for padding: two of (n, seq_len + 1) uint16."""
        shape = len(numbers), self.packing.seq_len + 1
        ids_BT1, segments_BT1 = np.full(shape, pad, DTYPE), np.zeros(shape, np.uint16)
        for ids_T1, segments_T1, row in zip(ids_BT1, segments_BT1, numbers.tolist(), strict=True):
            at = 0
            for number, (first, length) in enumerate(self._pieces(row).tolist(), start=1):
                ids_T1[at : at + length] = self.shards.read(first, length)
                segments_T1[at : at + length] = number
                at += length
        return ids_BT1, segments_BT1
