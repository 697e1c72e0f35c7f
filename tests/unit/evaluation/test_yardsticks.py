"""Yardsticks recomputed from the shards: what was read in training, what it is worth to a compressor."""

import json
import lzma
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyppmd
import pytest

from spider.checkpoints.records import Receipt
from spider.data.encode import encode_part
from spider.data.loader import Loader
from spider.data.metadata import build_metadata
from spider.data.shards import Shards
from spider.evaluation.artifact import COMPRESSORS
from spider.evaluation.evaluate import _against
from spider.evaluation.overlap import COPIED, Text
from spider.evaluation.training_text import LearnedFrom, of_splits, of_stages, training_texts
from spider.evaluation.yardsticks import measure
from spider.files import write_json
from spider.tokens import BYTES
from tests.unit import records
from tests.unit.small_datasets import dataset

LICENCE = "Redistribution and use in source and binary forms, with or without modification, are permitted. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size=n))) for n in rng.integers(2, 9, 300)]
    texts = [" ".join(words[i] for i in rng.integers(0, 300, 60)) for _ in range(300)]
    texts = [LICENCE + text if i % 4 == 0 else text for i, text in enumerate(texts)]
    pq.write_table(pa.table({"text": texts, "id": [*map(str, range(300))]}), folder / "000.parquet")
    encode_part(folder / "000.parquet", folder, "000", dataset(validation=0.1))
    build_metadata(folder, "words", dataset(validation=0.1), source={"kind": "local"}, parts=["000"])
    return folder


def parsed(plain: dict) -> Receipt:
    return Receipt.model_validate(plain)


def receipt(split: Shards, sample: int, *, seq_len: int = 64, seed: int = 5, stage: str = "main"):
    position = {"sample": sample, "data": split.digest, "seq_len": seq_len, "seed": seed}
    return records.receipt(stage=stage, position=position)


def windows_read(split: Shards, count: int, *, seq_len: int = 64, seed: int = 5) -> np.ndarray:
    """Which ids the loader itself hands out in its first windows."""
    loader = Loader(split, seq_len=seq_len, rows=1, seed=seed)
    read = np.zeros(split.tokens, bool)
    for start in loader.starts(np.arange(count)):
        read[(start + np.arange(seq_len + 1)) % split.tokens] = True
    return read


@pytest.mark.parametrize("count", [1, 20, 5000])
def test_what_a_stage_read_is_what_its_loader_handed_out(folder, count, tmp_path):
    split = Shards(folder, "train")
    path = tmp_path / "train.json"
    write_json(path, receipt(split, count))
    stage, whole, why = training_texts(LearnedFrom([(path, folder)]), None, None)
    ids = split.read(0, split.tokens)
    assert stage.raw() == BYTES.raw(ids[windows_read(split, count)])
    assert whole.raw() == BYTES.raw(ids) and not why
    assert stage.share == pytest.approx(1.0, abs=0.02)


def test_the_memory_is_text_that_could_be_learned_from_and_is_searched_for_copies(folder, tmp_path):
    data, path = tmp_path / "data", tmp_path / "train.json"
    settings = dataset(validation=0.1, memory=0.6)
    encode_part(folder / "000.parquet", data, "000", settings)
    build_metadata(data, "words", settings, source={"kind": "local"}, parts=["000"])
    train, memory = Shards(data, "train"), Shards(data, "memory")
    write_json(path, receipt(train, 20))
    of_train, of_memory = (split.read(0, split.tokens) for split in (train, memory))
    windows = BYTES.raw(of_train[windows_read(train, 20)])

    stage, whole, why = training_texts(LearnedFrom([(path, data)]), None, None)
    assert not why and stage.raw() == windows
    assert whole.raw() == BYTES.raw(of_memory) + BYTES.raw(of_train) and whole.share == 1
    stage, same, _ = training_texts(LearnedFrom([(path, data)], [data]), None, None)
    assert stage.raw() == BYTES.raw(of_memory) + windows and stage.share == pytest.approx(1, abs=0.02)
    assert same.raw() == whole.raw()

    limit = memory.tokens + 10 * 64
    stage, part, _ = training_texts(LearnedFrom([(path, data)], [data]), limit, memory.tokens // 2)
    assert stage.raw() == BYTES.raw(of_memory) + BYTES.raw(of_train[windows_read(train, 10)])
    assert part.raw() == BYTES.raw(of_memory[: memory.tokens // 2])
    there = memory.tokens + train.tokens
    assert part.share == pytest.approx(memory.tokens / 2 / there, rel=0.01)
    stage, *_ = training_texts(LearnedFrom([(path, data)], [data]), 100, None)
    assert len(stage.raw()) <= 100 and stage.share < 0.1

    text = Text.of(of_memory[:2000], BYTES)
    assert measure(text, None, whole, 0, tmp_path).copied_N.mean() > 0.99
    assert measure(text, None, of_splits([train], None), 0, tmp_path).copied_N.mean() < 0.9
    *_, why = training_texts(LearnedFrom([(path, data)], [folder]), None, None)
    assert "the text of the memory cannot be read" in why[0] and "no split 'memory'" in why[0]


def test_stages_that_go_on_in_an_order_are_read_once_and_another_order_is_added(folder):
    split = Shards(folder, "train")
    saved = [parsed(receipt(split, n, seed=s)) for n, s in ((10, 5), (30, 5), (4, 7))]
    both = windows_read(split, 30) | windows_read(split, 4, seed=7)
    text = of_stages(saved, [split] * 3, None)
    assert set(text.raw()) == set(BYTES.raw(split.read(0, split.tokens)[both]))
    limited = of_stages(saved, [split] * 3, 10 * 64)
    assert 600 <= len(b"".join(piece.tobytes() for piece in limited.pieces())) / 2 <= 660
    assert limited.share == pytest.approx(10 / 34, abs=0.02)
    assert of_splits([split], split.tokens // 4).share == pytest.approx(0.25, abs=0.001)


def test_every_figure_is_that_of_the_compressor_itself(folder, tmp_path):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 50))], [split], None)
    whole = of_splits([split], None)
    measured = measure(text, stage, whole, None, tmp_path)
    raw, size = text.bytes_N.tobytes(), len(text)
    rates = {one.key: one for one in measured.table}
    assert len(rates) == 18 and not measured.left_out
    for key, given in (("xz", b""), ("xz given stage", stage.raw()), ("xz given all", whole.raw())):
        before = len(lzma.compress(given, preset=9)) if given else 0
        assert rates[key].bpb == 8 * (len(lzma.compress(given + raw, preset=9)) - before) / size
        assert rates[key].given_bytes == len(given)
    encoder = pyppmd.Ppmd7Encoder(12, 1 << 26)
    before = len(encoder.encode(whole.raw()))
    after = len(encoder.encode(raw)) + len(encoder.flush())
    assert rates["ppmd given all"].bpb == 8 * after / size and before > after
    assert measured.ppmd_D.sum() == pytest.approx(8 * after)

    documents = [text.bytes_N[a:b].tobytes() for a, b in zip(text.bounds_D, text.bounds_D[1:], strict=False)]
    copied = np.concatenate([_copied(document, whole.raw()) for document in documents])
    assert (measured.copied_N == copied).all() and 0.02 < copied.mean() < 0.5
    news = text.bytes_N[~copied].tobytes()
    given = len(lzma.compress(whole.raw(), preset=9))
    assert rates["xz given all"].fresh == pytest.approx(
        8 * (len(lzma.compress(whole.raw() + news, preset=9)) - given) / len(news)
    )

    bits_N = np.linspace(1, 2, size)
    outside = _against(measured, text, bits_N)["copies"]
    assert outside["bpb"] == pytest.approx(bits_N[~copied].mean())


