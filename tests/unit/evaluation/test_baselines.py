"""Recompute baselines from the shards: the windows read in training, and the rates of compressors."""

import json
import lzma
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyppmd
import pytest

from spider.checkpoints.records import Receipt
from spider.data.encode import encode_part
from spider.data.loader import Loader
from spider.data.shards import Shards, build_metadata
from spider.evaluation import compressors, overlap
from spider.evaluation.baselines import _given_texts, compute_baselines, text_baselines
from spider.evaluation.compressors import COMPRESSORS
from spider.evaluation.overlap import MATCH_BYTES
from spider.evaluation.result import GIVEN
from spider.evaluation.spread import bootstrap_interval
from spider.evaluation.text import Text
from spider.evaluation.training_text import LearnedFrom, TrainingText, of_splits, of_stages, training_texts
from spider.files import write_json
from spider.tokens import BYTES
from tests.unit import records
from tests.unit.small_datasets import dataset

INSTALLED = [name for name in COMPRESSORS if compressors.version(name)]
STREAMS = [name for name in INSTALLED if name != "zpaq"]
B = b"\xff"
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


def receipt(
    split: Shards, sample: int, *, seq_len: int = 64, seed: int = 5, stage: str = "main", **order: str
):
    position = {"sample": sample, "data": split.digest, "seq_len": seq_len, "seed": seed, **order}
    return records.receipt(stage=stage, position=position)


def windows_read(split: Shards, count: int, *, seq_len: int = 64, seed: int = 5) -> np.ndarray:
    """Return which ids the loader reads in its first windows."""
    loader = Loader(split, seq_len=seq_len, rows=1, seed=seed)
    read = np.zeros(split.tokens, bool)
    for start in loader.starts(np.arange(count)):
        read[(start + np.arange(seq_len + 1)) % split.tokens] = True
    return read


@pytest.mark.parametrize("count", [1, 20, 5000])
def test_the_text_of_a_stage_is_what_its_loader_read(folder, count, tmp_path):
    split = Shards(folder, "train")
    path = tmp_path / "train.json"
    write_json(path, receipt(split, count))
    stage, whole, reasons = training_texts(LearnedFrom([(path, folder)]), None, None)
    ids = split.read(0, split.tokens)
    assert stage.raw() == BYTES.raw(ids[windows_read(split, count)])
    assert whole.raw() == BYTES.raw(ids) and not reasons
    assert stage.share == pytest.approx(1.0, abs=0.02)


