"""Recompute baselines from the shards: the windows read in training, and the rates of compressors."""

import json
import lzma
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyppmd
import pytest

from spider.checkpoints.records import Receipt
from spider.common.files import write_json
from spider.config import scored
from spider.config.run import EvaluationConfig
from spider.data.encode import encode_part
from spider.data.loader import Loader
from spider.data.shards import Shards, build_metadata
from spider.evaluation import baselines, overlap
from spider.evaluation.baselines import (
    COMPRESSORS,
    Given,
    absent_byte,
    boundary_bits,
    packed_bits,
    ppmd_bits,
    rates,
    same_tables,
    stage_baselines,
    text_baselines,
)
from spider.evaluation.bpb import bootstrap_interval
from spider.evaluation.overlap import MATCH_BYTES, find_overlap, overlap_of
from spider.evaluation.records import Baselines
from spider.evaluation.result import GIVEN, Result
from spider.evaluation.text import (
    LearnedFrom,
    Text,
    TrainingText,
    all_text,
    of_splits,
    of_stages,
    stage_text,
)
from spider.tokens import BYTES
from tests.unit import records
from tests.unit.small_datasets import dataset, encoded

INSTALLED = [name for name in COMPRESSORS if name != "zpaq" or baselines._has_zpaq()]
PACKING = INSTALLED[1:]
B = b"\xff"
LICENCE = "Redistribution and use in source and binary forms, with or without modification, are permitted. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size=n))) for n in rng.integers(2, 9, 300)]
    texts = [" ".join(words[i] for i in rng.integers(0, 300, 60)) for _ in range(300)]
    texts = [LICENCE + text if i % 4 == 0 else text for i, text in enumerate(texts)]
    return encoded(tmp_path_factory.mktemp("data") / "text", texts, validation=0.1)


def measured(
    text: Text,
    stage: TrainingText | None = None,
    split: TrainingText | None = None,
    limit: int | None = None,
    zpaq: bool = False,
) -> Result:
    """Return the rates of compressors that are given all text, a stage's and nothing."""
    given = [(split, "all", "all training text"), (stage, "stage", "what the model was trained on")]
    settings = EvaluationConfig(training_bytes=limit, zpaq=zpaq)
    sources = [*(one for one in given if one[0]), (None, "", "")]
    return rates(text, sources, settings, overlap_of(text, split))


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
    learned = LearnedFrom([(path, folder)])
    (stage, reasons), (whole, _) = stage_text(learned, None), all_text(learned, None)
    ids = split.read(0, split.tokens)
    assert stage.raw() == BYTES.raw(ids[windows_read(split, count)])
    assert whole.raw() == BYTES.raw(ids) and not reasons
    assert stage.share == pytest.approx(1.0, abs=0.02)


