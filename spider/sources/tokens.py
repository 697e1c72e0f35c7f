"""Shards of token ids that others have published, imported where they lie.

A shard is 256 little-endian int32 (20240520, 1, n, zeros), then n uint16: the ids of a SentencePiece model,
documents back to back, each a `<s>` and its pieces. Our documents also end with EOS:

    theirs  |s T h e   c a t|s A   d o g|
    ours    |B T h e   c a t E|B A   d o g E|      ids as `spider.tokens.sentencepiece` numbers them

Control symbols that stand for no text are left out, and so are documents without a piece. Where a publisher
cut the stream of documents into files of one size, a document continues in the next file. A file that is not
the first of its split then begins with a document of its own. A shard is read some millions of ids at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from spider.config.block import ConfigError, Positive, wrong_key
from spider.config.data import Dataset, Files, Source, checked_vocab_size, expand_globs
from spider.data.shards import headered
from spider.data.writing import writing
from spider.files import read_json, sha256
from spider.tokens.sentencepiece import Model, read_model

logger = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Ids read at a time."""


class TokensSource(Source):
    """Headered shards of ids that others have written with a SentencePiece model (docs/data.md). Two lists of
    files decide which text is held out."""

    TOKENS: ClassVar = True

    train: Annotated[list[str], Field(min_length=1)]
    """Paths and globs of the shards to train on, in their order; one part each."""
    validation: Annotated[list[str], Field(min_length=1)]
    """Paths and globs of the shards that are held out."""
    model: str
    """Path of the SentencePiece model."""
    vocab_size: Positive
    """Ids: those of bytes (272), and one for each piece of text of the model; importing says how many."""

    @field_validator("vocab_size")
    @classmethod
    def _fits(cls, vocab_size: int) -> int:
        return checked_vocab_size(vocab_size)

    def items(self) -> list[str]:
        train = expand_globs("train", self.train)
        held_out = expand_globs("validation", self.validation)
        if both := sorted({*train} & {*held_out}):
            raise ConfigError(f"source: {both[0]} is both in source.train and in source.validation")
        return [*train, *held_out]

    def own_files(self, item: str) -> list[str]:
        return [item]

    def split(self, part: str) -> str:
        """Return the split that a part belongs to."""
        return "train" if int(part) < len(expand_globs("train", self.train)) else "validation"

    @property
    def first_parts(self) -> tuple[str, str]:
        """The first part of each split, whose file begins with a document."""
        return "000", self.parts()[len(expand_globs("train", self.train))]

    def import_part(self, file: Path, folder: Path, part: str, dataset: Dataset) -> dict[str, Any]:
        """Turn the file of a part into ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``.

        The other split gets an empty shard. Raise `ValueError` for a damaged shard or model, another size of
        vocabulary, and an id that stands for no text; `OSError` as `writing` does.
        """
        model = read_model(Path(self.model))
        if (size := model.tokens.size) != self.vocab_size:
            raise ValueError(
                f"datasets.*.source.vocab_size: {self.model} has {size:,} ids with those of bytes, and "
                f"{self.vocab_size:,} is given; set it to {size}"
            )
        ids = headered(file)
        split = self.split(part)
        empty = 0
        with writing(folder, part, dataset, model.tokens) as made:
            writer = made.writers[split]
            for kept, begins, left_out in _documents(file, ids, model, part in self.first_parts):
                writer.write(kept, begins)
                empty += left_out
            if not writer.documents:
                raise ValueError(f"{file}: holds no documents")
            origin = {"part": part, "name": str(file), "bytes": file.stat().st_size, "sha256": sha256(file)}
            rows = {"read": writer.documents + empty, "empty": empty}
            made.said |= {"rows": rows, "origin": origin, "split": split}
        return made.records

    def imported(self, part: str, record: Path) -> dict[str, Any]:
        """Return what a part was made from, by its record.

        Raise `ValueError` where the record is missing, or names another file than the configuration does now.
        """
        if not record.exists():
            raise ValueError(f"{record}: part {part} is missing; encode it first")
        plain = read_json(record)
        origin = plain.get("origin", {})
        now = self.item(part)
        if (origin.get("name"), plain.get("split")) != (now, self.split(part)):
            was = f"{origin.get('name')} ({plain.get('split')})"
            raise ValueError(f"{record}: part {part} was made of {was}, not {now}; encode it again")
        return dict(origin)

    def check(self, dataset: Dataset) -> None:
        for key in sorted(dataset.model_fields_set - {"source", "like", "license", "language"}):
            why = "are in the ids of their model" if key == "tokenizer" else "have no rows of text"
            raise wrong_key(key, f"shards that others have written {why}; leave it out")

    def encoding(self, part: str) -> dict[str, Any]:
        return {"split": self.split(part)}

    @property
    def own_tokenizer(self) -> str | None:
        return self.model

    @property
    def own_vocab_size(self) -> int | None:
        return self.vocab_size

    def learned_files(self, parts: int | None = None) -> Files:
        return _files("train", self.train)

    def held_out_files(self) -> Files:
        return _files("validation", self.validation)

    @property
    def description(self) -> str:
        return "shards of ids that others have written"


