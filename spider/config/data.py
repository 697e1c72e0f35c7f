"""Datasets: where their text comes from, and how it is split and encoded."""

from __future__ import annotations

import glob
import os
import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from spider.config.block import Block, ConfigError, Positive, none_such, wrong_key


class Source(Block):
    """Where a dataset's text comes from; each kind knows how many parts it has without touching a network."""

    def parts(self) -> list[str]:
        """Names of the parts, one download and one encode job each."""
        return [f"{i:03d}" for i in range(len(self.items()))]

    def items(self) -> list[str]:
        """What each part is made from, in order; a stream has none."""
        return []

    def item(self, part: str) -> str:
        """What one part is made from."""
        if part not in self.parts():
            raise ConfigError(f"no part {part!r}; there are {len(self.parts())}, from 000")
        return self.items()[int(part)]


def expand_likes(datasets: Any) -> Any:
    """The block ``datasets:`` of a file with what each ``like`` stands for in its place. What is no mapping
    is left to the schema."""
    if not isinstance(datasets, dict):
        return datasets
    return {name: _expanded(name, block, datasets) for name, block in datasets.items()}


def _expanded(name: str, block: Any, datasets: dict[str, Any]) -> Any:
    if not isinstance(block, dict) or block.get("like") is None:
        return block
    where, like = f"datasets.{name}", block["like"]
    if like not in datasets:
        raise ConfigError(f"{where}.like: {none_such('dataset', like, datasets)}")
    if own := sorted(block.keys() - {"like", "tokenizer", "memory"}):
        raise ConfigError(f"{where}.{own[0]}: is that of {like}, which this is like; leave it out")
    other = datasets[like] if isinstance(datasets[like], dict) else {}
    if other.get("like") is not None:
        raise ConfigError(f"{where}.like: {like} is itself like {other['like']}; name that")
    source = other.get("source")
    if isinstance(source, dict) and source.get("kind") == "stream":
        raise ConfigError(f"{where}.like: {like} is a stream, of which nothing is kept; give a source")
    return {**other, **block}


class PydocsSource(Source):
    """Docstrings and documentation of the installed standard library and of our dependencies; offline."""

    kind: Literal["pydocs"]
    form: Literal["text", "questions"] = "text"
    """questions: of each documented name what it is for, as a conversation (``format: chat``)."""
    pieces: Positive = 2
    """How many parquet files to split the corpus into."""

    def items(self) -> list[str]:
        return [f"{i}/{self.pieces}" for i in range(self.pieces)]


class _OnHub(Source):
    kind: str
    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit (a branch may move under a run)."""
    files: Annotated[list[str], Field(min_length=1)]
    """Parquet files in it."""


class HubSource(_OnHub):
    """Named parquet files of a Hugging Face dataset repository at a pinned revision; one download and one
    encode job each."""

    kind: Literal["hub"]

    def items(self) -> list[str]:
        return self.files


class StreamSource(_OnHub):
    """Train straight from the hub with ``datasets`` streaming: nothing is downloaded first or kept, and each
    epoch takes the files in a new order."""

    kind: Literal["stream"]


class LocalSource(Source):
    """Files you have: parquet, jsonl, json, csv and txt (all but parquet also .gz or .zst), or folders of
    them. Globs are expanded, sorted."""

    #: The kinds of files, as messages name them.
    KINDS: ClassVar = ".parquet, .jsonl, .json, .csv, .txt (all but parquet also .gz or .zst), or a folder"

    kind: Literal["local"]
    files: Annotated[list[str], Field(min_length=1)]
    """Paths and globs; one part each. Each file of a folder is a part, but a folder of txt is one part."""

    @staticmethod
    def kind_of(name: str) -> str:
        """Return the kind of a file by its name, as ``.jsonl``; "" for a file that cannot be imported."""
        stem, kind = os.path.splitext(name)
        if kind in (".gz", ".zst"):
            kind = os.path.splitext(stem)[1]
            return kind if kind in (".jsonl", ".json", ".csv", ".txt") else ""
        return kind if kind in (".jsonl", ".json", ".csv", ".txt", ".parquet") else ""

    @staticmethod
    def texts_of(folder: Path) -> list[Path]:
        """Return the texts in a folder and below it, in order of their paths; hidden files are left out."""
        return _below(folder, ".txt")

    def items(self) -> list[str]:
        found = (_parts_of(path) if Path(path).is_dir() else [path] for path in _expand("files", self.files))
        return list(chain.from_iterable(found))

    def read_for(self, item: str) -> list[str]:
        """Return the files that a part is imported from."""
        return [str(path) for path in self.texts_of(Path(item))] if Path(item).is_dir() else [item]


def _below(folder: Path, *kinds: str) -> list[Path]:
    """Return the files of these kinds in a folder and below it, in order of their paths."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        for name in names:
            if not name.startswith(".") and LocalSource.kind_of(name) in kinds:
                found.append(((inside / name).as_posix(), Path(place, name)))
    return [path for _, path in sorted(found) if path.is_file()]