def test_the_ngram_split_counts_as_training_text_and_is_searched_for_overlap(folder, tmp_path):
    data, path = tmp_path / "data", tmp_path / "train.json"
    settings = dataset(validation=0.1, ngram=0.6)
    encode_part(folder.with_name("raw.parquet"), data, "000", settings)
    build_metadata(data, "words", settings, source={"kind": "local"}, parts=["000"])
    train, ngram = Shards(data, "train"), Shards(data, "ngram")
    write_json(path, receipt(train, 20))
    of_train, of_index = (split.read(0, split.tokens) for split in (train, ngram))
    windows = BYTES.raw(of_train[windows_read(train, 20)])

    learned = LearnedFrom([(path, data)])
    (stage, reasons), (whole, _) = stage_text(learned, None), all_text(learned, None)
    assert not reasons and stage.raw() == windows
    assert whole.raw() == BYTES.raw(of_index) + BYTES.raw(of_train) and whole.share == 1
    learned = LearnedFrom([(path, data)], [data])
    (stage, _), (same, _) = stage_text(learned, None), all_text(learned, None)
    assert stage.raw() == BYTES.raw(of_index) + windows and stage.share == pytest.approx(1, abs=0.02)
    assert same.raw() == whole.raw()

    limit = ngram.tokens + 10 * 64
    (stage, _), (part, _) = stage_text(learned, limit), all_text(learned, ngram.tokens // 2)
    assert stage.raw() == BYTES.raw(of_index) + BYTES.raw(of_train[windows_read(train, 10)])
    assert part.raw() == BYTES.raw(of_index[: ngram.tokens // 2])
    total = ngram.tokens + train.tokens
    assert part.share == pytest.approx(ngram.tokens / 2 / total, rel=0.01)
    stage, _ = stage_text(learned, 100)
    assert len(stage.raw()) <= 100 and stage.share < 0.1

    text = Text.of(of_index[:2000], BYTES)
    assert overlap_of(text, whole).covered(len(text)).mean() > 0.99
    assert overlap_of(text, of_splits([train], None)).covered(len(text)).mean() < 0.9
    _, reasons = all_text(LearnedFrom([(path, data)], [folder]), None)
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


def test_every_rate_is_that_of_the_compressor_itself(folder):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 50)).position], [split], None)
    whole = of_splits([split], None)
    found = measured(text, stage, whole)
    raw, size = text.bytes_N.tobytes(), len(text)
    rows = {row.label: row for row in found.rows}
    assert len(rows) == 3 * len(INSTALLED) and not [one for one in found.notes if "zpaq" not in one]
    documents = text.documents()
    free = boundary_bits(size, len(documents))
    apart, given_all = B.join(documents), whole.raw(B) + B
    for key, given in (("xz", b""), ("xz given stage", stage.raw(B) + B), ("xz given all", given_all)):
        cost = 8 * (len(lzma.compress(given + apart, preset=9)) - len(lzma.compress(given, preset=9)))
        assert rows[key].carried.value == pytest.approx((cost - free) / size) and rows[key].value is None
        assert not given or f"({len(given.replace(B, b'')) / 1e6:.1f} MB)" in rows[key].note
    best = rows["ppmd given all"]
    assert best.carried.value == from_scratch(given_all, *documents) / size
    alone = [from_scratch(given_all, document) for document in documents]
    assert best.value == pytest.approx(sum(alone) / size)
    assert best.interval == bootstrap_interval(np.array(alone), text.lengths())
    assert best.carried.interval[0] < best.carried.value < best.carried.interval[1]

    recorded = overlap_of(text, whole)
    overlap_N = np.concatenate([_overlap(document, whole.raw()) for document in documents])
    assert (recorded.covered(size) == overlap_N).all() and 0.02 < overlap_N.mean() < 0.5
    pieces = [
        [
            raw[a:b]
            for a, b in pairwise([begin, *(begin + 1 + np.flatnonzero(np.diff(overlap_N[begin:end]))), end])
        ]
        for begin, end in pairwise(text.bounds_D)
    ]
    by_piece = np.concatenate(ppmd_bits(given_all, [[raw], *pieces])[1:])
    starts = np.cumsum([0, *(len(piece) for one in pieces for piece in one)])[:-1]
    outside = by_piece[~overlap_N[starts]].sum() / (~overlap_N).sum()
    assert best.columns["outside overlap"].value == pytest.approx(outside)
    assert [*rows["xz given all"].columns] == [GIVEN]
    assert best.columns[GIVEN].value == len(whole.raw())

    bits_N = np.linspace(1, 2, size)
    subject = SimpleNamespace(overlap=recorded, bits_B=bits_N, text=text)
    row, share = overlap.measure(subject, None).rows
    assert row.value == pytest.approx(bits_N[~overlap_N].mean())
    assert share.value == overlap_N.mean() and share.tone == ("bad" if share.value > 0.5 else "")


def from_scratch(given: bytes, *documents: bytes) -> int:
    """Return the bits that PPMd adds for documents after another text, without those of their boundaries."""
    alone, both = (pyppmd.Ppmd7Encoder(24, 1 << 26) for _ in range(2))
    added = len(both.encode(given))
    for i, document in enumerate(documents):
        if i:
            both.encode(B)
        added += len(both.encode(document))
    return 8 * (added + len(both.flush()) - len(alone.encode(given) + alone.flush()))


