"""The description of a dataset: ``metadata.json``, which the index job makes from the records of all parts.

It is the only file that readers trust. It holds the source, the settings and the vocabulary of the dataset,
and the counts and the SHA-256 of each shard. Its digest identifies the dataset in a training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, PrivateAttr

from spider.config import Dataset
from spider.data.blocks import Blocks, encode_again
from spider.files import read_json, sha256
from spider.record import Record
from spider.sealed import content_digest
from spider.tokens import BYTES, Tokens
from spider.tokens.sentencepiece import SentencePieceTokens
from spider.tokens.stored import copy_tokenizer, read_tokens, tokens_in

DTYPE = np.dtype("<u2")
COUNTS = ("tokens", "documents", "bytes")

#: Fields of `Metadata` that all parts of a dataset are encoded with.
SETTINGS = (
    "text_column",
    "id_column",
    "validation",
    "ngram",
    "split_by",
    "max_document_bytes",
    "cleaning",
    "written_as",
    "tokenizer",
)


class Shard(BaseModel, frozen=True):
    """The documents of one part in a split."""

    file: str
    part: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class Split(BaseModel, frozen=True):
    """A split of a dataset; its counts are the sums over its shards."""

    tokens: int
    documents: int
    bytes: int
    shards: list[Shard]


class Metadata(Record):
    """``metadata.json``. The order of its fields is that of the file."""

    WHAT: ClassVar[str] = "the description of a dataset"

    dataset: str
    dtype: str
    vocab_size: int
    special_ids: dict[str, int]
    source: dict[str, Any]
    text_column: str | None = None
    id_column: str | None = None
    validation: float | None = None
    """Share of documents held out. For published shards this and the columns are None."""
    ngram: float = 0.0
    split_by: dict[str, str | int] | None = None
    max_document_bytes: int | None = None
    cleaning: dict[str, Any] | None = None
    """The block ``cleaning:``; None: all documents are kept."""
    left_out: dict[str, int] | None = None
    """Documents that it left out, by filter and by reason."""
    written_as: str = "text"
    """``chat``: conversations (`spider.data.chat`)."""
    tokenizer: str | None = None
    """Digest of the ``tokenizer.json`` in the same folder; None: bytes."""
    tokenizer_kind: str | None = None
    """``sentencepiece``; None: bytes or BPE."""
    lossless: bool = True
    """Whether decoding gives the text back; a published tokenizer may have changed it."""
    splits: dict[str, Split]
    digest: str = ""
    _vocabulary: Tokens = PrivateAttr(default_factory=lambda: BYTES)

    def plain(self) -> dict[str, Any]:
        """Return the description as JSON, without the fields at their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def without(self) -> str:
        """Description of what cleaning left out; empty if it left out nothing."""
        counts = described_counts(self.left_out or {})
        return f"left out: {counts}" if counts else ""

    @property
    def vocabulary(self) -> Tokens:
        """The vocabulary of its tokens."""
        return self._vocabulary

    @property
    def imported(self) -> bool:
        """Whether its shards were made from published tokens instead of text."""
        return self.text_column is None


def build_metadata(
    folder: Path,
    name: str,
    dataset: Dataset,
    *,
    source: dict[str, Any],
    parts: Sequence[str],
    tokenizer: Path | None = None,
    threads: int = 1,
) -> Metadata:
    """Write ``folder/metadata.json`` for the encoded ``parts``, and copy their ``tokenizer`` into the folder.

    ``source`` describes the origin of their text. Each thread hashes one shard at a time.

    Raises:
        ValueError: A part is missing, was encoded with other settings, or its files have other sizes or
            blocks than in its record.
    """
    tokens = read_tokens(tokenizer) if tokenizer else BYTES
    settings = dataset.encoding() | ({"tokenizer": tokens.digest} if tokenizer else {})
    splits = {}
    for split in dataset.splits:
        shards = [_record_of_part(folder, split, part, settings) for part in parts]
        with ThreadPoolExecutor(threads) as pool:
            hashes = pool.map(_checked_sha256, [folder / shard["file"] for shard in shards])
        whole = [Shard(**shard, sha256=value) for shard, value in zip(shards, hashes, strict=True)]
        splits[split] = Split(**{key: sum(getattr(s, key) for s in whole) for key in COUNTS}, shards=whole)
    metadata = Metadata(
        format=Metadata.FORMAT,
        dataset=name,
        dtype=DTYPE.str,
        vocab_size=tokens.size,
        special_ids=dict(tokens.specials),
        source=source,
        **settings,
        left_out=left_out(folder, parts) if dataset.cleaning else None,
        tokenizer_kind=tokens.kind if isinstance(tokens, SentencePieceTokens) else None,
        lossless=tokens.lossless,
        splits=splits,
    )
    if tokenizer:
        copy_tokenizer(tokenizer, folder)
    content = content_digest(metadata.plain())
    return metadata.model_copy(update={"digest": content}).write(folder / "metadata.json")


def _checked_sha256(shard: Path) -> str:
    if size := shard.stat().st_size:
        Blocks(shard, np.memmap(shard, np.uint8, "r"), intact=lambda: False).check(0, size)
    return sha256(shard)


def left_out(folder: Path, parts: Sequence[str]) -> dict[str, int]:
    """Return how many documents of these parts were left out, by filter and by reason."""
    counts = Counter[str]()
    for path in (folder / "train" / f"{part}.json" for part in parts):
        counts.update(read_json(path).get("rows", {}).get("left_out", {}) if path.exists() else {})
    return dict(counts)


def described_counts(counts: dict[str, int]) -> str:
    """Return such counts as words, without zeros."""
    return ", ".join(f"{count:,} by {reason}" for reason, count in counts.items() if count)


def _record_of_part(folder: Path, split: str, part: str, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / split / f"{part}.json"
    if not path.exists():
        raise ValueError(f"{path}: part {part} of the {split} split is missing; encode it first")
    record = read_json(path, encode_again(path))
    for key in SETTINGS:
        default = Metadata.model_fields[key].default
        was, value = record.get(key, default), settings.get(key, default)
        if was != value:
            raise ValueError(
                f"{path}: part {part} was encoded with {key} = {was!r}, not {value!r}; encode it again"
            )
    shard = {key: record[key] for key in ("file", "part", *COUNTS)}
    check_size(folder / shard["file"], shard["tokens"] * DTYPE.itemsize)
    check_size((folder / shard["file"]).with_suffix(".idx"), shard["documents"] * 8)
    return shard


def check_size(path: Path, expected: int) -> None:
    """Raise `ValueError` if a file is missing or has another size than expected."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: no such shard; {encode_again(path)}") from None
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: {kind}, {size} bytes instead of {expected}; {encode_again(path)}")


def load_metadata(folder: Path) -> Metadata:
    """Read the description of a dataset.

    Raises:
        ValueError: The description is missing, or has another format or vocabulary.
    """
    path = folder / "metadata.json"
    if not path.exists():
        raise ValueError(f"{path}: the dataset is not encoded; run `snakemake datasets/{folder.name}`")
    metadata = Metadata.read(path)
    metadata._vocabulary = tokens_in(folder, metadata.tokenizer)
    if metadata.dtype != DTYPE.str or metadata.vocab_size != metadata.vocabulary.size:
        raise ValueError(
            f"{folder}: its tokens are {metadata.dtype} of {metadata.vocab_size} ids, this Spider reads "
            f"{DTYPE.str} of {metadata.vocabulary.size}; delete it and run `snakemake datasets/{folder.name}`"
        )
    return metadata
