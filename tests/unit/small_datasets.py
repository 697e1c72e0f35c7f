"""A dataset's settings for a test, at the schema's defaults but for what the test is about."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.data.documents import hash_keys, split_masks
from spider.data.encode import encode_part, writing
from spider.data.shards import BLOCKS_KEY, Shards, build_metadata
from spider.tokens import BYTES


def open_files(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, each as often as it is."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile, as that of this listing is
            found.append(os.readlink(handle))
    return [path for path in found if path.startswith(f"{folder}/")]


def dataset(**settings: Any) -> Dataset:
    return Dataset.model_validate({"source": {"kind": "pydocs"}, **settings})


def encoded(folder: Path, texts: Sequence[str], columns: Mapping[str, Any] = {}, **settings: Any) -> Path:
    """Encode texts, numbered from 0, as a dataset of one part in a new folder, and return its shards folder.

    ``columns`` are further columns of the raw part, which is ``raw.parquet``.
    """
    folder.mkdir(parents=True)
    table = {"text": texts, "id": [str(i) for i in range(len(texts))], **columns}
    pq.write_table(pa.table(table), folder / "raw.parquet")
    encode_part(folder / "raw.parquet", folder / "s", "000", dataset(**settings))
    build_metadata(folder / "s", "toy", dataset(**settings), source={}, parts=["000"])
    return folder / "s"


def shards_of_ids(
    folder: Path, ids: Sequence[np.ndarray], begins: Sequence[np.ndarray] | None = None
) -> Shards:
    """Write a split of one shard for each array of ids, and return a view of it.

    Documents begin at ``begins`` (default: the shards have none).
    """
    parts = [f"{number:03d}" for number in range(len(ids))]
    nowhere = [np.zeros(0, np.int64)] * len(ids)
    for part, own, first in zip(parts, ids, begins or nowhere, strict=True):
        with writing(folder, part, dataset(), BYTES) as made:
            made.writers["train"].write(own, first)
    build_metadata(folder, "ids", dataset(), source={}, parts=parts)
    return Shards(folder, "train")


def flip(path: Path, byte: int) -> None:
    """Flip a bit of a file in place. In the lower byte of a letter's id, it makes another letter."""
    with open(path, "r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 4]))


def forget(record: Path, **changes: object) -> None:
    """Change the digests in the record of a part; without changes leave them out, as in earlier versions."""
    plain = json.loads(record.read_text())
    plain[BLOCKS_KEY] |= changes
    record.write_text(json.dumps(plain if changes else {k: v for k, v in plain.items() if k != BLOCKS_KEY}))


def questions(path: Path, count: int = 30) -> dict[str, Any]:
    """Write questions with four choices, and return the settings of their task."""
    rows = [
        {"query": f"fox {i}", "choices": ["dog", "cat", "jumps", "over"], "gold": i % 4} for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"file": str(path)}


def document_key(id: str | int | None, text: str | bytes) -> bytes:
    """Return the key of a document: its id in UTF-8 (integers in decimal), or its text if it has none."""
    chosen = text if id is None or id == "" else id
    return chosen if isinstance(chosen, bytes) else str(chosen).encode("utf-8")


def is_validation(key: bytes, share: float) -> bool:
    """Return whether the document with this key is held out, for a share from 0 to below 1."""
    return bool(split_masks(hash_keys([key]), share)["validation"][0])
