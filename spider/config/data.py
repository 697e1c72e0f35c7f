"""Datasets: the source of their text, how it is split and encoded, and which documents are left out before.

A source is one file with a subclass of `Source`. Its kind is the name of a file in ``spider/data/sources/``,
or the import path of a module of the user, ``source: {kind: my_package.my_source}``. This module defines the
base class and finds the class of a kind. It names no source.

A filter of the block ``cleaning:`` is one line, ``COLUMN OPERATOR VALUE`` (`spider.data.documents`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from spider.config.block import Block, ConfigError, Positive, matches, must_be, none_such, wrong_key
from spider.config.imports import import_named, may_import

#: Fewest words of a protected text that can be found.
SHORTEST = 8
#: Name in a filter for the size of the text in bytes.
SIZE = "bytes"
_COMPARE = ("<", "<=", ">", ">=")
_FORM = re.compile(r"(?P<column>\S.*?)\s+(?P<operator><=|>=|<|>|==|!=|~|!~|not in|in)\s+(?P<value>.+)")


class Filter(NamedTuple):
    """A condition that a document has to meet."""

    written: str
    column: str
    operator: str
    value: Any
    """A number for an order, text for a regular expression, else a list of texts."""


def parse_filter(written: str) -> Filter:
    """Return a filter from its line. Raise `ValueError` if it cannot be parsed."""
    found = _FORM.fullmatch(written.strip())
    if not found:
        raise ValueError(
            f"{written!r} is not COLUMN OPERATOR VALUE with spaces between them, such as `bytes >= 200`, "
            "`language in en, de`, `score >= 3` or `text !~ lorem ipsum`"
        )
    column, operator, value = found["column"], found["operator"], found["value"]
    if operator in _COMPARE or column == SIZE:
        return Filter(written, column, operator, _number(written, column, operator, value))
    if operator in ("~", "!~"):
        return Filter(written, column, operator, _pattern(written, _unquoted(value)))
    texts = value.strip("[]").split(",") if operator in ("in", "not in") else [value]
    return Filter(written, column, operator, [_unquoted(text.strip()) for text in texts])


def _number(written: str, column: str, operator: str, value: str) -> float:
    if operator not in (*_COMPARE, "==", "!="):
        raise ValueError(f"{written!r}: {column} is a size, which {operator} does not compare; use >= or <=")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{written!r}: {operator} compares numbers, and {value!r} is none") from None


def _pattern(written: str, pattern: str) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{written!r}: not a regular expression of RE2 ({error})") from None
    return pattern


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


_true_or_list = must_be("true, or a list of files and folders", lambda value: isinstance(value, bool | list))


class Cleaning(Block):
    """Documents that are left out before the text is encoded (docs/data.md)."""

    filters: list[str] = []
    """Conditions that a document has to meet: ``bytes >= 200``, ``language in en, de``, ``text !~ spam``."""
    exact: bool = False
    """Leave out a document whose text, but for white space, an earlier document has."""
    against: list[str] = []
    """Datasets whose documents count as earlier ones. They do not change."""
    near: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out a document if an earlier one has at least this share of its word 5-grams, such as 0.8 (null:
    keep it)."""
    decontaminate: Annotated[bool | list[str], _true_or_list] = False
    """true: leave out a document with text that the runs on this dataset are measured with: held-out text,
    and questions and right answers of tasks. A list names files and folders with more such text."""

    @field_validator("filters")
    @classmethod
    def _parses(cls, filters: list[str]) -> list[str]:
        for one in filters:
            parse_filter(one)
        return filters

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Cleaning:
        if self.against and not (self.exact or self.near):
            raise wrong_key("against", "needs exact: true, or near")
        return self

    @property
    def removes(self) -> bool:
        """Whether documents are compared with others, so that there is evidence of what was removed."""
        return bool(self.steps)

    @property
    def folders(self) -> list[str]:
        """Files and folders that ``decontaminate`` names."""
        return self.decontaminate if isinstance(self.decontaminate, list) else []

    @property
    def decontaminates(self) -> bool:
        """Whether documents are compared with text that models are measured with."""
        return self.decontaminate is not False

    @property
    def steps(self) -> list[str]:
        """Steps whose files have the pairs of a document and what it repeats."""
        compared = ["pairs"] if self.exact or self.near else []
        return compared + (["contaminated"] if self.decontaminates else [])


@dataclass(frozen=True)
class Files:
    """The files of the text of a dataset. Two datasets that share a file share documents."""

    origin: str
    """Namespace of the names, such as a repository."""
    names: frozenset[str]
    overlapping: bool = False
    """Whether files of different names may hold the same documents: a folder and a file in it, or a copy."""