def test_boundaries_of_short_documents_are_free():
    """Nothing tells where a document ends, and all begin alike: after a boundary, the beginning is free."""
    rng = np.random.default_rng(0)
    parts = [bytes(rng.choice(list(b"abcdefghijkl"), size=n).tolist()) for n in rng.integers(3, 9, 12)]
    ends = (b"".join(parts[i] for i in rng.integers(0, 12, rng.integers(1, 9))) for _ in range(60))
    documents = [b"please find below a word: " + end for end in ends]
    text = Text.of(np.concatenate([BYTES.encode(document) for document in documents]), BYTES)
    rows = {row.label: row for row in measured(text).rows}
    found, whole = ppmd_bits(
        b"", [[piece for one in documents for piece in (B, one)][1:], [text.bytes_N.tobytes()]]
    )
    together = {name: packed_bits(name, b"", text.bytes_N.tobytes()) for name in PACKING}
    for name, bits in ({"ppmd": sum(whole)} | together).items():
        assert rows[name].carried.value * len(text) < 0.95 * bits, name
    assert rows["ppmd"].carried.value == pytest.approx(sum(found[::2]) / len(text))
    # Bits of places are the most that a compressor needs, once it knows the byte.
    assert 0 < sum(found[1::2]) < 1.1 * boundary_bits(len(text), len(documents))
    assert boundary_bits(9, 4) == pytest.approx(math.log2(math.comb(8, 3)))


def test_pieces_of_ppmd_add_up_to_the_whole_and_copies_do_not_learn_from_each_other():
    noise = np.random.default_rng(0).bytes(400_000)
    pieces = [noise[i : i + 90_000] for i in range(0, len(noise), 90_000)]
    apart, whole, (first, again) = ppmd_bits(b"", [pieces, [noise], [noise, noise]])
    assert sum(apart) == sum(whole) >= 8 * len(noise) and len(apart) == len(pieces)
    assert again < 0.1 * first, "it has the memory that its order needs"
    with pytest.raises(RuntimeError, match="ppmd: the process of a copy ended without an answer"):
        ppmd_bits(b"", [["not bytes"]])


@pytest.mark.skipif("zpaq" not in INSTALLED, reason="zpaq is not installed")
def test_zpaq_is_primed_only_with_a_text_that_keeps_the_size_of_its_tables():
    zpaq = pytest.importorskip("zpaq")
    packed = zpaq.compress(LICENCE.encode(), method="511,128,1", threads=1)
    assert packed_bits("zpaq", b"", LICENCE.encode()) == 8 * len(packed)
    assert same_tables(0, 5 << 20) and same_tables(1000, 1000) and same_tables(27_000_000, 263_406)
    assert not same_tables((1 << 25) - 5000, 5000) and not same_tables(3 << 30, 1)


def test_a_change_of_the_settings_measures_again_and_scores_nothing():
    """Raise the version when you change a setting here, so that the compressors run again."""
    pinned = {4: ["7z PPMd, order 24", "xz -9", "zstd --ultra -22", "brotli -q 11", "zpaq -m511"]}
    assert pinned == {scored.COMPRESSORS: [*COMPRESSORS.values()]}
    settings = EvaluationConfig(zpaq=True, training_bytes=1000)
    assert not settings.scoring() and not settings.checkpoint_scoring() and not settings.sampling()


def test_documents_run_together_only_where_all_bytes_occur(folder):
    every = bytes(range(256))
    for held_out, free in ((every[:-1], b"\xff"), (every[:-2] + b"\xff", b"\xfe"), (every, b"")):
        stream = np.concatenate([BYTES.encode(held_out), BYTES.encode(b"x")])
        found = measured(Text.of(stream, BYTES))
        lines = [line for line in found.notes if "all 256 bytes occur" in line]
        assert len(lines) == (not free)
        xz = next(row for row in found.rows if row.label == "xz")
        end, size = (len(lzma.compress(one, preset=9)) for one in (b"", held_out + free + b"x"))
        cost = 8 * (size - end) - (boundary_bits(len(held_out) + 1, 2) if free else 0)
        assert xz.carried.value * (len(held_out) + 1) == pytest.approx(cost)
    assert absent_byte(b"\xff\xfe" + bytes(range(0xFC))) == b"\xfd" and absent_byte(every) == b""
    split = of_splits([Shards(folder, "train")], None)
    text = Text.of(BYTES.encode(b"\xff"), BYTES)  # the training text decides as well
    assert Given.of(split, "all", "", None, text.bytes_N.tobytes()).boundary == b"\xfe"


