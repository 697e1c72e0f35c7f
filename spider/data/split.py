"""What is decided for each document by itself: which split it is in, and where a long one is cut.

The first 64 bits of the BLAKE2b hash of a document's key, read as a fraction of 2**64, are its place in the
unit interval, which the shares cut into three:

    0         validation      validation + ngram                  1
    |  held out  |  for the n-gram index  |           trained on           |

Its key is its id, or its text where it has no id; with ``split_by``, the name of what it belongs to (a site,
a package), so that all of that falls on one side. Nothing else enters: not the order, not the number of
parts, not the machine, not the seed. So a document keeps its place when the corpus is cut anew, both copies
of a duplicated id fall on the same side, what is held out does not depend on the index's share, and a larger
share, the other left as it is, holds every document of a smaller. The price: shares are met in expectation,
and missed by few documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np


def document_key(id: str | int | None, text: str | bytes) -> bytes:
    """What is hashed for a document: its id in UTF-8 (integers in decimal), its whole text if it has none."""
    chosen = text if id is None or id == "" else id
    return chosen if isinstance(chosen, bytes) else str(chosen).encode("utf-8")


def group_key(value: str | None, pattern: re.Pattern[str], key: bytes) -> bytes:
    """Return the key of the group that a document belongs to under ``split_by``.

    The key is the first group of ``pattern`` in ``value``, or the whole match where that group is empty.
    A document in which the pattern finds no match keeps its own ``key``.
    """
    match = pattern.search(value) if value else None
    if match is None:
        return key
    first: str | None = match[1] if pattern.groups else None
    return (first or match[0]).encode("utf-8")


def is_validation(key: bytes, share: float) -> bool:
    """Whether the document with this key is held out when ``share`` (0 <= share < 1) of all are."""
    return bool(validation_mask(hash_keys([key]), share)[0])


def hash_keys(keys: Iterable[bytes]) -> np.ndarray:
    """First 64 bits of each key's hash, uint64."""
    return np.frombuffer(b"".join([blake2b(key, digest_size=8).digest() for key in keys]), dtype="<u8")


def validation_mask(hashes: np.ndarray, share: float) -> np.ndarray:
    """`is_validation` of many documents, given their keys' `hash_keys`: bool, the same shape."""
    if not 0 <= share < 1:
        raise ValueError(f"validation: the share must be at least 0 and below 1 (got {share})")
    return hashes < np.uint64(share * 2**64)


def split_masks(hashes: np.ndarray, validation: float, ngram: float = 0.0) -> dict[str, np.ndarray]:
    """Which of many documents are in each split, given their keys' `hash_keys`: bool, the same shape. Each is
    in one; ``validation`` and ``ngram`` are at least 0, their sum is below 1."""
    if ngram < 0 or validation + ngram >= 1:
        raise ValueError(f"ngram: {ngram} and validation, {validation}, must add up to less than 1")
    held_out = validation_mask(hashes, validation)
    trained_on = hashes >= np.uint64((validation + ngram) * 2**64)
    return {"train": trained_on, "validation": held_out, "ngram": ~(held_out | trained_on)}


def cut(text: bytes, limit: int | None) -> bytes:
    """At most ``limit`` bytes of a document's UTF-8, its last character whole; None leaves all of it."""
    if limit is None or len(text) <= limit:
        return text
    for _ in range(3):  # a character has at most three continuation bytes, 10xxxxxx
        limit -= text[limit] & 0xC0 == 0x80
    return text[:limit]
