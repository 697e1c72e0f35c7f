"""Shards: described truly, read across borders, and every kind of damage named with its place."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.data.encode import encode_part
from spider.data.shards import Shards, build_metadata, inspect, load_metadata, verify
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset

TEXTS = [f"Document {i}: the cat sat on the mät. " * (i % 5 + 1) for i in range(300)]
PARTS = ["000", "001", "002"]
SOURCE = {"kind": "pydocs"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A dataset of three parts, the last one empty."""
    for part, texts in zip(PARTS, (TEXTS[:120], TEXTS[120:], []), strict=True):
        ids = pa.array([f"{part}/{i}" for i in range(len(texts))], pa.string())
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "id": ids}), tmp_path / "a.parquet")
        encode_part(tmp_path / "a.parquet", tmp_path / "shards", part, dataset(validation=0.2))
    build_metadata(tmp_path / "shards", "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS)
    return tmp_path / "shards"


def tokens_of(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([np.fromfile(folder / split / f"{part}.bin", "<u2") for part in PARTS])


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


# ---------------------------------------------------------------------------------------------- metadata


def test_metadata_describes_every_shard(folder):
    metadata = load_metadata(folder)
    assert metadata.plain() == json.loads((folder / "metadata.json").read_text())
    assert metadata.format == 1 and metadata.dtype == "<u2" and metadata.vocabulary is BYTES
    assert (metadata.vocab_size, metadata.special_ids) == (272, BYTES.specials)
    assert metadata.source == SOURCE
    assert metadata.validation == 0.2 and metadata.max_document_bytes is None
    assert sum(metadata.splits[s].documents for s in ("train", "validation")) == len(TEXTS)
    assert sum(metadata.splits[s].bytes for s in ("train", "validation")) == len("".join(TEXTS).encode())
    for split in ("train", "validation"):
        described = metadata.splits[split]
        assert [shard.part for shard in described.shards] == PARTS
        assert described.tokens == len(tokens_of(folder, split))
        for shard in described.shards:
            assert shard.sha256 == hashlib.sha256((folder / shard.file).read_bytes()).hexdigest()


def test_only_a_shard_that_changed_is_hashed_again(folder, monkeypatch):
    hashed = []
    monkeypatch.setattr("spider.data.shards.sha256", lambda path: hashed.append(path.name) or "0" * 64)
    again = build_metadata(folder, "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS, threads=3)
    assert again == load_metadata(folder) and not hashed
    os.utime(folder / "train/001.bin", (1, 1))
    build_metadata(folder, "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS)
    assert hashed == ["001.bin"]


def test_an_index_is_described_verified_and_shown(folder, tmp_path):
    settings = dataset(validation=0.2, ngram=0.5)
    before = load_metadata(folder)
    assert "ngram" not in (folder / "metadata.json").read_text()
    with pytest.raises(ValueError, match=r"encoded with ngram = 0\.0, not 0\.5; encode it again"):
        build_metadata(folder, "demo", settings, source=SOURCE, parts=PARTS)
    encode_part(tmp_path / "a.parquet", folder, "002", settings)
    with pytest.raises(ValueError, match=r"002 was encoded with ngram = 0\.5, not 0\.0; encode it again"):
        build_metadata(folder, "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS)

    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "b.parquet")
    encode_part(tmp_path / "b.parquet", tmp_path / "m", "000", settings)
    after = build_metadata(tmp_path / "m", "demo", settings, source=SOURCE, parts=["000"])
    assert load_metadata(tmp_path / "m") == after and after.ngram == 0.5 and after.digest != before.digest
    assert list(after.splits) == ["train", "validation", "ngram"]
    assert verify(tmp_path / "m")["documents"] == len(TEXTS)
    assert inspect(tmp_path / "m")["splits"]["ngram"]["documents"] == after.splits["ngram"].documents > 100
    assert Shards(tmp_path / "m", "ngram").digest == f"{after.digest}/ngram"
    poke(tmp_path / "m/ngram/000.bin", 4, b"Z")
    with pytest.raises(ValueError, match=r"ngram/000\.bin: SHA-256 differs"):
        verify(tmp_path / "m")


# -------------------------------------------------------------------------------------------------- view


@pytest.mark.parametrize("split", ["train", "validation"])
def test_view_is_the_concatenation_of_the_shards(folder, split):
    view, whole = Shards(folder, split), tokens_of(folder, split)
    assert view.tokens == len(whole)
    assert np.array_equal(view.read(0, view.tokens), whole)
    border = int(view.borders[1])
    assert np.array_equal(view.read(border - 3, 7), whole[border - 3 : border + 4])
    starts = np.random.default_rng(0).integers(0, view.tokens - 50, 200)
    starts[:60] = border - np.arange(60)
    assert np.array_equal(view.gather(starts, 50), whole[starts[:, None] + np.arange(50)])
    assert view.gather(starts, 50).dtype == np.uint16
    for start, count in zip([*starts.tolist(), view.tokens], [*range(1, 51)] * 4 + [0], strict=False):
        assert np.array_equal(view.read(start, count), whole[start : start + count])


# ------------------------------------------------------------------------------------------------ checks


def test_verify_counts_what_it_checked(folder):
    report = verify(folder)
    assert report["shards"] == 6 and report["documents"] == len(TEXTS)
    assert report["tokens"] == report["bytes"] + 2 * len(TEXTS)
    assert verify(folder, full=False) == report


def test_verify_lists_every_problem(folder):
    poke(folder / "train/000.bin", 4, b"Z")
    verify(folder, full=False)  # reads no content
    (folder / "train/001.bin").write_bytes(b"")
    (folder / "validation/000.idx").unlink()
    with pytest.raises(ValueError) as caught:
        verify(folder)
    message = str(caught.value)
    assert "train/000.bin: SHA-256 differs" in message
    assert "train/001.bin: truncated, 0 bytes" in message
    assert "validation/000.idx: no such shard" in message
    assert "3 problems" in message


@pytest.mark.parametrize(("offset", "data"), [(8, b"\x02"), (0, b"\xff" * 8)])
def test_verify_finds_an_index_that_is_not_the_documents(folder, offset, data):
    poke(folder / "train/000.idx", offset, data)
    with pytest.raises(ValueError, match=r"000\.idx: its entries are not the positions of BOS in 000\.bin"):
        verify(folder)


def test_inspect_reports_lengths_bytes_and_the_beginning(folder):
    train = inspect(folder, 60)["splits"]["train"]
    tokens = tokens_of(folder, "train")
    documents = np.split(tokens, np.flatnonzero(tokens == BYTES.bos))[1:]
    raw = [document[1:-1].astype(np.uint8).tobytes() for document in documents]
    lengths = [len(d) for d in raw]
    assert (train["documents"], train["shards"]) == (len(raw), 3)
    expected = {"mean": np.mean(lengths), "median": np.median(lengths), "max": max(lengths)}
    assert train["document_bytes"] == pytest.approx(expected)
    counts = np.bincount(np.frombuffer(b"".join(raw), np.uint8), minlength=256) / sum(lengths)
    present = counts[counts > 0]
    assert train["top"][0] == [" ", pytest.approx(counts[ord(" ")])]
    assert train["entropy_bits"] == pytest.approx(-(present * np.log2(present)).sum())
    assert train["beginning"].startswith(raw[0].decode()[:30])