def _files(key: str, patterns: list[str]) -> Files:
    """Return the files of a split. A pattern that matches no file stands for itself, as its own rule says."""
    try:
        paths = expand_globs(key, patterns)
    except ConfigError:
        paths = patterns
    return Files("tokens", frozenset(map(os.path.realpath, paths)))


def _documents(
    path: Path, theirs: np.ndarray, model: Model, first: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield our ids for each chunk of a shard, the places where documents begin, and the number of empty
    documents."""
    tokens = model.tokens
    held = np.empty(0, np.int32)  # a BOS after which there may be nothing
    if len(theirs) and _ours(theirs[:1], model, path, 0)[0] != tokens.bos:
        found = f"{path}: begins with id {theirs[0]}, {model.names[theirs[0]]!r}, and no document's <s>"
        if first:
            raise ValueError(
                f"{found}; it goes on with a document of a file before: name that first, or these are the "
                "shards of another tokenizer"
            )
        logger.warning("%s: the document that was cut at the file before goes on as one of its own", found)
        held = np.array([tokens.bos], np.int32)
    written = False
    for start in range(0, len(theirs), CHUNK):
        ours = _ours(theirs[start : start + CHUNK], model, path, start)
        stands = (tokens.bytes_of[ours] > 0) | (ours == tokens.bos)
        kept = np.concatenate([held, ours[stands]])
        begin = kept == tokens.bos
        nothing = begin & np.append(begin[1:], False)
        held = kept[-1:] if begin[-1:].any() else kept[:0]
        kept = kept[: len(kept) - len(held)][~nothing[: len(kept) - len(held)]]
        places = np.flatnonzero(kept == tokens.bos)
        ends = places[0 if written else 1 :]
        begins = places + np.arange(len(places)) + written
        yield np.insert(kept, ends, tokens.eos), begins, int(nothing.sum())
        written = written or len(kept) > 0
    if written:
        yield np.array([tokens.eos], np.int32), np.empty(0, np.int64), len(held)


def _ours(theirs: np.ndarray, model: Model, path: Path, start: int) -> np.ndarray:
    """Return our ids for theirs. Raise `ValueError` for an id beyond the model or one without text."""
    beyond = theirs >= len(model.ids_P)
    ours = model.ids_P[np.where(beyond, 0, theirs)]
    if (wrong := np.flatnonzero(beyond | (ours < 0))).size:
        at = int(wrong[0])
        where, found = f"{path}: token {start + at} is {theirs[at]}", int(theirs[at])
        if beyond[at]:
            remedy = "these are the shards of another tokenizer, name its model"
            raise ValueError(f"{where}, and the model has {len(model.ids_P):,} pieces; {remedy}")
        remedy = "export the text with a model that has byte pieces (byte_fallback=True)"
        raise ValueError(f"{where}, {model.names[found]!r}, which stands for no text; {remedy}")
    return ours