def _copied(document: bytes, training: bytes) -> np.ndarray:
    held = np.zeros(len(document), bool)
    for i in range(len(document) - COPIED + 1):
        if document[i : i + COPIED] in training:
            held[i : i + COPIED] = True
    return held


def test_what_was_measured_before_is_read_and_another_text_is_measured(folder, tmp_path, monkeypatch):
    split = Shards(folder, "validation")
    text = Text.of(split.read(0, split.tokens), BYTES)
    first = measure(text, None, of_splits([split], None), None, tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = measure(text, None, of_splits([split], None), None, tmp_path)
    assert again.table == first.table and {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == kept
    next(iter(kept)).write_text("{")  # cut short: measured again
    assert measure(text, None, of_splits([split], None), None, tmp_path).table == first.table
    other = Text.of(split.read(0, 500), BYTES)
    assert measure(other, None, None, None, tmp_path).table != first.table
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    without = measure(other, None, None, None, tmp_path)
    assert without.left_out == ["ppmd: its library is not installed"] and without.ppmd_D is None


def test_the_slow_ones_are_left_out_and_a_part_is_said_to_be_one(folder, tmp_path):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 100))], [split], None)
    size = len(stage.raw())
    measured = measure(text, stage, of_splits([split], None), size, tmp_path)
    rates = {one.key: one for one in measured.table}
    assert set(rates) == {"ppmd given part", "ppmd given stage", *COMPRESSORS}
    part = rates["ppmd given part"]
    assert part.given_bytes == size and part.share == pytest.approx(
        size / len(of_splits([split], None).raw())
    )
    assert f"given all training text (0.0 of {size / part.share / 1e6:.1f} MB)" in part.label
    (line,) = measured.left_out
    assert "xz given split" in line and "zlib given stage" in line and "ppmd" not in line


def test_of_two_texts_that_are_nearly_one_only_the_larger_is_given(folder, tmp_path):
    """A memory's text is most of what there is, with any stage's added."""
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    windows = split.tokens // 64
    for share, given in ((0.97, False), (0.8, True)):
        stage = of_stages([parsed(receipt(split, int(share * windows)))], [split], None)
        for limit, both in ((10**6, given), (None, True)):
            measured = measure(text, stage, of_splits([split], None), limit, tmp_path)
            assert ("ppmd given stage" in {one.key for one in measured.table}) == both
            said = [line for line in measured.left_out if "of all training text, which is given" in line]
            assert len(said) == (not both)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("stream", "was trained on a stream"),
        ("position", "has no position"),
        ("shards", "cannot be read"),
        ("anew", "was encoded anew since"),
    ],
)
def test_a_training_text_that_is_out_of_reach_is_said(folder, tmp_path, change, said):
    plain = receipt(Shards(folder, "train"), 5)
    if change == "position":
        plain["position"] = None
    if change == "anew":
        plain["position"]["data"] = "other/train"
    path = tmp_path / "train.json"
    path.write_text(json.dumps(plain))
    where = {"stream": None, "shards": tmp_path}.get(change, folder)
    stage, split, why = training_texts(LearnedFrom([(path, where)]), None, None)
    assert stage is None and split is None and said in why[0]
