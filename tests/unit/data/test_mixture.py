"""A mixture keeps its shares in every prefix, loses no source, and is one order for all processes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.data.loader import Loader, MixedLoader
from spider.data.mixture import Mixture, positions_of, read_of_each
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards
from tests.unit.small_datasets import shards_of_ids

SETS = {
    "from 0.3 to 1e-8": [0.3, 0.2, *np.geomspace(0.1, 1e-8, 33)],
    "two large, equal rest": [0.3, 0.2, *[0.5 / 33] * 33],
    "thirty of 3e-6": [0.3, 0.2, *[3e-6] * 30, 0.2, 0.1, 0.1],
    "equal": [1] * 35,
    "random": np.random.default_rng(0).random(35).tolist(),
    "Fibonacci": [1 / 1.618**i for i in range(35)],
}


def named(weights) -> dict[str, float]:
    return {f"s{i:02}": weight for i, weight in enumerate(weights)}


@pytest.mark.parametrize("weights", SETS.values(), ids=SETS)
def test_every_prefix_of_a_million_samples_has_each_source_within_two_of_its_share(weights):
    mixture = Mixture(named(weights))
    sources, numbers = mixture.locate(np.arange(1_000_000))
    prefix = np.arange(1, 1_000_001)
    shares = np.array(weights) / np.sum(weights)
    for source, share in enumerate(shares):
        counts = np.cumsum(sources == source)
        assert np.abs(counts - share * prefix).max() <= 2
        assert np.array_equal(numbers[sources == source], np.arange(counts[-1]))
    far = mixture.counts(10**12)
    assert sum(far.values()) == 10**12
    assert np.abs(np.array(list(far.values())) - shares * 10**12).max() <= 2 and min(far.values()) > 1000


@given(
    weights=st.lists(st.floats(1e-9, 1), min_size=1, max_size=40),
    first=st.integers(0, 2**40),
    count=st.integers(1, 300),
)
def test_a_sample_is_found_anywhere_and_no_number_is_skipped_or_repeated(weights, first, count):
    mixture = Mixture(named(weights))
    sources, numbers = mixture.locate(np.arange(first, first + count))
    before, after = mixture.counts(first), mixture.counts(first + count)
    for source, name in enumerate(mixture.names):
        assert numbers[sources == source].tolist() == list(range(before[name], after[name]))
    backwards = Mixture(dict(reversed(named(weights).items())))
    assert backwards.locate(np.array([first]))[0] == sources[0]


# ------------------------------------------------------------------------------------------------- loader


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return three datasets of documents, packed into rows of 16. Ids of each lie in a range of its own."""
    root, draw = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    for number, (name, documents) in enumerate({"a": 60, "b": 25, "c": 7}.items()):
        ids = [
            np.array([257, *draw.integers(60 * number, 60 * number + 60, draw.integers(3, 40)), 258], "<u2")
            for _ in range(documents)
        ]
        begins = np.cumsum([0, *map(len, ids)])[:-1]
        shards_of_ids(root / name, [np.concatenate(ids)], [begins])
        pack(root / name, 16)
    return {name: root / name for name in "abc"}


WEIGHTS = {"a": 0.7, "b": 0.25, "c": 0.05}


def mixed(folders, packed, weights=WEIGHTS, **share) -> MixedLoader:
    sources = {}
    for name, folder in folders.items():
        shards = Shards(folder, "train")
        rows = PackedRows.open(folder, shards, 16) if packed else None
        sources[name] = Loader(shards, packed=rows, seq_len=16, seed=3, rows=share["rows"])
    return MixedLoader(sources, weights, **share)


def source_of(rows_T1: np.ndarray) -> int:
    return int(rows_T1[rows_T1 < 256][0]) // 60


@pytest.mark.parametrize("packed", [False, True])
def test_three_one_two_and_four_processes_read_one_sequence(folders, packed):
    whole = mixed(folders, packed, rows=12)
    expected = np.concatenate([next(whole).rows_BT1 for _ in range(40)])
    whole.close()
    read, position = [], None
    for world in (3, 1, 2, 4):
        ranks = [
            mixed(folders, packed, rows=12 // world, rank=rank, world=world, position=position)
            for rank in range(world)
        ]
        for _ in range(10):
            batches = [next(rank) for rank in ranks]
            read += [batch.rows_BT1 for batch in batches]
            assert len({str(batch.position) for batch in batches}) == 1
        position = batches[0].position
        for rank in ranks:
            rank.close()
    assert np.array_equal(np.concatenate(read), expected)
    counts = np.bincount([source_of(row) for row in expected], minlength=3)
    assert dict(zip("abc", counts.tolist(), strict=True)) == read_of_each(position)
    assert np.abs(counts - 480 * np.array([0.7, 0.25, 0.05])).max() <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_each_source_is_read_in_its_own_order_and_goes_on_under_other_weights(folders, packed):
    position, read = None, []
    for weights in (WEIGHTS, {"a": 0.1, "b": 0.2, "c": 0.7}):
        loader = mixed(folders, packed, weights, rows=10, position=position)
        for _ in range(20):
            batch = next(loader)
            read += list(batch.rows_BT1)
        position = batch.position
        loader.close()
    assert position["before"] == {"a": 140, "b": 50, "c": 10} and position["sample"] == 200
    assert read_of_each(position) == {"a": 160, "b": 90, "c": 150}
    for number, (name, folder) in enumerate(folders.items()):
        own = [row for row in read if source_of(row) == number]
        shards = Shards(folder, "train")
        rows = PackedRows.open(folder, shards, 16) if packed else None
        alone = Loader(shards, packed=rows, seq_len=16, seed=3, rows=1)
        assert np.array_equal(own, alone.read(np.arange(len(own))).rows_BT1)
        assert positions_of(position)[shards.digest]["sample"] == len(own)
        assert loader.epochs(position)[name] == len(own) / alone.windows


def test_thirty_five_sources_open_without_threads_of_their_own(tmp_path):
    folders = {f"s{i:02}": tmp_path / f"s{i:02}" for i in range(35)}
    for folder in folders.values():
        shards_of_ids(folder, [np.arange(100, dtype="<u2")])
    threads, began = threading.active_count(), time.process_time()
    loader = mixed(folders, packed=False, weights=named(SETS["from 0.3 to 1e-8"]), rows=8)
    assert time.process_time() - began < 1
    next(loader)
    assert threading.active_count() == threads + 1
    loader.close()


def test_a_source_smaller_than_a_window_is_named(tmp_path, folders):
    shards_of_ids(tmp_path / "c", [np.arange(10, dtype="<u2")])
    with pytest.raises(ValueError, match=r"/c \(train\): 10 tokens are less than one window"):
        mixed({**folders, "c": tmp_path / "c"}, packed=False, rows=2)


def test_a_position_of_another_dataset_is_refused(folders):
    loader = mixed(folders, packed=True, rows=2)
    position = next(loader).position
    loader.close()
    position["data"]["b"] = "other"
    with pytest.raises(ValueError, match="the position to resume has data"):
        mixed(folders, packed=True, rows=2, position=position)