def test_the_ngram_split_counts_as_training_text_and_is_searched_for_overlap(folder, tmp_path):
    data, path = tmp_path / "data", tmp_path / "train.json"
    settings = dataset(validation=0.1, ngram=0.6)
    encode_part(folder / "000.parquet", data, "000", settings)
    build_metadata(data, "words", settings, source={"kind": "local"}, parts=["000"])
    train, ngram = Shards(data, "train"), Shards(data, "ngram")
    write_json(path, receipt(train, 20))
    of_train, of_index = (split.read(0, split.tokens) for split in (train, ngram))
    windows = BYTES.raw(of_train[windows_read(train, 20)])

    stage, whole, reasons = training_texts(LearnedFrom([(path, data)]), None, None)
    assert not reasons and stage.raw() == windows
    assert whole.raw() == BYTES.raw(of_index) + BYTES.raw(of_train) and whole.share == 1
    stage, same, _ = training_texts(LearnedFrom([(path, data)], [data]), None, None)
    assert stage.raw() == BYTES.raw(of_index) + windows and stage.share == pytest.approx(1, abs=0.02)
    assert same.raw() == whole.raw()

    limit = ngram.tokens + 10 * 64
    stage, part, _ = training_texts(LearnedFrom([(path, data)], [data]), limit, ngram.tokens // 2)
    assert stage.raw() == BYTES.raw(of_index) + BYTES.raw(of_train[windows_read(train, 10)])
    assert part.raw() == BYTES.raw(of_index[: ngram.tokens // 2])
    total = ngram.tokens + train.tokens
    assert part.share == pytest.approx(ngram.tokens / 2 / total, rel=0.01)
    stage, *_ = training_texts(LearnedFrom([(path, data)], [data]), 100, None)
    assert len(stage.raw()) <= 100 and stage.share < 0.1

    text = Text.of(of_index[:2000], BYTES)
    assert compute_baselines(text, None, whole, 1, tmp_path).overlap_N.mean() > 0.99
    assert compute_baselines(text, None, of_splits([train], None), 1, tmp_path).overlap_N.mean() < 0.9
    *_, reasons = training_texts(LearnedFrom([(path, data)], [folder]), None, None)
    assert "the text of the n-gram index cannot be read" in reasons[0] and "no split 'ngram'" in reasons[0]


def test_stages_of_one_order_are_read_once_and_another_order_is_added(folder):
    split = Shards(folder, "train")
    saved = [parsed(receipt(split, n, seed=s)) for n, s in ((10, 5), (30, 5), (4, 7))]
    both = windows_read(split, 30) | windows_read(split, 4, seed=7)
    text = of_stages([one.position for one in saved], [split] * 3, None)
    assert set(text.raw()) == set(BYTES.raw(split.read(0, split.tokens)[both]))
    limited = of_stages([one.position for one in saved], [split] * 3, 10 * 64)
    assert 600 <= len(b"".join(piece.tobytes() for piece in limited.pieces())) / 2 <= 660
    assert limited.share == pytest.approx(10 / 34, abs=0.02)
    assert of_splits([split], split.tokens // 4).share == pytest.approx(0.25, abs=0.001)


def test_a_stage_in_the_order_of_the_text_read_its_beginning(folder):
    split = Shards(folder, "train")
    saved = [parsed(receipt(split, 10, order="text")), parsed(receipt(split, 3))]
    ids, shuffled = split.read(0, split.tokens), windows_read(split, 3)
    both = shuffled | (np.arange(split.tokens) <= 10 * 64)
    assert of_stages([saved[0].position], [split], None).raw() == BYTES.raw(ids[: 10 * 64 + 1])
    assert len(of_stages([one.position for one in saved], [split] * 2, None).raw()) >= len(
        BYTES.raw(ids[both])
    )


def test_every_rate_is_that_of_the_compressor_itself(folder, tmp_path):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 50)).position], [split], None)
    whole = of_splits([split], None)
    measured = compute_baselines(text, stage, whole, None, tmp_path)
    raw, size = text.bytes_N.tobytes(), len(text)
    rates = {row.label: row for row in measured.rows}
    assert len(rates) == 3 * len(INSTALLED) and not [one for one in measured.left_out if "zpaq" not in one]
    documents = text.documents()
    free = compressors.boundary_bits(size, len(documents))
    apart, given_all = B.join(documents), whole.raw(B) + B
    for key, given in (("xz", b""), ("xz given stage", stage.raw(B) + B), ("xz given all", given_all)):
        before = len(lzma.compress(given, preset=9))
        cost = 8 * (len(lzma.compress(given + apart, preset=9)) - before)
        assert rates[key].carried.value == pytest.approx((cost - free) / size)
        sizes = [len(lzma.compress(given + document, preset=9)) for document in documents]
        assert rates[key].value == pytest.approx(8 * (sum(sizes) - before * len(sizes)) / size)
        assert not given or f"({len(given.replace(B, b'')) / 1e6:.1f} MB)" in rates[key].note
    assert rates["bz2"].value and rates["bz2 given all"].value is None and rates["bz2 given all"].carried
    best = rates["ppmd given all"]
    assert best.carried.value == ppmd_bits(given_all, *documents) / size
    alone = [ppmd_bits(given_all, document) for document in documents]
    assert measured.ppmd_D.tolist() == alone and best.value == pytest.approx(sum(alone) / size)
    assert best.interval == bootstrap_interval(np.array(alone), text.lengths())
    assert best.carried.interval[0] < best.carried.value < best.carried.interval[1]
    if zpaq := rates.get("zpaq given all"):
        sizes = [compressors.zpaq_size(one) for one in (given_all, given_all + apart)]
        assert zpaq.carried.value == (8 * (sizes[1] - sizes[0]) - free) / size
        assert zpaq.value is None and "cannot be reset" in zpaq.note

    documents = [text.bytes_N[a:b].tobytes() for a, b in zip(text.bounds_D, text.bounds_D[1:], strict=False)]
    overlap_N = np.concatenate([_overlap(document, whole.raw()) for document in documents])
    assert (measured.overlap_N == overlap_N).all() and 0.02 < overlap_N.mean() < 0.5
    pieces = [
        [
            raw[a:b]
            for a, b in pairwise([begin, *(begin + 1 + np.flatnonzero(np.diff(overlap_N[begin:end]))), end])
        ]
        for begin, end in pairwise(text.bounds_D)
    ]
    bits = np.concatenate(compressors.bits("ppmd", given_all, [[raw], *pieces])[1:])
    starts = np.cumsum([0, *(len(piece) for one in pieces for piece in one)])[:-1]
    outside = bits[~overlap_N[starts]].sum() / (~overlap_N).sum()
    assert best.columns["outside overlap"].value == pytest.approx(outside)
    assert [*rates["xz given all"].columns] == [GIVEN]
    assert best.columns[GIVEN].value == len(whole.raw())

    bits_N = np.linspace(1, 2, size)
    baselines: Future = Future()
    baselines.set_result(measured)
    (row,) = overlap.measure(SimpleNamespace(baselines=baselines, bits_B=bits_N, text=text), None).rows
    assert row.value == pytest.approx(bits_N[~overlap_N].mean())


