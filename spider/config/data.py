"""Datasets: where their text comes from, and how it is split and encoded."""

from __future__ import annotations

import glob
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from spider.config.block import Block, ConfigError, Positive, wrong_key


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


class PydocsSource(Source):
    """Docstrings and documentation of the installed standard library and of our dependencies; offline."""

    RECORDED: ClassVar = frozenset({"pieces"})

    kind: Literal["pydocs"]
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
    """Files you have: parquet, jsonl, jsonl.zst, or a folder of .txt files. Globs are expanded, sorted."""

    kind: Literal["local"]
    files: Annotated[list[str], Field(min_length=1)]
    """Paths and globs; one part each."""

    def items(self) -> list[str]:
        paths: list[str] = []
        for pattern in self.files:
            matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
            if not matches:
                raise ConfigError(f"datasets: no file matches {pattern!r}")
            paths += matches
        return paths


class MockSource(Source):
    """Made-up text, to try things with: the same everywhere, made in a second."""

    RECORDED: ClassVar = frozenset({"documents"})

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


class Dataset(Block):
    """Documents, and how they are split and encoded."""

    RECORDED: ClassVar = frozenset({"text_column", "id_column", "validation", "max_document_bytes"})

    source: Annotated[
        PydocsSource | HubSource | LocalSource | StreamSource | MockSource, Field(discriminator="kind")
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

    @model_validator(mode="after")
    def _memory_has_room(self) -> Dataset:
        if self.memory and isinstance(self.source, StreamSource):
            remedy = "leave it out, or download the text: source.kind: hub"
            raise wrong_key("memory", f"a stream is read once and has no shards to keep; {remedy}")
        if self.memory and self.validation + self.memory >= 1:
            sum_of = f"validation + memory = {self.validation:g} + {self.memory:g}"
            raise wrong_key("memory", f"leaves no document to train on, {sum_of} must be below 1")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that it is encoded into."""
        return ("train", "validation", "memory") if self.memory else ("train", "validation")

    def described(self) -> dict[str, Any]:
        return super().described() | {"source": self.source.described()}

    def encoding(self) -> dict[str, Any]:
        """What decides the bytes of a shard, the text apart."""
        return {name: value for name, value in self.described().items() if name != "source"}
