"""Packing learns every token except a document's first exactly once, with little padding."""

import os
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.data.encode import encode_part
from spider.data.loader import Loader
from spider.data.packing import PackedRows, cut_documents, pack, plan
from spider.data.shards import Shards, build_metadata
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset


def placed(lengths, seq_len):
    ends = np.cumsum(lengths)
    pieces = cut_documents(ends - lengths, int(ends[-1]), seq_len)
    return pieces, plan(pieces, seq_len)


@given(st.lists(st.integers(2, 90), min_size=1, max_size=80), st.integers(1, 40))
def test_every_token_but_the_first_of_a_document_is_a_target_once(lengths, seq_len):
    lengths = np.array(lengths)
    pieces, made = placed(lengths, seq_len)
    assert sorted(made.pieces.tolist()) == sorted(pieces.tolist())
    targets = np.zeros(lengths.sum(), int)
    for first, length in made.pieces.tolist():
        targets[first + 1 : first + length] += 1
    begins = np.cumsum(lengths) - lengths
    expected = np.ones(lengths.sum(), int)
    expected[begins] = 0
    assert targets.tolist() == expected.tolist()
    in_rows = np.add.reduceat(made.pieces["length"].astype(int), made.rows[:-1])
    assert in_rows.max() <= seq_len + 1 and made.rows[-1] == len(pieces)


def test_real_lengths_fill_the_rows_and_equal_pieces_share_them():
    draw = np.random.default_rng(0)
    lengths = np.maximum(3, np.exp(draw.normal(np.log(561), 1.1, 20_000))).astype(int)
    for seq_len in (256, 2048):
        pieces, made = placed(lengths, seq_len)
        assert pieces["length"].sum() / ((len(made.rows) - 1) * (seq_len + 1)) > 0.997
    _, made = placed(np.full(1000, 100), 1023)
    assert len(made.rows) - 1 == 100, "ten of a hundred ids go into a row of 1,024"
    neighbours = np.diff(made.pieces["first"].astype(int))
    assert not (neighbours == 100).mean() > 0.5, "chance parts what lay side by side"


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(2)
    words = ["".join(chr(97 + c) for c in draw.integers(0, 26, n)) for n in draw.integers(1, 70, 300)]
    everything = dataset(validation=0.0)
    for part, documents in (("000", words[:200]), ("001", words[200:])):
        pq.write_table(pa.table({"text": documents}), tmp_path / f"{part}.parquet")
        encode_part(tmp_path / f"{part}.parquet", tmp_path / "shards", part, everything)
    build_metadata(tmp_path / "shards", "words", everything, source={}, parts=["000", "001"])
    return tmp_path / "shards"


def packed_loader(folder, seq_len=32, rows=4, **given):
    shards = Shards(folder, "train")
    packed = PackedRows.open(folder, shards, seq_len)
    return Loader(shards, seq_len=seq_len, rows=rows, seed=3, packed=packed, **given)


def test_an_epoch_learns_each_token_of_the_text_once(folder):
    packing = pack(folder, 32)
    shards = Shards(folder, "train")
    loader = packed_loader(folder, rows=1)
    seen, slots = [], 0
    for _ in range(packing.rows):
        batch = next(loader)
        assert (batch.document_BT > 0).sum() + (batch.rows_BT1[:, -1] != BYTES.pad) >= 2
        seen += batch.rows_BT1[:, 1:][batch.learned_BT].tolist()
        slots += batch.learned_BT.size
    text = shards.read(0, shards.tokens)
    assert (
        np.bincount(seen, minlength=272).tolist()
        == np.bincount(text[text != BYTES.bos], minlength=272).tolist()
    )
    assert len(seen) == packing.targets and packing.targets / slots > 0.9


def test_packed_rows_in_the_order_of_the_text_begin_ever_later_in_it(folder):
    packing = pack(folder, 32)
    shards = Shards(folder, "train")
    packed = PackedRows.open(folder, shards, 32)
    loader = packed_loader(folder, rows=1, shuffled=False)
    rows = loader.packed_rows(np.arange(2 * packing.rows))
    firsts = packed.pieces["first"][packed.first[rows[: packing.rows]]]
    assert (np.diff(firsts.astype(np.int64)) > 0).all() and (
        rows[packing.rows :] == rows[: packing.rows]
    ).all()
    expected, _ = packed.rows(rows[:8], BYTES.pad)
    assert (np.concatenate([next(loader).rows_BT1 for _ in range(8)]) == expected).all()


@pytest.mark.parametrize("shuffled", [True, False])
def test_packed_rows_resume_anywhere_on_any_number_of_processes(folder, shuffled):
    pack(folder, 32)
    order = {"shuffled": shuffled}
    whole = [next(loader) for loader in [packed_loader(folder, **order)] for _ in range(6)]
    again = packed_loader(folder, position=whole[2].position, **order)
    for batch in whole[3:]:
        one = next(again)
        assert (one.rows_BT1 == batch.rows_BT1).all() and one.position == batch.position
    shares = [packed_loader(folder, rows=2, rank=rank, world=2, **order) for rank in (0, 1)]
    for batch in whole:
        rows = np.concatenate([next(share).rows_BT1 for share in shares])
        assert (rows == batch.rows_BT1).all()
    with pytest.raises(ValueError, match="has packing = None, this run has"):
        packed_loader(folder, position={k: v for k, v in whole[0].position.items() if k != "packing"})


@pytest.mark.parametrize(("renames", "room"), [(0, None), (1, None), (9, 5000)])
def test_an_unfinished_plan_cannot_be_opened_and_its_files_are_complete(folder, monkeypatch, renames, room):
    """The process dies before one of its renames, or the disk is full."""
    pack(folder, 32)
    whole = {path.name: path.read_bytes() for path in folder.glob("packed-*")}
    assert len(whole["packed-32.pieces"]) == 6024, "what a library keeps back to write at last does not fit"
    rename, left = os.replace, iter(range(renames))
    monkeypatch.setattr(
        os, "replace", lambda *paths: rename(*paths) if next(left, None) is not None else 1 / 0
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room or before[0], before[1]))
    try:
        with pytest.raises(OSError if room else ZeroDivisionError):
            pack(folder, 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.undo()
    found = {path.name: path.read_bytes() for path in folder.glob("packed-*")}
    assert "packed-32.json" not in found and found.items() <= whole.items()
    with pytest.raises(ValueError, match="is not packed"):
        PackedRows.open(folder, Shards(folder, "train"), 32)
    pack(folder, 32)
    assert {path.name: path.read_bytes() for path in folder.glob("packed-*")} == whole
