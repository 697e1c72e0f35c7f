"""Recompute baselines from the shards: the windows read in training, and the rates of compressors."""

import lzma
import math
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pyppmd
import pytest

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
from spider.evaluation.overlap import find_overlap, overlap_of
from spider.evaluation.records import Baselines
from spider.evaluation.result import GIVEN, Row
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

INSTALLED = [name for name in COMPRESSORS if name != "zpaq" or find_spec("zpaq")]
B = b"\xff"
LICENCE = "Redistribution and use in source and binary forms, with or without modification, are permitted. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size=n))) for n in rng.integers(2, 9, 300)]
    texts = [" ".join(words[i] for i in rng.integers(0, 300, 40)) for _ in range(120)]
    texts = [LICENCE + text if i % 4 == 0 else text for i, text in enumerate(texts)]
    return encoded(tmp_path_factory.mktemp("data") / "text", texts, validation=0.1)


@pytest.fixture(scope="module")
def held_out(folder):
    split = Shards(folder, "validation")
    return Text.of(split.read(0, split.tokens), BYTES)


@pytest.fixture
def only_labels(monkeypatch):
    """Let all compressors answer at once, for tests of what is measured."""
    monkeypatch.setattr(baselines, "packed_bits", lambda *_: 8.0)
    monkeypatch.setattr(
        baselines, "ppmd_bits", lambda _, texts: [[8.0 * len(one) for one in all_of] for all_of in texts]
    )


def measured(
    text: Text,
    stage: TrainingText | None = None,
    split: TrainingText | None = None,
    limit: int | None = None,
    zpaq: bool = False,
) -> dict[str, Row]:
    """Return the rates of compressors that are given all text, a stage's and nothing, and the notes as ""."""
    given = [
        (split, "given all", "all training text"),
        (stage, "given stage", "what the model was trained on"),
    ]
    settings = EvaluationConfig(training_bytes=limit, zpaq=zpaq)
    sources = [*(one for one in given if one[0]), (None, "", "")]
    found = rates(text, sources, settings, overlap_of(text, split))
    return {row.label: row for row in found.rows} | {"": found.notes}


def receipt(split: Shards, sample: int, *, seq_len: int = 64, seed: int = 5):
    position = {"sample": sample, "data": split.digest, "seq_len": seq_len, "seed": seed}
    return records.receipt(stage="main", position=position)