def _overlap(document: bytes, training: bytes) -> np.ndarray:
    held = np.zeros(len(document), bool)
    for i in range(len(document) - MATCH_BYTES + 1):
        if document[i : i + MATCH_BYTES] in training:
            held[i : i + MATCH_BYTES] = True
    return held


def test_slow_compressors_are_left_out_and_labels_name_the_part_that_was_given(folder):
    split, held_out = Shards(folder, "train"), Shards(folder, "validation")
    text = Text.of(held_out.read(0, held_out.tokens), BYTES)
    stage = of_stages([parsed(receipt(split, 100)).position], [split], None)
    size = len(stage.raw())
    found = measured(text, stage, of_splits([split], None), size)
    rows = {row.label: row for row in found.rows}
    assert set(rows) == {"ppmd given part", "ppmd given stage", *INSTALLED}
    whole = of_splits([split], None)
    note = rows["ppmd given part"].note
    assert f"given all training text ({size / 1e6:.1f} of {len(whole.raw()) / 1e6:.1f} MB)" in note
    given = whole.raw(B)[:size]
    assert rows["ppmd given part"].columns[GIVEN].value == size - given.count(B) < size
    assert rows["ppmd given part"].carried.value == from_scratch(given + B, *text.documents()) / len(text)
    line = found.notes[-1]
    assert "xz given part" in line and "brotli given stage" in line and "ppmd given" not in line
    assert ("zpaq given part" in line) == ("zpaq" in INSTALLED)
    primed = {row.label for row in measured(text, stage, of_splits([split], None), size, zpaq=True).rows}
    assert primed - set(rows) == {f"zpaq given {name}" for name in ("part", "stage") if "zpaq" in INSTALLED}


def test_a_compressor_that_is_not_installed_is_left_out_with_the_reason(folder, monkeypatch):
    monkeypatch.setattr(baselines, "_has_zpaq", lambda: False)
    found = measured(Text.of(Shards(folder, "validation").read(0, 500), BYTES), zpaq=True)
    assert found.notes == ["Left out: zpaq: its package is not installed."]
    assert {row.label for row in found.rows} == {*COMPRESSORS} - {"zpaq"}


def written(folder, receipt_path, tmp_path, limit: int | None) -> tuple[Baselines, Baselines]:
    """Return what the jobs of a text and of a stage write."""
    settings = EvaluationConfig(training_bytes=limit)
    given = SimpleNamespace(evaluation=settings), folder, LearnedFrom([(receipt_path, folder)])
    found = find_overlap(*given, tmp_path / "overlap.json")
    shared = text_baselines(*given, found, tmp_path / "shared.json")
    return shared, stage_baselines(*given, found, shared, tmp_path / "baselines.json")


def test_compressors_may_be_measured_without_training_text(folder, tmp_path):
    shared, of_stage = written(folder, tmp_path / "missing.json", tmp_path, 0)
    result = shared.results["baselines"]
    assert {row.group for row in result.rows} == {""} and of_stage.results == shared.results
    reason = "evaluation.training_bytes is 0, so compressors read no training text"
    assert f"Left out: {reason}." in result.notes
    assert Baselines.read(tmp_path / "baselines.json") == of_stage


def test_a_stage_text_that_is_nearly_all_training_text_is_not_given_as_well(folder, tmp_path):
    """The stage's text of a model with an n-gram index is nearly all training text."""
    split, path = Shards(folder, "train"), tmp_path / "train.json"
    windows = split.tokens // 64
    for share, limit, both in ((0.97, 10**6, False), (0.97, None, True), (0.8, 10**6, True)):
        write_json(path, receipt(split, int(share * windows)))
        shared, of_stage = (one.results["baselines"] for one in written(folder, path, tmp_path, limit))
        labels = {row.label for row in of_stage.rows}
        assert labels >= {row.label for row in shared.rows} >= {"ppmd", "ppmd given all"}
        assert ("ppmd given stage" in labels) == both
        lines = [line for line in of_stage.notes if "of all training text, which is given" in line]
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
    stage, reasons = stage_text(LearnedFrom([(path, where)]), None)
    assert stage is None and message in reasons[0]