def _parts_of(folder: str) -> list[str]:
    """Return what the parts of a folder are imported from: its files, or the folder itself for texts."""
    found = _below(Path(folder), ".parquet", ".jsonl", ".json", ".csv", ".txt")
    texts = [path for path in found if LocalSource.kind_of(path.name) == ".txt"]
    others = [path for path in found if LocalSource.kind_of(path.name) != ".txt"]
    if texts and others:
        both = f"holds texts ({texts[0].name}) and other files ({others[0].name})"
        raise ConfigError(f"source.files: {folder} {both}; name the files to take, as in {folder}/*.jsonl")
    if not found:
        raise ConfigError(f"source.files: {folder} holds no file of a known kind; give {LocalSource.KINDS}")
    return [folder] if texts else [str(path) for path in others]


class TokensSource(Source):
    """Headered shards of ids that others have written with a SentencePiece model (docs/data.md). Which of
    them are held out is said here, by file."""

    kind: Literal["tokens"]
    train: Annotated[list[str], Field(min_length=1)]
    """Paths and globs of those to train on, in their order; one part each."""
    validation: Annotated[list[str], Field(min_length=1)]
    """Of those held out."""
    model: str
    """Path of the SentencePiece model."""
    vocab_size: Positive
    """Ids: those of bytes (272), and one for each piece of text of the model; importing says how many."""

    @field_validator("vocab_size")
    @classmethod
    def _fits(cls, vocab_size: int) -> int:
        return _ids(vocab_size)

    def items(self) -> list[str]:
        train, held_out = _expand("train", self.train), _expand("validation", self.validation)
        if both := sorted({*train} & {*held_out}):
            raise ConfigError(f"source: {both[0]} is both in source.train and in source.validation")
        return [*train, *held_out]

    def split(self, part: str) -> str:
        """Which a part is of."""
        return "train" if int(part) < len(_expand("train", self.train)) else "validation"

    @property
    def first_parts(self) -> tuple[str, str]:
        """That of each split, whose file begins with a document."""
        return "000", self.parts()[len(_expand("train", self.train))]


def _expand(key: str, patterns: list[str]) -> list[str]:
    """Return the paths that globs match, sorted; a path that is not a glob stands as it is."""
    paths: list[str] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not matches:
            raise ConfigError(f"source.{key}: no file matches {pattern!r}")
        paths += matches
    return paths


class MockSource(Source):
    """Made-up text, to try things with: the same everywhere, made in a second."""

    kind: Literal["mock"]
    documents: Positive = 2000
    """How many, of some 500 bytes each."""

    def items(self) -> list[str]:
        return [f"{self.documents} documents"]