def ppmd_bits(given: bytes, *documents: bytes) -> int:
    """Return the bits that PPMd adds for documents after another text, without those of their boundaries."""
    alone, both = (pyppmd.Ppmd7Encoder(24, 1 << 26) for _ in range(2))
    added = len(both.encode(given))
    for i, document in enumerate(documents):
        if i:
            both.encode(B)
        added += len(both.encode(document))
    return 8 * (added + len(both.flush()) - len(alone.encode(given) + alone.flush()))


def test_boundaries_of_short_documents_are_free(tmp_path):
    """Nothing tells where a document ends, and all begin alike: after a boundary, the beginning is free."""
    rng = np.random.default_rng(0)
    parts = [bytes(rng.choice(list(b"abcdefghijkl"), size=n).tolist()) for n in rng.integers(3, 9, 12)]
    ends = (b"".join(parts[i] for i in rng.integers(0, 12, rng.integers(1, 9))) for _ in range(60))
    documents = [b"please find below a word: " + end for end in ends]
    text = Text.of(np.concatenate([BYTES.encode(document) for document in documents]), BYTES)
    assert 45 < text.lengths().mean() < 55
    rates = {row.label: row for row in compute_baselines(text, None, None, None, tmp_path).rows}
    apart = [piece for document in documents for piece in (B, document)][1:]
    for name in STREAMS:
        together, found = compressors.bits(name, b"", [[text.bytes_N.tobytes()], apart])
        free = sum(found[1::2]) if name == "ppmd" else compressors.boundary_bits(len(text), len(documents))
        assert rates[name].carried.value == pytest.approx((sum(found) - free) / len(text))
        assert sum(found) - free < 0.95 * sum(together), name


def test_a_text_that_is_too_large_for_the_memory_of_ppmd_is_named(folder, tmp_path, monkeypatch):
    split = of_splits([Shards(folder, "train")], None)
    text = Text.of(Shards(folder, "validation").read(0, 500), BYTES)
    for fits, lines in ((1, 0), (0, 1)):
        monkeypatch.setattr(compressors, "PPMD_HOLDS", len(split.raw(B) + B) - 1 + fits)
        measured = compute_baselines(text, None, split, 1 << 20, tmp_path)
        assert len([one for one in measured.left_out if "2 GB of memory were full" in one]) == lines


def test_documents_run_together_only_where_all_bytes_occur(folder, tmp_path):
    every = bytes(range(256))
    for held_out, free in ((every[:-1], b"\xff"), (every[:-2] + b"\xff", b"\xfe"), (every, b"")):
        stream = np.concatenate([BYTES.encode(held_out), BYTES.encode(b"x")])
        measured = compute_baselines(Text.of(stream, BYTES), None, None, None, tmp_path)
        lines = [line for line in measured.left_out if "all 256 bytes occur" in line]
        assert len(lines) == (not free)
        xz = next(row for row in measured.rows if row.label == "xz")
        end, size = (len(lzma.compress(one, preset=9)) for one in (b"", held_out + free + b"x"))
        cost = 8 * (size - end) - (compressors.boundary_bits(len(held_out) + 1, 2) if free else 0)
        assert xz.carried.value * (len(held_out) + 1) == pytest.approx(cost)
    split = of_splits([Shards(folder, "train")], None)
    text = Text.of(BYTES.encode(b"\xff"), BYTES)  # the training text decides as well
    assert next(_given_texts(None, split, None, text.bytes_N.tobytes())).boundary == b"\xfe"


def _overlap(document: bytes, training: bytes) -> np.ndarray:
    held = np.zeros(len(document), bool)
    for i in range(len(document) - MATCH_BYTES + 1):
        if document[i : i + MATCH_BYTES] in training:
            held[i : i + MATCH_BYTES] = True
    return held


def test_baselines_are_cached_for_each_text(folder, tmp_path):
    split = Shards(folder, "validation")
    text = Text.of(split.read(0, split.tokens), BYTES)
    first = compute_baselines(text, None, of_splits([split], None), None, tmp_path)
    cached = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    again = compute_baselines(text, None, of_splits([split], None), None, tmp_path)
    assert again.rows == first.rows
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.json")} == cached
    next(iter(cached)).write_text("{")  # a damaged file is computed again
    assert compute_baselines(text, None, of_splits([split], None), None, tmp_path).rows == first.rows
    other = Text.of(split.read(0, 500), BYTES)
    assert compute_baselines(other, None, None, None, tmp_path).rows != first.rows


