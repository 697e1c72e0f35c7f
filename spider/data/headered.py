"""Token shards that others have written, with a header: read as they are, or turned into ours.

256 little-endian int32 (20240520, 1, n, zeros), then n uint16. Of a dataset of `kind: tokens` they hold the
ids of a SentencePiece model, documents back to back, each a `<s>` and its pieces. Ours end with EOS:

    theirs  |s T h e   c a t|s A   d o g|
    ours    |B T h e   c a t E|B A   d o g E|      ids as `spider.tokens.sentencepiece` numbers them

Signs that stand for nothing are left out, and so are documents without a piece. Where shards were cut to one
size, documents go on in the next file: what a file but the first of its split begins with is then a document
of its own. A shard is read some millions of ids at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spider.config import Dataset, TokensSource
from spider.data.metadata import DTYPE
from spider.data.writing import writing
from spider.files import read_json, sha256
from spider.tokens.sentencepiece import Model, read_model

logger = logging.getLogger(__name__)

HEADER_MAGIC = 20240520
HEADER_INTS = 256
CHUNK = 1 << 22
"""Ids read at a time."""


def headered(path: Path) -> np.ndarray:
    """The ids of a headered shard, mapped, read-only; `ValueError` where it is missing, no such shard, or of
    another size than its header says."""
    try:
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name the shards there are") from None
    if len(header) < HEADER_INTS or header[0] != HEADER_MAGIC or header[1] != 1:
        raise ValueError(f"{path}: not a headered shard, which begins with the int32 {HEADER_MAGIC} and 1")
    tokens, start = int(header[2]), HEADER_INTS * header.itemsize
    if size != (expected := start + tokens * DTYPE.itemsize):
        raise ValueError(
            f"{path}: {size} bytes instead of {expected} for the {tokens} tokens that its header "
            "promises; download it again"
        )
    return mapped(path, start, tokens)


def mapped(path: Path, start: int, tokens: int) -> np.ndarray:
    """Ids of a file from a byte on, read-only: a plain array over the mapping, since slicing an `np.memmap`
    is slow."""
    if tokens == 0:
        return np.empty(0, DTYPE)
    return np.asarray(np.memmap(path, dtype=DTYPE, mode="r", offset=start, shape=(tokens,)))


def import_part(path: Path, folder: Path, part: str, dataset: Dataset) -> dict[str, Any]:
    """Turn a part's file into ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``; the split that it
    is not of stays empty. Returns the records by split.

    Raises `ValueError` for a damaged shard or model, another size of vocabulary, and an id that stands for no
    text; `OSError` as `writing` does.
    """
    source = dataset.source
    assert isinstance(source, TokensSource), "of another kind"
    model = read_model(Path(source.model))
    if (size := model.tokens.size) != source.vocab_size:
        raise ValueError(
            f"datasets.*.source.vocab_size: {source.model} has {size:,} ids with those of bytes, and "
            f"{source.vocab_size:,} is given; set it to {size}"
        )
    ids, split, empty = headered(path), source.split(part), 0
    with writing(folder, part, dataset, model.tokens) as made:
        writer = made.writers[split]
        for kept, begins, left_out in _documents(path, ids, model, part in source.first_parts):
            writer.write(kept, begins)
            empty += left_out
        if not writer.documents:
            raise ValueError(f"{path}: holds no documents")
        origin = {"part": part, "name": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)}
        rows = {"read": writer.documents + empty, "empty": empty}
        made.said |= {"rows": rows, "origin": origin, "split": split}
    return made.records


def imported(record: Path, source: TokensSource) -> dict[str, Any]:
    """What a part was made from, by its record; `ValueError` where that is missing, or another file now."""
    if not record.exists():
        raise ValueError(f"{record}: part {record.stem} is missing; encode it first")
    plain = read_json(record)
    origin, made_of = plain.get("origin", {}), (source.item(record.stem), source.split(record.stem))
    if (origin.get("name"), plain.get("split")) != made_of:
        was = f"{origin.get('name')} ({plain.get('split')})"
        raise ValueError(f"{record}: part {record.stem} was made of {was}, not {made_of[0]}; encode it again")
    return dict(origin)


def _documents(
    path: Path, theirs: np.ndarray, model: Model, first: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Our ids, a piece of the shard at a time, where documents begin among them, and how many were empty."""
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
    """Our ids of theirs, -1 nowhere: `ValueError` for one that the model does not have, or that stands for
    what was lost."""
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