def text_of_windows(split: Shards, *counts: int) -> TrainingText:
    """Return the text of stages that read so many windows, the second one in another order."""
    saved = [receipt(split, n, seed=5 + number) for number, n in enumerate(counts)]
    return of_stages([one["position"] for one in saved], [split] * len(counts), None)


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
    (stage, _), (whole, _) = stage_text(learned, None), all_text(learned, None)
    assert stage.raw() == windows
    assert whole.raw() == BYTES.raw(of_index) + BYTES.raw(of_train) and whole.share == 1
    learned = LearnedFrom([(path, data)], [data])
    (stage, _), (part, _) = stage_text(learned, None), all_text(learned, ngram.tokens // 2)
    assert stage.raw() == BYTES.raw(of_index) + windows and stage.share == pytest.approx(1, abs=0.02)
    assert part.raw() == BYTES.raw(of_index[: ngram.tokens // 2])
    assert part.share == pytest.approx(ngram.tokens / 2 / (ngram.tokens + train.tokens), rel=0.01)
    (stage, _) = stage_text(learned, ngram.tokens + 10 * 64)
    assert stage.raw() == BYTES.raw(of_index) + BYTES.raw(of_train[windows_read(train, 10)])

    text = Text.of(of_index[:2000], BYTES)
    assert overlap_of(text, whole).covered(len(text)).mean() > 0.99
    assert overlap_of(text, of_splits([train], None)).covered(len(text)).mean() < 0.9
    _, reasons = all_text(LearnedFrom([(path, data)], [folder]), None)
    assert "the text of the n-gram index cannot be read" in reasons[0] and "no split 'ngram'" in reasons[0]


def test_stages_of_one_order_are_read_once_and_another_order_is_added(folder):
    split = Shards(folder, "train")
    positions = [receipt(split, n, seed=s)["position"] for n, s in ((10, 5), (30, 5), (4, 7))]
    both = windows_read(split, 30) | windows_read(split, 4, seed=7)
    text = of_stages(positions, [split] * 3, None)
    assert set(text.raw()) == set(BYTES.raw(split.read(0, split.tokens)[both]))
    limited = of_stages(positions, [split] * 3, 10 * 64)
    assert 600 <= limited.size <= 660 and limited.share == pytest.approx(10 / 34, abs=0.02)


def test_every_rate_is_that_of_the_compressor_itself(folder, held_out):
    whole, size = of_splits([Shards(folder, "train")], None), len(held_out)
    rows = measured(held_out, None, whole)
    assert not [one for one in rows.pop("") if "zpaq" not in one] and len(rows) == 2 * len(INSTALLED)
    documents = held_out.documents()
    free, apart, given_all = boundary_bits(size, len(documents)), B.join(documents), whole.raw(B) + B
    for key, given in (("xz", b""), ("xz given all", given_all)):
        cost = 8 * (len(lzma.compress(given + apart, preset=9)) - len(lzma.compress(given, preset=9)))
        assert rows[key].carried.value == pytest.approx((cost - free) / size) and rows[key].value is None
        assert not given or f"({len(given.replace(B, b'')) / 1e6:.1f} MB)" in rows[key].note
    best = rows["ppmd given all"]
    assert best.carried.value == from_scratch(given_all, *documents) / size
    alone = [from_scratch(given_all, document) for document in documents]
    assert best.value == pytest.approx(sum(alone) / size)
    assert best.interval == bootstrap_interval(np.array(alone), held_out.lengths())
    assert best.carried.interval[0] < best.carried.value < best.carried.interval[1]

    assert [*rows["xz given all"].columns] == [GIVEN] and best.columns[GIVEN].value == len(whole.raw())
    recorded, bits_N = overlap_of(held_out, whole), np.linspace(1, 2, size)
    outside_N = ~recorded.covered(size)
    row, share = overlap.measure(SimpleNamespace(overlap=recorded, bits_B=bits_N, text=held_out), None).rows
    assert row.value == pytest.approx(bits_N[outside_N].mean())
    assert share.value == pytest.approx(1 - outside_N.mean()) and share.tone == (
        "bad" if share.value > 0.5 else ""
    )
    outside = best.columns["outside overlap"].value
    assert outside > best.value, "copies of the training text are cheaper"


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
    raw, size = text.bytes_N.tobytes(), len(text)
    found, whole = ppmd_bits(b"", [[piece for one in documents for piece in (B, one)][1:], [raw]])
    for name in [name for name in INSTALLED if name not in ("ppmd", "zpaq")]:
        bits = packed_bits(name, b"", B.join(documents)) - boundary_bits(size, len(documents))
        assert bits < 0.95 * packed_bits(name, b"", raw), name
    assert sum(found[::2]) < 0.95 * sum(whole)
    # Bits of places are the most that a compressor needs, once it knows the byte.
    assert 0 < sum(found[1::2]) < 1.1 * boundary_bits(size, len(documents))
    assert boundary_bits(9, 4) == pytest.approx(math.log2(math.comb(8, 3)))


def test_pieces_of_ppmd_add_up_to_the_whole_and_copies_do_not_learn_from_each_other():
    noise = np.random.default_rng(0).bytes(100_000)
    pieces = [noise[i : i + 22_000] for i in range(0, len(noise), 22_000)]
    apart, whole, (first, again) = ppmd_bits(b"", [pieces, [noise], [noise, noise]])
    assert sum(apart) == sum(whole) >= 8 * len(noise) and len(apart) == len(pieces)
    assert again < 0.1 * first, "it has the memory that its order needs"
    with pytest.raises(RuntimeError, match="ppmd: the process of a copy ended without an answer"):
        ppmd_bits(b"", [["not bytes"]])


def test_zpaq_is_primed_only_with_a_text_that_keeps_the_size_of_its_tables():
    assert same_tables(0, 5 << 20) and same_tables(1000, 1000) and same_tables(27_000_000, 263_406)
    assert not same_tables((1 << 25) - 5000, 5000) and not same_tables(3 << 30, 1)


def test_a_change_of_the_settings_measures_again_and_scores_nothing():
    """Raise the version when you change a setting here, so that the compressors run again."""
    pinned = {4: ["7z PPMd, order 24", "xz -9", "zstd --ultra -22", "brotli -q 11", "zpaq -m511"]}
    assert pinned == {scored.COMPRESSORS: [*COMPRESSORS.values()]}
    settings = EvaluationConfig(zpaq=True, training_bytes=1000)
    assert not settings.scoring() and not settings.sampling()


def test_documents_run_together_only_where_all_bytes_occur(folder, only_labels):
    every = bytes(range(256))
    for text, boundary in ((every[:-1], b"\xff"), (every[:-2] + b"\xff", b"\xfe"), (every, b"")):
        stream = np.concatenate([BYTES.encode(text), BYTES.encode(b"x")])
        notes = measured(Text.of(stream, BYTES))[""]
        assert len([line for line in notes if "all 256 bytes occur" in line]) == (not boundary)
        assert absent_byte(text) == boundary
    split = of_splits([Shards(folder, "train")], None)  # the training text decides as well
    assert Given.of(split, "given all", "", None, b"\xff").boundary == b"\xfe"


def test_slow_compressors_are_left_out_and_labels_name_the_part_that_was_given(folder, held_out, only_labels):
    split = Shards(folder, "train")
    stage, whole = text_of_windows(split, 40), of_splits([split], None)
    size = len(stage.raw())
    rows = measured(held_out, stage, whole, size)
    line = rows.pop("")[-1]
    assert set(rows) == {"ppmd given part", "ppmd given stage", *INSTALLED}
    part = rows["ppmd given part"]
    assert f"given all training text ({size / 1e6:.1f} of {len(whole.raw()) / 1e6:.1f} MB)" in part.note
    given = whole.raw(B)[:size]
    assert part.columns[GIVEN].value == size - given.count(B) < size
    assert "xz given part" in line and "brotli given stage" in line and "ppmd given" not in line
    assert ("zpaq given part" in line) == ("zpaq" in INSTALLED)
    primed = measured(held_out, stage, whole, size, zpaq=True)
    assert {*primed, ""} - {*rows, ""} == {
        f"zpaq given {n}" for n in ("part", "stage") if "zpaq" in INSTALLED
    }


def written(folder, receipt_path, tmp_path, limit: int | None) -> tuple[Baselines, Baselines]:
    """Return what the jobs of a text and of a stage write."""
    settings = EvaluationConfig(training_bytes=limit)
    given = SimpleNamespace(evaluation=settings), folder, LearnedFrom([(receipt_path, folder)])
    found = find_overlap(*given, tmp_path / "overlap.json")
    shared = text_baselines(*given, found, tmp_path / "shared.json")
    return shared, stage_baselines(*given, found, shared, tmp_path / "baselines.json")


def test_compressors_may_be_measured_without_training_text(folder, tmp_path, only_labels):
    shared, of_stage = written(folder, tmp_path / "missing.json", tmp_path, 0)
    result = shared.results["baselines"]
    assert {row.group for row in result.rows} == {""} and of_stage.results == shared.results
    reason = "evaluation.training_bytes is 0, so compressors read no training text"
    assert f"Left out: {reason}." in result.notes
    assert Baselines.read(tmp_path / "baselines.json") == of_stage


def test_a_stage_text_that_is_nearly_all_training_text_is_not_given_as_well(folder, tmp_path, only_labels):
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
    write_json(path, plain)
    where = {"stream": None, "shards": tmp_path}.get(change, folder)
    stage, reasons = stage_text(LearnedFrom([(path, where)]), None)
    assert stage is None and message in reasons[0]
