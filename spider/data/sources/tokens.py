"""Import shards of tokens that others published.

A shard is 256 little-endian int32 (20240520, 1, n, zeros), then n uint16: the token ids of a SentencePiece
model, documents back to back, each a `<s>` and its pieces. Our documents also end with EOS:

    published  |s T h e   c a t|s A   d o g|
    ours       |B T h e   c a t E|B A   d o g E|      numbered by `spider.tokens.sentencepiece`

Control pieces without text are left out, and so are empty documents. If a publisher cut the stream of
documents into files of one size, a document may continue in the next file of its split. There it begins a
document of its own. A shard is read some millions of tokens at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from spider.common.files import read_json, sha256
from spider.config.block import ConfigError, wrong_key
from spider.config.data import Dataset, Files, Source, VocabSize
from spider.data.encode import writing
from spider.data.listing import expand, same_file
from spider.data.shards import headered
from spider.tokens.sentencepiece import Model, read_model

logger = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Tokens read at a time."""
LOOKED_AT = 1 << 20
"""Tokens at the beginning of a shard among which a document has to begin."""


class TokensSource(Source):
    """Headered shards of tokens that others published, with their SentencePiece model (docs/data.md).

    Two lists of files decide which text is held out.
    """

    TOKENS: ClassVar = True

    train: Annotated[list[str], Field(min_length=1)]
    """Paths and globs of the shards to train on, in order; one part each."""
    validation: Annotated[list[str], Field(min_length=1)]
    """Paths and globs of the held-out shards."""
    model: str
    """Path of the SentencePiece model."""
    vocab_size: VocabSize
    """Size of the vocabulary: 272, and one for each piece of text of the model (an import states it)."""

    def items(self) -> list[str]:
        train = expand("train", self.train)
        held_out = expand("validation", self.validation)
        trained = set(map(same_file, train))
        both = [path for path in held_out if same_file(path) in trained]
        if both:
            raise ConfigError(f"source: {both[0]} is both in source.train and in source.validation")
        return [*train, *held_out]

    def own_files(self, item: str) -> list[str]:
        return [item]

    def split(self, part: str) -> str:
        """Return the split that a part belongs to."""
        return "train" if int(part) < len(expand("train", self.train)) else "validation"

    @property
    def first_parts(self) -> tuple[str, str]:
        """First part of each split, whose file must begin with a document."""
        return "000", self.parts()[len(expand("train", self.train))]

    def probe(self, items: list[str], dataset: Dataset) -> int:
        size = super().probe(items, dataset)
        model = read_model(Path(self.model))
        first = {self.item(part) for part in self.first_parts}
        for item in items:
            _check_begin(Path(item), headered(Path(item)), model, item in first)
        return size

    def import_part(self, file: Path, folder: Path, part: str, dataset: Dataset) -> dict[str, Any]:
        """Import the file of a part as ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``.

        The other split gets an empty shard. Raises `ValueError` for a damaged shard or model, another size of
        the vocabulary, and a token without text, and `OSError` like `writing`.
        """
        model = read_model(Path(self.model))
        size = model.tokens.size
        if size != self.vocab_size:
            raise ValueError(
                f"datasets.*.source.vocab_size: {self.model} has {size:,} tokens including bytes, but the "
                f"configuration says {self.vocab_size:,}; set it to {size}"
            )
        published = headered(file)
        split = self.split(part)
        empty = 0
        with writing(folder, part, dataset, model.tokens) as shards:
            writer = shards.writers[split]
            for ids, begins, empty_documents in _documents(file, published, model, part in self.first_parts):
                writer.write(ids, begins)
                empty += empty_documents
            if not writer.documents:
                raise ValueError(f"{file}: holds no documents")
            origin = {"part": part, "name": str(file), "bytes": file.stat().st_size, "sha256": sha256(file)}
            rows = {"read": writer.documents + empty, "empty": empty}
            shards.extra |= {"rows": rows, "origin": origin, "split": split}
        return shards.records

    def imported(self, part: str, record: Path) -> dict[str, Any]:
        """Return the file that a part was imported from, by its record.

        Raises `ValueError` if the record is missing, or names another file than the configuration.
        """
        if not record.exists():
            raise ValueError(f"{record}: part {part} is missing; encode it first")
        plain = read_json(record)
        origin = plain.get("origin", {})
        expected = self.item(part)
        if (origin.get("name"), plain.get("split")) != (expected, self.split(part)):
            found = f"{origin.get('name')} ({plain.get('split')})"
            raise ValueError(f"{record}: part {part} was made from {found}, not {expected}; encode it again")
        return dict(origin)

    def check(self, dataset: Dataset) -> None:
        for key in sorted(dataset.model_fields_set - {"source", "like", "license", "language"}):
            why = "have the tokens of their model" if key == "tokenizer" else "are not rows of text"
            raise wrong_key(key, f"published shards {why}; leave it out")

    def encoding(self, part: str) -> dict[str, Any]:
        return {"split": self.split(part)}

    @property
    def own_tokenizer(self) -> str | None:
        return self.model

    @property
    def own_vocab_size(self) -> int | None:
        return self.vocab_size

    def learned_files(self) -> Files:
        return _files("train", self.train)

    def held_out_files(self) -> Files:
        return _files("validation", self.validation)

    @property
    def description(self) -> str:
        return "published shards of tokens"


