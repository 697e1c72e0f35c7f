"""Decide the split of each document by a hash of its key, and truncate long documents.

The first 64 bits of the BLAKE2b hash of a document's key, as a fraction of 2**64, are a position in the unit
interval, which the shares divide into three:

    0       validation        validation + ngram                    1
    |  held out  |  n-gram index  |             training             |

The key is the document's id, or its text if it has none. With ``split_by`` it is the name of a group (a site,
a package), so that a whole group is in one split; a salt chooses other groups. The order, the number of
parts, the machine and the seed do not matter. So a document keeps its split when the corpus is divided anew,
and both copies of a duplicated id are in the same split. The held-out documents do not depend on the share of
the index, and a larger share contains every document of a smaller one. The shares are met in expectation,
with a difference of few documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np


def group_key(value: str | None, pattern: re.Pattern[str], key: bytes) -> bytes:
    """Return the key of the group that a document belongs to under ``split_by``.

    The key is the first group of ``pattern`` in ``value``, or the whole match if that group is empty. A
    document without a match keeps its own ``key``.
    """
    match = pattern.search(value) if value else None
    if match is None:
        return key
    first: str | None = match[1] if pattern.groups else None
    return (first or match[0]).encode("utf-8")


def salted(key: bytes, salt: int) -> bytes:
    """Return the key of a group with the salt in front of it; salt 0 returns the key."""
    return b"%d/%b" % (salt, key) if salt else key


def hash_keys(keys: Iterable[bytes]) -> np.ndarray:
    """Return the first 64 bits of each key's hash, uint64."""
    return np.frombuffer(b"".join([blake2b(key, digest_size=8).digest() for key in keys]), dtype="<u8")


def validation_mask(hashes: np.ndarray, share: float) -> np.ndarray:
    """Return whether documents are held out, from the hashes of their keys, bool."""
    return hashes < np.uint64(share * 2**64)


def split_masks(hashes: np.ndarray, validation: float, ngram: float = 0.0) -> dict[str, np.ndarray]:
    """Return a mask for each split of many documents, from the hashes of their keys. Each is in one split.

    The shares are at least 0, and their sum is below 1 (`spider.config.data.Dataset` checks it).
    """
    held_out = validation_mask(hashes, validation)
    trained_on = ~validation_mask(hashes, validation + ngram)
    return {"train": trained_on, "validation": held_out, "ngram": ~(held_out | trained_on)}


def truncate(text: bytes, limit: int | None) -> bytes:
    """Return at most ``limit`` bytes of UTF-8 that end with a whole character; None returns all of it."""
    if limit is None or len(text) <= limit:
        return text
    for _ in range(3):  # a character has at most three continuation bytes, 10xxxxxx
        limit -= text[limit] & 0xC0 == 0x80
    return text[:limit]
