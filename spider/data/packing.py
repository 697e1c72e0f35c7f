"""Pack documents into rows that begin with a document, without losing text and with little padding.

The ring of `spider.data.loader` divides the text at any token. Here a row of S + 1 slots holds whole
documents. A document of more than S + 1 tokens is cut into pieces that overlap by one token: the last
target of a piece is the first input of the next. So every token except a document's first is a target
exactly once, and only the ends of rows are padding.

Pieces are placed the longest first, each into the fullest row that has space for it (best-fit decreasing:
Johnson, "Near-optimal bin packing algorithms", 1973; for documents: Ding et al., "Fewer Truncations Improve
Language Modeling", 2024). There are few lengths and many pieces, so all pieces of one length go at once into
rows with the same free space. Pieces of one length are shuffled first.

A job makes the plan once, and stores it beside the shards. A row is identified by its number, so rows are
shuffled and resumed like windows. Best-fit puts a long piece and the short ones that fill its row together,
so rows must be read in a shuffled order.

    packed-2048.json    description and counts
    packed-2048.pieces  first token in the split (uint64) and length (uint32) of each piece, row by row
    packed-2048.rows    first piece of each row (uint64), and the number of pieces
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np

from spider.common.files import digest, replacing
from spider.common.record import Record
from spider.data.shards import DTYPE, Shards, check_size
from spider.tokens.turns import assistant_mask, ends_inside_answer

#: Seed of the shuffle of pieces of one length.
SEED = 0
PIECE = np.dtype([("first", "<u8"), ("length", "<u4")])


class Packing(Record):
    """``packed-{seq_len}.json``."""

    WHAT: ClassVar[str] = "a plan of packed rows"

    data: str
    """Digest of the split."""
    seq_len: int
    rows: int
    pieces: int
    most_pieces: int
    """Most pieces in a row."""
    targets: int
    filled: float
    """Share of the slots that hold a token."""

    @property
    def digest(self) -> str:
        return digest(["best_fit", self.format, self.data, self.seq_len, SEED])


class Plan(NamedTuple):
    """The pieces of each row."""

    pieces: np.ndarray
    """Pieces row by row, (pieces,) of `PIECE`."""
    rows: np.ndarray
    """First piece of each row, and the number of pieces: (rows + 1,) int64."""


def cut_documents(begins_D: np.ndarray, tokens: int, seq_len: int) -> np.ndarray:
    """Return the pieces of documents that begin at the given tokens; the last document ends at ``tokens``."""
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
    """Place pieces of at most ``seq_len`` + 1 tokens into rows of so many slots.

    This takes about 45 bytes of memory per piece, including ``pieces`` (`spider.config.requests.packing`).
    """
    slots = seq_len + 1
    number = np.uint32 if len(pieces) <= np.iinfo(np.uint32).max else np.int64
    order_P = np.arange(len(pieces), dtype=number)
    np.random.default_rng(SEED).shuffle(order_P)
    shorter_P = slots - pieces["length"][order_P]
    order_P = order_P[np.argsort(shorter_P, kind="stable")]
    del shorter_P
    row_P = np.empty(len(pieces), number)
    rows_by_space: dict[int, list[np.ndarray]] = defaultdict(list)
    has_rows = np.zeros(slots + 1, bool)
    total = 0
    placed = 0
    count_L = np.bincount(pieces["length"])
    for length in np.flatnonzero(count_L)[::-1].tolist():
        end = placed + int(count_L[length])
        while placed < end:
            space = length + int(np.argmax(has_rows[length:]))
            if not has_rows[space]:
                new = -(-(end - placed) // (slots // length))
                space = slots
                rows_by_space[space].append(np.arange(total, total + new, dtype=number))
                total += new
            rows = rows_by_space[space].pop()
            taken, left = np.split(rows, [min(len(rows), end - placed)])
            if len(left):
                rows_by_space[space].append(left)
            row_P[order_P[placed : placed + len(taken)]] = taken
            placed += len(taken)
            rows_by_space[space - length].append(taken)
            has_rows[space] = bool(rows_by_space[space])
            has_rows[space - length] = True
    del order_P, rows_by_space
    first = np.zeros(total + 1, np.int64)
    np.cumsum(np.bincount(row_P, minlength=total), out=first[1:])
    return Plan(pieces[np.argsort(row_P, kind="stable")], first)


def pack(folder: Path, seq_len: int) -> Packing:
    """Pack the training split of an encoded dataset and store the plan beside its shards.

    Raises `ValueError` if the split is empty.
    """
    shards = Shards(folder, "train")
    if not shards.tokens:
        raise ValueError(f"{shards.name}: holds no text to pack; lower `validation` and encode again")
    pieces, rows = plan(cut_documents(_begins(shards), shards.tokens, seq_len), seq_len)
    held = int(pieces["length"].sum())
    name = _name(folder, seq_len)
    name.with_suffix(".json").unlink(
        missing_ok=True
    )  # the description of an earlier plan must not describe these rows
    for suffix, values in ((".pieces", pieces), (".rows", rows.astype("<u8"))):
        with replacing(name.with_suffix(suffix)) as temporary:
            temporary.write_bytes(values.data)  # `tofile` raises no error if the disk is full at the end
    packing = Packing(
        format=Packing.FORMAT,
        data=shards.digest,
        seq_len=seq_len,
        rows=len(rows) - 1,
        pieces=len(pieces),
        most_pieces=int(np.diff(rows).max()),
        targets=held - len(pieces),
        filled=held / ((len(rows) - 1) * (seq_len + 1)),
    )
    return packing.write(name.with_suffix(".json"))


def most_documents(folders: Iterable[Path], seq_len: int) -> int:
    """Return a bound on the pieces in a row of these datasets: a power of two, so that most datasets share
    what is compiled for it."""
    plans = [Packing.read(_name(folder, seq_len).with_suffix(".json")) for folder in folders]
    return 1 << (max(plan.most_pieces for plan in plans) - 1).bit_length()


def _begins(shards: Shards) -> np.ndarray:
    """Return the first token of each document of a split: (documents,)."""
    borders = shards.borders[:-1].tolist()
    return np.concatenate([border + shards.begins(s) for s, border in enumerate(borders)])


def _name(folder: Path, seq_len: int) -> Path:
    return folder / f"packed-{seq_len}"


class PackedRows:
    """The rows of a plan, read from its shards. Several threads may use it."""

    def __init__(self, shards: Shards, pieces: np.ndarray, rows: np.ndarray, packing: Packing) -> None:
        self.shards = shards
        self.packing = packing
        self.pieces = pieces
        self.first = rows

    @classmethod
    def open(cls, folder: Path, shards: Shards, seq_len: int) -> Self:
        """Open the plan of a dataset's training split; `ValueError` if it is missing or of other text."""
        name = _name(folder, seq_len)
        remedy = f"run `spider data pack {folder.name} {seq_len}`"
        if not name.with_suffix(".json").exists():
            raise ValueError(f"{name}.json: the dataset is not packed into rows of {seq_len}; {remedy}")
        packing = Packing.read(name.with_suffix(".json"))
        if packing.data != shards.digest or packing.seq_len != seq_len:
            raise ValueError(f"{name}.json: the plan is of other text than the shards; {remedy}")
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
        """Return which targets of rows belong to an answer (`spider.tokens.turns`), (n, seq_len) bool.

        The text of a document before a piece decides whether the piece begins inside an answer.
        """
        mask_BT1 = np.zeros(ids_BT1.shape, bool)
        for ids_T1, mask_T1, row in zip(ids_BT1, mask_BT1, numbers.tolist(), strict=True):
            at = 0
            for first, length in self._pieces(row).tolist():
                end = at + length
                inside = self._begins_inside_answer(first, ids_T1[at])
                mask_T1[at:end] = assistant_mask(ids_T1[at:end], inside)
                at = end
        return mask_BT1[:, 1:]

    def _begins_inside_answer(self, first: int, first_id: int) -> bool:
        if first_id == self.shards.vocabulary.bos:
            return False
        _, begin, at, _ = self.shards.document(first)
        return ends_inside_answer(self.shards.read(first - (at - begin), at - begin))

    def spans(self, numbers: np.ndarray) -> np.ndarray:
        """Return the pieces of rows, (pieces,) of `PIECE`."""
        return np.concatenate([self._pieces(row) for row in numbers.tolist()] or [np.empty(0, PIECE)])

    def _pieces(self, row: int) -> np.ndarray:
        return self.pieces[int(self.first[row]) : int(self.first[row + 1])]

    def rows(self, numbers: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of rows and the number of each token's piece, (n, seq_len + 1) uint16 each.

        Pieces are numbered from 1 in each row. Padding is ``pad`` and 0.
        """
        shape = len(numbers), self.packing.seq_len + 1
        ids_BT1 = np.full(shape, pad, DTYPE)
        document_BT1 = np.zeros(shape, np.uint16)
        for ids_T1, document_T1, row in zip(ids_BT1, document_BT1, numbers.tolist(), strict=True):
            at = 0
            for number, (first, length) in enumerate(self._pieces(row).tolist(), start=1):
                ids_T1[at : at + length] = self.shards.read(first, length)
                document_T1[at : at + length] = number
                at += length
        return ids_BT1, document_BT1


class Opened(NamedTuple):
    """The training text of a dataset, whose vocabulary is ``shards.vocabulary``."""

    shards: Shards
    packed: PackedRows | None


def open_rows(folder: Path, packed: int | None) -> Opened:
    """Open the training split of a dataset, and its plan of rows of ``packed`` targets (None: windows)."""
    shards = Shards(folder, "train")
    return Opened(shards, None if packed is None else PackedRows.open(folder, shards, packed))