class SplitBy(Block):
    """What documents have in common that stay on one side of the split."""

    column: str
    """Column of strings that says it: ``url``."""
    pattern: Annotated[str, Field(min_length=1)] = ".+"
    """Regular expression; its first group, or all that it finds, names what a document belongs to. A document
    in which it finds nothing is decided by its own id."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error} (got {pattern!r})") from None
        return pattern


def _ids(vocab_size: int) -> int:
    """A number of ids, if there is an alphabet of so many."""
    from spider.tokens import BYTES  # numpy, which a configuration without a tokenizer does not import
    from spider.tokens.texts import MOST

    if not BYTES.size <= vocab_size <= MOST:
        bounds = f"at least {BYTES.size}, the ids of bytes, and at most {MOST:,}, shards are uint16"
        raise ValueError(f"must be {bounds} (got {vocab_size:,})")
    return vocab_size


class TokenizerConfig(Block):
    """Byte pairs, learned from the documents of a dataset that are not held out (docs/tokenizer.md)."""

    data: str
    """Dataset whose text it is learned from."""
    vocab_size: Positive = 4096
    """Ids: those of bytes (272), and one for each pair that is learned; 65,536 at most."""
    parts: Positive | None = None
    """Learn from the first so many parts (null: all)."""
    max_bytes: Positive = 200_000_000
    """Text to learn from at most, the same share of each part."""
    document_bytes: Annotated[int, Field(ge=4)] = 100_000
    """Of a longer document, its beginning."""

    @field_validator("vocab_size")
    @classmethod
    def _fits(cls, vocab_size: int) -> int:
        return _ids(vocab_size)


class Dataset(Block):
    """Documents, and how they are split and encoded."""

    source: Annotated[
        PydocsSource | HubSource | LocalSource | StreamSource | MockSource | TokensSource,
        Field(discriminator="kind"),
    ]
    text_column: str = "text"
    """Column that holds the documents."""
    id_column: str = "id"
    """Column whose hash decides the split; where it is absent the text itself is hashed."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of documents held out."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of documents that are kept for the memory, and not trained on."""
    split_by: SplitBy | None = None
    """Hold out whole sites, packages, authors, ... (null: each document by itself)."""
    max_document_bytes: Annotated[int, Field(ge=4)] | None = None
    """Truncate longer documents at a UTF-8 boundary (null: keep them whole)."""

    format: Literal["text", "chat"] = "text"
    """chat: each row is a conversation in JSON, ``[{"role": "user", "content": "..."}, ...]``."""
    like: str | None = None
    """Another dataset: its files, downloaded once, and its settings; but for ``tokenizer`` and ``memory``."""
    tokenizer: str | None = None
    """Which of ``tokenizers`` it is written in (null: bytes)."""
    license: Annotated[str | None, Field(exclude=True)] = None
    """Of its text, by the hub's name: ``cc-by-4.0``. For the model card; it decides nothing, so no digest has
    it."""
    language: Annotated[str | None, Field(exclude=True)] = None
    """Of its text, for the model card: ``en``, ``code``, ``multilingual``."""

    @field_validator("license")
    @classmethod
    def _names_a_license(cls, license: str | None) -> str | None:
        if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
            wanted = "must be the name that the hub has for a licence, in lower case: cc-by-4.0, apache-2.0"
            raise ValueError(f"{wanted}; `other` for one that it does not know (got {license!r})")
        return license

    @field_validator("language")
    @classmethod
    def _names_a_language(cls, language: str | None) -> str | None:
        if language is not None and not re.fullmatch(r"[a-z]{2,3}|code|multilingual", language):
            wanted = "must be a language by its two or three letters (en), code or multilingual"
            raise ValueError(f"{wanted} (got {language!r})")
        return language

    @model_validator(mode="after")
    def _shards_are_as_they_are(self) -> Dataset:
        if isinstance(self.source, TokensSource):
            for key in sorted(self.model_fields_set - {"source", "like", "license", "language"}):
                why = "are in the ids of their model" if key == "tokenizer" else "have no rows of text"
                raise wrong_key(key, f"shards that others have written {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _memory_has_room(self) -> Dataset:
        if self.memory and isinstance(self.source, StreamSource):
            remedy = "leave it out, or download the text: source.kind: hub"
            raise wrong_key("memory", f"a stream is read once and has no shards to keep; {remedy}")
        if self.memory and self.validation + self.memory >= 1:
            sum_of = f"validation + memory = {self.validation:g} + {self.memory:g}"
            raise wrong_key("memory", f"leaves no document to train on, {sum_of} must be below 1")
        if self.format == "chat" and self.max_document_bytes is not None:
            raise wrong_key("max_document_bytes", "cuts text, and a conversation is JSON; leave it out")
        if self.format == "chat" and isinstance(self.source, StreamSource):
            raise wrong_key("format", "a stream is of text; download the conversations: source.kind: hub")
        if self.tokenizer and isinstance(self.source, StreamSource):
            remedy = "leave it out, or download the text: source.kind: hub"
            raise wrong_key("tokenizer", f"a stream is read once, as bytes; {remedy}")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that it is encoded into."""
        return ("train", "validation", "memory") if self.memory else ("train", "validation")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that settings name: the text, the id, and the one that ``split_by`` reads."""
        names = [self.text_column, self.id_column]
        names += [self.split_by.column] if self.split_by else []
        return tuple(dict.fromkeys(names))

    def import_identity(self, item: str) -> dict[str, Any]:
        """Return what decides the content of the part that is downloaded or imported from ``item``.

        An imported file has the columns that settings name, so these belong to it. Parquet is kept as it is.
        """
        decides = {**self.source.changed(exclude={"files", "pieces"}), "item": item}
        if isinstance(self.source, LocalSource) and LocalSource.kind_of(item) != ".parquet":
            decides["columns"] = list(self.columns)
            decides |= self.changed(include={"format"})
        return decides

    def encoding(self) -> dict[str, Any]:
        """Return what decides the ids of a shard, apart from the text and the tokenizer.

        The description of the dataset shows some settings at their default too.
        """
        if isinstance(self.source, TokensSource):
            return {}
        shown = {"text_column", "id_column", "validation", "max_document_bytes"}
        settings = self.model_dump(mode="json", include=shown)
        settings |= self.changed(exclude={"source", "like", "tokenizer", "format"})
        if self.format != "text":
            settings["written_as"] = self.format
        return settings

    def held_out(self) -> dict[str, Any]:
        """What decides which documents are held out."""
        return self.model_dump(mode="json", include={"text_column", "id_column", "validation", "split_by"})
