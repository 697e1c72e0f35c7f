"""Shards: described truly, read across borders, and every kind of damage named with its place."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.data.encode import encode_part
from spider.data.loader import Loader
from spider.data.shards import (
    Shards,
    build_metadata,
    inspect,
    load_metadata,
    verify,
)
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset, forget

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


def test_digest_follows_the_content_only(folder):
    def again():
        return build_metadata(folder, "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS).digest

    first = load_metadata(folder).digest
    assert again() == first
    forget(folder / "train/000.json")
    assert again() == first
    poke(folder / "train/000.bin", 4, b"Z")
    assert again() != first


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


def test_a_description_holds_no_field_at_its_default(folder):
    keys = "format dataset dtype vocab_size special_ids source text_column id_column validation"
    assert list(load_metadata(folder).plain()) == [*keys.split(), "splits", "digest"]


@pytest.mark.parametrize(("validation", "ngram", "empty"), [(0.1, 0.89, "train"), (0.1, 1e-9, "ngram")])
def test_an_empty_split_is_an_error_where_it_is_needed(tmp_path, validation, ngram, empty):
    pq.write_table(pa.table({"text": TEXTS[:8]}), tmp_path / "a.parquet")
    settings = dataset(validation=validation, ngram=ngram)
    encode_part(tmp_path / "a.parquet", tmp_path / "s", "000", settings)
    metadata = build_metadata(tmp_path / "s", "small", settings, source={}, parts=["000"])
    assert metadata.splits[empty].documents == 0 and verify(tmp_path / "s")["documents"] == 8
    assert inspect(tmp_path / "s")["splits"][empty]["beginning"] == ""
    with pytest.raises(ValueError, match=rf"s \({empty}\): 0 tokens are less than one window"):
        Loader(Shards(tmp_path / "s", empty), seq_len=32, rows=1, seed=0)


@pytest.mark.parametrize("file", ["train/001.bin", "validation/000.idx"])
def test_a_shard_of_another_size_than_its_record_is_an_error(folder, file):
    poke(folder / file, 10**6, b"x")
    with pytest.raises(ValueError, match=rf"{file}: too long"):
        build_metadata(folder, "demo", dataset(validation=0.2), source=SOURCE, parts=PARTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this Spider reads 1; delete it and run"),
        ({"vocab_size": 300}, "tokens are <u2 of 300 ids, this Spider reads <u2 of 272"),
        ({"dtype": "<u4"}, "tokens are <u4"),
        ({"splits": None}, r"the description of a dataset that is not complete \(splits: "),
    ],
)
def test_a_description_of_another_version_is_an_error(folder, change, message):
    removed = [key for key, value in change.items() if value is None]
    metadata = {k: v for k, v in (load_metadata(folder).plain() | change).items() if k not in removed}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        Shards(folder, "train")


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


def test_view_is_read_only_and_gathered_rows_are_copies(folder):
    view = Shards(folder, "train")
    rows = view.gather(np.array([0, 1]), 10)
    rows[:] = 0
    assert np.array_equal(view.read(0, 10), tokens_of(folder, "train")[:10])
    assert not view.maps[0].flags.writeable


def test_an_unknown_split_is_an_error_with_the_existing_ones(folder):
    with pytest.raises(ValueError, match=r"no split 'test' \(there are: train, validation\)"):
        Shards(folder, "test")


def test_truncated_and_missing_shards_are_errors_at_opening(folder):
    path = folder / "train/001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(
        ValueError, match=rf"train/001\.bin: truncated, {len(whole) - 2} bytes instead of {len(whole)}"
    ):
        Shards(folder, "train")
    path.unlink()
    with pytest.raises(
        ValueError, match=r"train/001\.bin: no such shard; delete .* which encodes the part again"
    ):
        Shards(folder, "train")


def test_locate_names_shard_and_token(folder):
    view = Shards(folder, "train")
    assert view.locate(5) == (view.files[0], 5)
    assert view.locate(int(view.borders[1])) == (view.files[1], 0)


READ = """
import faulthandler, os, sys
from pathlib import Path
from spider.data.shards import Shards
faulthandler.enable()
folder = Path(sys.argv[1])
view = Shards(folder, "train")
os.truncate(folder / "train/000.bin", 0)
view.read(0, 100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another signal")
def test_a_shard_that_is_truncated_while_it_is_read_is_named_when_it_is_opened_again(folder):
    done = subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGBUS, done
    assert "Bus error" in done.stderr and 'shards.py", line' in done.stderr
    with pytest.raises(ValueError, match=r"train/000\.bin: truncated, 0 bytes instead of "):
        Shards(folder, "train")


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


def test_verify_finds_an_edited_description(folder):
    path = folder / "metadata.json"
    path.write_text(path.read_text().replace('"demo"', '"other"'))
    with pytest.raises(ValueError, match=r"metadata\.json: edited, its digest"):
        verify(folder, full=False)


@pytest.mark.parametrize(("offset", "data"), [(8, b"\x02"), (0, b"\xff" * 8)])
def test_verify_finds_an_index_that_is_not_the_documents(folder, offset, data):
    poke(folder / "train/000.idx", offset, data)
    with pytest.raises(ValueError, match=r"000\.idx: its entries are not the positions of BOS in 000\.bin"):
        verify(folder)


def test_inspect_reports_lengths_bytes_and_the_beginning(folder):
    report = inspect(folder, 60)
    assert report["dataset"] == "demo"
    train = report["splits"]["train"]
    tokens = tokens_of(folder, "train")
    documents = np.split(tokens, np.flatnonzero(tokens == BYTES.bos))[1:]
    raw = [document[1:-1].astype(np.uint8).tobytes() for document in documents]
    lengths = [len(d) for d in raw]
    assert train["document_bytes"] == {
        "mean": pytest.approx(np.mean(lengths)),
        "median": np.median(lengths),
        "max": max(lengths),
    }
    assert train["documents"] == len(raw) and train["shards"] == 3
    counts = np.bincount(np.frombuffer(b"".join(raw), np.uint8), minlength=256) / sum(lengths)
    assert train["top"][0] == [" ", pytest.approx(counts[ord(" ")])]
    present = counts[counts > 0]
    assert train["entropy_bits"] == pytest.approx(-(present * np.log2(present)).sum())
    assert train["beginning"].startswith(raw[0].decode()[:30])
    json.dumps(report)