class Source(Block):
    """Base class of the sources of text, and the block ``source:`` of a dataset.

    A subclass implements one of three methods. `fetch` writes a part of the text as parquet. `import_part`
    reads token ids that exist already (`TOKENS`). `batches` reads the text while a model trains (`STREAMED`).
    All modules that only these methods need, such as pyarrow, are imported inside them.
    """

    #: Whether the text is read while a model trains. Then `items` stays empty.
    STREAMED: ClassVar[bool] = False
    #: Whether the parts are files of token ids, which are imported where they lie.
    TOKENS: ClassVar[bool] = False
    #: Keys that only list the parts, so that the content of one part does not depend on them.
    LISTS: ClassVar[frozenset[str]] = frozenset()

    kind: str
    """Name of a source of Spider, or the import path of your own."""

    # ------------------------------------------------------------------------------------------ parts

    def items(self) -> list[str]:
        """Return the item of each part, such as a file, in order. This uses no network."""
        return []

    def parts(self) -> list[str]:
        """Return the names of the parts, which are one download and one encode job each."""
        return [f"{i:03d}" for i in range(len(self.items()))]

    def item(self, part: str) -> str:
        """Return the item of one part."""
        if part not in self.parts():
            raise ConfigError(f"no part {part!r}; there are {len(self.parts())}, from 000")
        return self.items()[int(part)]

    def own_files(self, item: str) -> list[str]:
        """Return the user's own files of a part. The part is encoded again after a change of one."""
        return []

    def left_out(self) -> dict[str, list[str]]:
        """Return the paths that were found among the user's own files and are not read, by the reason."""
        return {}

    def estimated_bytes(self, item: str) -> int:
        """Estimate the size of a part before it is downloaded, or return 0 if it is unknown."""
        return sum(Path(file).stat().st_size for file in self.own_files(item) if Path(file).exists())

    def probe(self, items: list[str], dataset: Dataset) -> int:
        """Return the size in bytes of the files of these items (0: unknown), after a look at each file.

        The workflow calls this before its first job, so it takes a second at most, or waits for the network.

        Raises:
            ValueError: a file is missing, cannot be read or lacks a column, or the network fails.
        """
        files = [file for item in items for file in self.own_files(item)]
        for file in [*files, *filter(None, [self.own_tokenizer])]:
            if not os.path.exists(file):
                raise ConfigError(f"{file}: no such file; correct its path in the block source")
        return sum(os.path.getsize(file) for file in files)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text that the configuration limits the source to, or None."""
        return None

    # ------------------------------------------------------------------------------------------- text

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        """Write a part atomically as a parquet file with the columns that the dataset names.

        Raises:
            ValueError: the text cannot be read. The message has a remedy.
        """
        raise ConfigError(f"a source of kind {self.kind} has nothing to download; encode its parts")

    def import_part(self, file: Path, folder: Path, part: str, dataset: Dataset) -> dict[str, Any]:
        """Write the shards of a part below ``folder`` from its file, and return their records by split."""
        raise NotImplementedError

    def imported(self, part: str, record: Path) -> dict[str, Any]:
        """Return the name, size and SHA-256 of the file that an imported part was made from."""
        raise NotImplementedError

    def batches(self, dataset: Dataset, **options: Any) -> Any:
        """Open the batches of training, a `spider.data.loader.Batches`."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ rules

    def check(self, dataset: Dataset) -> None:
        """Raise `ValidationError` for a setting of the dataset that does not fit the source."""

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that decide the content of the part of ``item``."""
        return self.changed(exclude=set(self.LISTS)) | {"item": item}

    def encoding(self, part: str) -> dict[str, Any]:
        """Return the settings that decide the tokens of a part, besides those of the dataset."""
        return {}

    @property
    def own_tokenizer(self) -> str | None:
        """Path of the tokenizer that wrote the token ids of the parts."""
        return None

    @property
    def own_vocab_size(self) -> int | None:
        """Size of the vocabulary of `own_tokenizer`."""
        return None

    def learned_files(self) -> Files:
        """Return the files of the text that is not held out."""
        return Files(self.kind, frozenset({f"the text of {self.kind}"}))

    def held_out_files(self) -> Files:
        """Return the files of the text that is held out."""
        return self.learned_files()

    # ------------------------------------------------------------------------------------ description

    @property
    def description(self) -> str:
        """Description for the model card and the report. It must not depend on `LISTS`."""
        return self.kind

    @property
    def address(self) -> str:
        """Address of the text, for MLflow."""
        return self.kind

    @property
    def repository(self) -> str | None:
        """Name of the dataset repository on the Hugging Face hub."""
        return None


def kinds() -> list[str]:
    """Return the kinds of sources that come with Spider."""
    files = Path(__file__).parents[1].glob("data/sources/*.py")
    return sorted(path.stem for path in files if path.stem != "__init__")


def source_class(kind: str) -> type[Source]:
    """Return the class of a kind of source.

    Raises:
        ConfigError: the source does not exist, cannot be imported, or was not named by the user.
    """
    if kind not in kinds() and not may_import(kind):
        raise ConfigError(
            f"the source {kind!r} is not one of Spider's ({', '.join(kinds())}), and importing it runs its "
            "code. If you trust that code, pass the configuration that names it: spider --config FILE"
        )
    package = f"spider.data.sources.{kind}" if kind in kinds() else kind
    module = import_named("source", kind, package, kinds())
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    own = [one for one in classes if issubclass(one, Source) and one.__module__ == package]
    if len(own) != 1:
        raise ConfigError(f"source {kind!r}: {package} must define one subclass of Source (has {len(own)})")
    return own[0]


def _source_block(value: Any) -> Any:
    """Validate a mapping as the block of its kind of source. Return other values as they are."""
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise wrong_key("kind", f"is required, one of {', '.join(kinds())} or a source of your own")
    try:
        source = source_class(kind)
    except ConfigError as error:
        raise wrong_key("kind", str(error)) from None
    return source.model_validate(value)


#: The block of any kind of source.
AnySource = Annotated[SerializeAsAny[Source], BeforeValidator(_source_block)]


def expand_likes(datasets: Any) -> Any:
    """Return the block ``datasets:`` with the settings that each ``like`` inherits.

    A block that is not a mapping stays as it is, and the schema refuses it.
    """
    if not isinstance(datasets, dict):
        return datasets
    return {name: _expanded(name, block, datasets) for name, block in datasets.items()}


def _expanded(name: str, block: Any, datasets: dict[str, Any]) -> Any:
    if not isinstance(block, dict) or block.get("like") is None:
        return block
    where, like = f"datasets.{name}", block["like"]
    if like not in datasets:
        raise ConfigError(f"{where}.like: {none_such('dataset', like, datasets)}")
    if own := sorted(block.keys() - {"like", "tokenizer", "ngram"}):
        raise ConfigError(f"{where}.{own[0]}: is inherited from {like} (key like); leave it out")
    other = datasets[like] if isinstance(datasets[like], dict) else {}
    if other.get("like") is not None:
        raise ConfigError(f"{where}.like: {like} itself inherits from {other['like']}; name that")
    return {**other, **block}


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error} (got {pattern!r})") from None
    return pattern


class SplitBy(Block):
    """Grouping of documents. All documents of a group are in the same split."""

    column: str
    """Column of strings that names the group of a document, such as ``url``."""
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)] = ".+"
    """Regular expression for that column. Its first group, or its whole match, is the name. A document
    without a match is a group of its own."""
    # At its default it is in no record, so what was made without it stays valid.
    salt: Annotated[int, Field(ge=0, exclude_if=lambda salt: salt == 0)] = 0
    """Number that is hashed with the name of a group. Another number holds out other groups."""


def _fits_shards(vocab_size: int) -> int:
    """Return the size of a vocabulary. Raise `ValueError` where it is too small or too large."""
    from spider.tokens import (
        BYTES,  # numpy, which a configuration without a tokenizer does not import
        MAX_TOKENS,
    )

    if not BYTES.size <= vocab_size <= MAX_TOKENS:
        bounds = f"at least {BYTES.size} (the bytes) and at most {MAX_TOKENS:,} (shards are uint16)"
        raise ValueError(f"must be {bounds}; got {vocab_size:,}")
    return vocab_size


#: Size of a vocabulary that shards can hold.
VocabSize = Annotated[Positive, AfterValidator(_fits_shards)]


class TokenizerConfig(Block):
    """A byte-pair tokenizer, learned from documents that are not held out (docs/tokenizer.md)."""

    #: Grows when the same text gives other merges.
    LEARNER: ClassVar[int] = 2

    data: str
    """Dataset to learn from."""
    vocab_size: VocabSize = 4096
    """Size of the vocabulary: 272 ids of bytes and special tokens, and one for each merge; 65,536 at most."""
    max_bytes: Annotated[Positive, Field(lt=2**31)] = 200_000_000
    """Largest number of bytes of text to learn from, the same share of each part."""
    document_bytes: Annotated[int, Field(ge=4)] = 100_000
    """Largest size of a document in bytes. Longer documents are truncated."""


_a_license = must_be(
    "a license's name on the hub, in lower case, such as cc-by-4.0 or apache-2.0, or `other`",
    matches(r"[a-z0-9][a-z0-9.+-]*"),
)
_a_language = must_be(
    "a language code of two or three letters such as en, or code, or multilingual",
    matches(r"[a-z]{2,3}|code|multilingual"),
)


class Dataset(Block):
    """A dataset: its source, and how its documents are split and encoded."""

    source: AnySource
    """Source of the text."""
    text_column: str = "text"
    """Column of the documents."""
    id_column: str = "id"
    """Column whose hash decides the split of a document. The text is hashed where the column is missing."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of documents that is held out."""
    ngram: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of documents that the n-gram index counts and training leaves out."""
    split_by: SplitBy | None = None
    """Hold out whole groups of documents, such as sites or packages (null: each document by itself)."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Cut each ``.txt`` into documents at this text, such as a blank line, ``"\\n\\n"``, or ``<|endoftext|>``
    (null: a ``.txt`` is one document)."""
    max_document_bytes: Annotated[int, Field(ge=4)] | None = None
    """Largest size of a document in bytes. Longer ones are truncated at a UTF-8 boundary (null: no limit)."""
    format: Literal["text", "chat"] = "text"
    """chat: each row is a conversation in JSON, ``[{"role": "user", "content": "..."}, ...]``."""
    answer_column: str | None = None
    """Column of the answer, where ``text_column`` is a question; each row is then a conversation (``format:
    chat``)."""
    cleaning: Cleaning | None = None
    """Documents to leave out: filters, duplicates, text that models are measured with (null: none)."""
    like: str | None = None
    """Inherit source and settings from this dataset. Only ``tokenizer`` and ``ngram`` may differ."""
    tokenizer: str | None = None
    """Name of the tokenizer, one of ``tokenizers`` (null: bytes)."""
    temp: Annotated[bool, Field(exclude=True)] = False
    """Delete the raw text of a part when no job of the workflow reads it any more. Its record stays."""
    license: Annotated[str | None, _a_license, Field(exclude=True)] = None
    """License of the text for the model card, by the hub's name, such as ``cc-by-4.0``."""
    language: Annotated[str | None, _a_language, Field(exclude=True)] = None
    """Language of the text for the model card, such as ``en``, ``code`` or ``multilingual``."""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Dataset:
        self.source.check(self)
        if self.ngram and self.validation + self.ngram >= 1:
            total = f"validation + ngram = {self.validation:g} + {self.ngram:g}"
            raise wrong_key("ngram", f"leaves no document to train on; {total} must be below 1")
        if self.format == "chat" and self.max_document_bytes is not None:
            raise wrong_key("max_document_bytes", "truncates text, and a conversation is JSON; leave it out")
        if self.answer_column is not None and self.format != "chat":
            raise wrong_key("answer_column", "makes conversations; set format: chat, or leave it out")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits of the encoded dataset."""
        return ("train", "validation", "ngram") if self.ngram else ("train", "validation")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the settings name: the text, the id, that of ``split_by``, and those of filters."""
        names = [self.text_column, self.id_column]
        names += [self.split_by.column] if self.split_by else []
        names += [self.answer_column] if self.answer_column else []
        names += self.optional.values()
        return tuple(dict.fromkeys(names))

    @property
    def filters(self) -> list[Filter]:
        """Conditions that a document has to meet."""
        return [parse_filter(one) for one in self.cleaning.filters] if self.cleaning else []

    @property
    def against(self) -> list[str]:
        """Datasets whose documents count as earlier ones."""
        return self.cleaning.against if self.cleaning else []

    @property
    def optional(self) -> dict[str, str]:
        """Columns that `split_by` and filters name, by their key. A file has to have them."""
        keys = {f"cleaning.filters[{i}]": one.column for i, one in enumerate(self.filters)}
        named = {key: column for key, column in keys.items() if column != SIZE}
        return ({"split_by.column": self.split_by.column} if self.split_by else {}) | named

    def chosen(self) -> dict[str, Any]:
        """Return the settings that decide which documents are read, and their text."""
        return (
            self.changed(include={"text_column", "id_column", "answer_column", "format"}) | self._filtered()
        )

    def _filtered(self) -> dict[str, Any]:
        return {"filters": [one.written for one in self.filters]} if self.filters else {}

    def encoding(self) -> dict[str, Any]:
        """Return the settings that decide the tokens of a shard, besides the text and the tokenizer.

        Some settings are included at their default too, for the description of the dataset.
        """
        if self.source.TOKENS:
            return {}
        shown = {"text_column", "id_column", "validation", "max_document_bytes"}
        settings = self.model_dump(mode="json", include=shown)
        settings |= self.changed(exclude={"source", "like", "tokenizer", "format", "separator"})
        if self.format != "text":
            settings["written_as"] = self.format
        return settings

    def held_out(self) -> dict[str, Any]:
        """Return the settings that decide which documents are held out, among those that are read."""
        names = {"text_column", "id_column", "validation", "split_by"}
        return self.model_dump(mode="json", include=names) | self._filtered()