def test_evaluations_that_run_at_once_compute_a_baseline_once(folder, tmp_path, monkeypatch):
    """The runs of a workflow may be scored at the same time, on two encodings of one text."""
    train = Shards(folder, "train")
    text = Text.of(Shards(folder, "validation").read(0, 500), BYTES)
    second = int(np.flatnonzero(train.read(0, train.tokens) == BYTES.bos)[100])
    in_one = TrainingText([(train, 0, train.tokens)], 1.0)
    in_two = TrainingText([(train, 0, second), (train, second, train.tokens)], 1.0)
    assert in_one.raw() == in_two.raw()
    computed = []
    bits = compressors.bits
    monkeypatch.setattr(compressors, "bits", lambda *request: computed.append(request[:2]) or bits(*request))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(
            lambda split: compute_baselines(text, None, split, None, tmp_path), (in_one, in_two)
        )
    assert one.rows == two.rows
    assert len(computed) == len(set(computed)) == 2 * len(STREAMS)


def test_slow_compressors_are_left_out_and_labels_name_the_part_that_was_given(folder, tmp_path):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 100)).position], [split], None)
    size = len(stage.raw())
    measured = compute_baselines(text, stage, of_splits([split], None), size, tmp_path)
    rates = {row.label: row for row in measured.rows}
    assert set(rates) == {"ppmd given part", "ppmd given stage", *INSTALLED}
    whole = of_splits([split], None)
    note = rates["ppmd given part"].note
    assert f"given all training text ({size / 1e6:.1f} of {len(whole.raw()) / 1e6:.1f} MB)" in note
    given = whole.raw(B)[:size]
    assert rates["ppmd given part"].columns[GIVEN].value == size - given.count(B) < size
    bits = ppmd_bits(given + B, *text.documents())
    assert rates["ppmd given part"].carried.value == bits / len(text)
    line = measured.left_out[-1]
    assert "xz given part" in line and "zlib given stage" in line and "ppmd given" not in line
    assert ("zpaq given part" in line) == ("zpaq" in INSTALLED)
    primed = compute_baselines(text, stage, of_splits([split], None), size, tmp_path, zpaq=True)
    found = {row.label for row in primed.rows}
    assert found - set(rates) == {f"zpaq given {name}" for name in ("part", "stage") if "zpaq" in INSTALLED}


def test_a_compressor_that_is_not_installed_is_left_out_with_the_reason(folder, tmp_path, monkeypatch):
    versions = {name: None if name == "zpaq" else "1" for name in COMPRESSORS}
    monkeypatch.setattr(compressors, "version", versions.get)
    text = Text.of(Shards(folder, "validation").read(0, 500), BYTES)
    measured = compute_baselines(text, None, None, None, tmp_path, zpaq=True)
    assert measured.left_out == ["zpaq: its package is not installed"]
    assert {row.label for row in measured.rows} == {*COMPRESSORS} - {"zpaq"}


def test_compressors_may_be_measured_without_training_text(folder, tmp_path):
    text = Text.of(Shards(folder, "validation").read(0, 500), BYTES)
    missing = LearnedFrom([(tmp_path / "missing.json", folder)])
    measured = text_baselines(text, missing, 0, tmp_path)
    assert {row.group for row in measured.rows} == {""} and measured.overlap_N is None
    assert "evaluation.training_bytes is 0, so compressors read no training text" in measured.left_out


def test_a_stage_text_that_is_nearly_all_training_text_is_not_given_as_well(folder, tmp_path):
    """The stage's text of a model with an n-gram index is nearly all training text."""
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    windows = split.tokens // 64
    for share, given in ((0.97, False), (0.8, True)):
        stage = of_stages([parsed(receipt(split, int(share * windows))).position], [split], None)
        for limit, both in ((10**6, given), (None, True)):
            measured = compute_baselines(text, stage, of_splits([split], None), limit, tmp_path)
            assert ("ppmd given stage" in {row.label for row in measured.rows}) == both
            lines = [line for line in measured.left_out if "of all training text, which is given" in line]
            assert len(lines) == (not both)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stream", "was trained on a stream"),
        ("position", "has no position"),
        ("shards", "cannot be read"),
        ("encoded again", "was encoded again since"),
    ],
)
def test_an_unreadable_training_text_is_reported(folder, tmp_path, change, message):
    plain = receipt(Shards(folder, "train"), 5)
    if change == "position":
        plain["position"] = None
    if change == "encoded again":
        plain["position"]["data"] = "other/train"
    path = tmp_path / "train.json"
    path.write_text(json.dumps(plain))
    where = {"stream": None, "shards": tmp_path}.get(change, folder)
    stage, split, reasons = training_texts(LearnedFrom([(path, where)]), None, None)
    assert stage is None and split is None and message in reasons[0]
