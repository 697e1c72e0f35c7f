"""A flipped bit of a shard stops whoever reads it, with the shard and the block."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from spider.common.errors import DamagedShard
from spider.data.encode import writing
from spider.data.loader import Loader, MixedLoader
from spider.data.ngram.store import count_part
from spider.data.packing import PackedRows, pack
from spider.data.shards import BLOCK_BYTES as BLOCK_BYTES
from spider.data.shards import BLOCKS_KEY, BlockWriter, Shards, _tell, build_metadata, verify
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG
from tests.unit.small_datasets import dataset, flip, forget, shards_of_ids

SIZE = BLOCK_BYTES
IN_A_BLOCK = SIZE // 2
#: Tokens of the two shards: three blocks and a bit, and one block and a bit.
LENGTHS = (3 * IN_A_BLOCK + 1000, IN_A_BLOCK + 2)
DOCUMENT = 100


@pytest.fixture
def folder(tmp_path) -> Path:
    """Documents of letters in two shards, the second without a document that begins in it."""
    ids = np.random.default_rng(0).integers(97, 123, sum(LENGTHS)).astype("<u2")
    begins = np.arange(0, LENGTHS[0], DOCUMENT)
    ids[begins] = BYTES.bos
    shards_of_ids(tmp_path / "text", np.split(ids, LENGTHS[:1]), [begins, np.zeros(0, np.int64)])
    return tmp_path / "text"


def named(shard: str, block: int) -> str:
    return rf"{shard}, block {block} of 65536 bytes: differs from what was encoded, .*; delete .*encodes the"


@pytest.mark.parametrize("pieces", [[], [SIZE, SIZE], [SIZE - 1, 2], [10, 3 * SIZE, 5, SIZE]])
def test_digests_do_not_depend_on_how_a_file_is_written(tmp_path, pieces):
    content = np.random.default_rng(1).bytes(sum(pieces))
    with open(tmp_path / "a.bin", "wb") as file:
        writer = BlockWriter(file)
        for piece in np.split(np.frombuffer(content, np.uint8), np.cumsum(pieces)):
            writer.write(piece)
    assert (tmp_path / "a.bin").read_bytes() == content
    blocks = [content[at : at + SIZE] for at in range(0, len(content), SIZE)]
    assert writer.digests == [xxh3_64_hexdigest(block) for block in blocks]


def reads(folder: Path, how: str) -> object:
    """Read all of the training split in one way."""
    view = Shards(folder, "train")
    order = {"seq_len": 256, "seed": 0, "rows": 64}
    if how == "read":
        return view.read(0, view.tokens)
    if how == "gather":
        return view.gather(np.array([view.tokens - 1]), view.tokens)
    if how == "windows":
        return Loader(view, **order).read(np.arange(view.tokens // 256 + 1))
    if how == "in the order of the text":
        return Loader(view, shuffled=False, **order).read(np.arange(view.tokens // 256 + 1))
    if how == "mixture":
        sources = {name: Loader(view, **order) for name in "ab"}
        return MixedLoader(sources, {"a": 0.5, "b": 0.5}, rows=64).read(np.arange(view.tokens // 100))
    if how == "packed":
        pack(folder, 256)
        packed = PackedRows.open(folder, view, 256)
        return Loader(view, packed=packed, **order).read(np.arange(packed.count))
    raise AssertionError(how)


HOW = ["read", "gather", "windows", "in the order of the text", "mixture", "packed"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("byte", "block"), [(SIZE, 1), (3 * SIZE + 1998, 3)])
def test_a_flipped_bit_stops_every_reader(folder, how, byte, block):
    reads(folder, how)
    flip(folder / "train/000.bin", byte)
    with pytest.raises(DamagedShard, match=named(r"train/000\.bin", block)):
        reads(folder, how)
    for record in folder.glob("train/*.json"):
        forget(record)
    reads(folder, how)  # as before there were digests


def test_only_the_blocks_that_are_read_are_compared_and_each_once(folder):
    flip(folder / "train/000.bin", 2 * SIZE)
    view = Shards(folder, "train")
    damaged = range(2 * IN_A_BLOCK, 3 * IN_A_BLOCK)
    view.read(0, damaged.start)
    view.read(damaged.stop, 100)
    for start, count in (
        (damaged.start - 1, 2),
        (damaged.start, 1),
        (damaged.stop - 1, 1),
        (damaged.stop - 1, 2),
    ):
        for read in (view.read, lambda start, count: view.gather(np.array([start]), count)):
            with pytest.raises(DamagedShard, match=named(r"train/000\.bin", 2)):
                read(start, count)
    flip(folder / "train/000.bin", 2 * SIZE)
    before = view.read(damaged.start, 1)
    flip(folder / "train/000.bin", 2 * SIZE)  # in a block that was compared
    assert view.read(damaged.start, 1) != before


def test_counts_for_an_ngram_index_do_not_count_damage(tmp_path):
    ids = np.array([BYTES.bos, *b"one two", BYTES.eos], "<u2")
    settings = dataset(ngram=0.5)
    with writing(tmp_path, "000", settings, BYTES) as made:
        made.writers["train"].write(ids, np.array([0]))
        made.writers["ngram"].write(ids, np.array([0]))
    described = build_metadata(tmp_path, "ids", settings, source={}, parts=["000"])
    count_part(tmp_path, described, "000", CONFIG, tmp_path / "a")
    flip(tmp_path / "ngram/000.bin", 4)
    with pytest.raises(DamagedShard, match=named(r"ngram/000\.bin", 0)):
        count_part(tmp_path, described, "000", CONFIG, tmp_path / "b")


def test_a_flipped_bit_of_the_index_of_documents_stops_who_reads_it(folder):
    flip(folder / "train/000.idx", 8 * (LENGTHS[0] // DOCUMENT) + 1)
    with pytest.raises(DamagedShard, match=named(r"train/000\.idx", 0)):
        pack(folder, 256)
    with pytest.raises(DamagedShard, match=named(r"train/000\.idx", 0)):
        Shards(folder, "train").document(1000)


def test_damage_before_the_index_job_is_not_described_as_the_text(folder):
    flip(folder / "train/000.bin", SIZE)
    with pytest.raises(DamagedShard, match=named(r"train/000\.bin", 1)):
        build_metadata(folder, "ids", dataset(), source={}, parts=["000", "001"], threads=2)


@pytest.mark.parametrize(
    "change", [Path.unlink, forget, lambda record: record.write_text("[")], ids=["none", "earlier", "torn"]
)
def test_shards_without_digests_are_read_and_the_log_says_so_once(folder, change, caplog):
    for record in folder.glob("train/*.json"):
        change(record)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            view = Shards(folder, "train")
            assert len(view.read(0, view.tokens)) == sum(LENGTHS)
            assert view.document(DOCUMENT + 1)[1] == DOCUMENT
    (said,) = caplog.messages
    assert said == f"{folder / 'train'}: no digests of the blocks of its shards, so damage is not noticed"
    _tell.cache_clear()


def test_digests_of_other_files_are_not_used(folder, caplog):
    """A tool replaced both files and the description, and left the record of the part."""
    record = folder / "train/000.json"
    plain = json.loads(record.read_text())[BLOCKS_KEY]
    forget(record, bin=plain["bin"][:-1] + "x", idx="0" * len(plain["idx"]))
    view = Shards(folder, "train")
    view.read(0, LENGTHS[0])
    view.read(0, LENGTHS[0])
    assert view.document(DOCUMENT + 1)[1] == DOCUMENT
    whole, index = caplog.messages
    assert "train/000.bin: intact, but its record has other digests; they are not used" in whole
    assert "train/000.idx: intact" in index
    verify(folder)