def _files(key: str, patterns: list[str]) -> Files:
    """Return the files of a split. A pattern without a match stands for itself; another check reports it."""
    try:
        paths = expand(key, patterns)
    except ConfigError:
        paths = patterns
    return Files("tokens", frozenset(map(os.path.realpath, paths)))


def _documents(
    path: Path, published: np.ndarray, model: Model, first: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield our tokens of each chunk of a shard, where documents begin in them, and the number of empty
    documents."""
    tokens = model.tokens
    pending = np.empty(0, np.int32)  # a BOS that may begin an empty document
    if problem := _check_begin(path, published, model, first):
        logger.warning("%s: the rest of the previous file's last document is a document of its own", problem)
        pending = np.array([tokens.bos], np.int32)
    written = False
    for start in range(0, len(published), CHUNK):
        ours = _ours(published[start : start + CHUNK], model, path, start)
        ids = np.concatenate([pending, ours[(tokens.bytes_of[ours] > 0) | (ours == tokens.bos)]])
        is_begin = ids == tokens.bos
        is_empty = is_begin & np.append(is_begin[1:], False)
        pending = ids[-1:] if is_begin[-1:].any() else ids[:0]
        complete = len(ids) - len(pending)
        ids = ids[:complete][~is_empty[:complete]]
        begins = np.flatnonzero(ids == tokens.bos)
        ends = begins[0 if written else 1 :]
        shifted = begins + np.arange(len(begins)) + written
        yield np.insert(ids, ends, tokens.eos), shifted, int(is_empty.sum())
        written = written or len(ids) > 0
    if written:
        yield np.array([tokens.eos], np.int32), np.empty(0, np.int64), len(pending)


def _check_begin(path: Path, published: np.ndarray, model: Model, first: bool) -> str:
    """Return what is odd about the beginning of a shard, or nothing.

    Raises:
        ValueError: no document begins there, or the ``first`` shard of a split begins inside of one.
    """
    _ours(published[:1], model, path, 0)  # raises for an unknown token
    begins = np.isin(published[:LOOKED_AT], np.flatnonzero(model.ids_P == model.tokens.bos))
    if len(begins) and not begins.any():
        wanted = "export the shards with it, or give the model of these shards"
        raise ValueError(
            f"{path}: none of its first {len(begins):,} tokens is <s>, the begin of a document; {wanted}"
        )
    if begins[:1].all():
        return ""
    problem = f"{path}: begins with token {published[0]}, {model.names[published[0]]!r}, instead of <s>"
    if first:
        raise ValueError(
            f"{problem}; it continues a document of an earlier file: list that file first, or give the "
            "model of these shards"
        )
    return problem


def _ours(published: np.ndarray, model: Model, path: Path, start: int) -> np.ndarray:
    """Return our token ids of published ones; `ValueError` for one beyond the model or without text."""
    beyond = published >= len(model.ids_P)
    ours = model.ids_P[np.where(beyond, 0, published)]
    wrong = np.flatnonzero(beyond | (ours < 0))
    if len(wrong):
        at = int(wrong[0])
        id = int(published[at])
        where = f"{path}: token {start + at} is {id}"
        if beyond[at]:
            raise ValueError(
                f"{where}, but the model has {len(model.ids_P):,} pieces; give the model of these shards"
            )
        raise ValueError(
            f"{where}, {model.names[id]!r}, which stands for no text; export the text with a model that has "
            "byte pieces (byte_fallback=True)"
        )
    return ours
