"""A mixture keeps its shares in every prefix, loses no source, and is one order for all processes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.data.loader import Loader, MixedLoader
from spider.data.mixture import Mixture, anew, positions_of, read_of_each
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards
from tests.unit.small_datasets import shards_of_ids

SETS = {
    "from 0.3 to 1e-8": [0.3, 0.2, *np.geomspace(0.1, 1e-8, 33)],
    "thirty of 3e-6": [0.3, 0.2, *[3e-6] * 30, 0.2, 0.1, 0.1],
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
    mixes=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-9, 1), min_size=1), min_size=1, max_size=9
    ),
    gaps=st.lists(st.integers(1, 200), min_size=9, max_size=9),
    first=st.integers(0, 500),
)
def test_a_switch_is_at_its_sample_and_each_source_goes_on_at_its_own_number(mixes, gaps, first):
    begins = [0, *np.cumsum(gaps).tolist()]
    (_, weights), *switches = mixes = list(zip(begins, mixes, strict=False))
    mixture = Mixture(weights, switches)
    sources, numbers = mixture.locate(np.arange(first, first + 700))
    before, after = mixture.counts(first), mixture.counts(first + 700)
    for source, name in enumerate(mixture.names):
        assert numbers[sources == source].tolist() == list(range(before[name], after[name]))
    every = np.array(mixture.names)[mixture.locate(np.arange(begins[len(mixes)]))[0]]
    for (begin, mix), end in zip(mixes, begins[1:], strict=False):
        alone = Mixture(mix)
        expected = np.array(alone.names)[alone.locate(np.arange(end - begin))[0]]
        assert every[begin:end].tolist() == expected.tolist()


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
#: At samples inside of a step: a source that ends, and one that begins.
SWITCHES = [(101, {"b": 0.5, "a": 0.5}), (250, {"c": 0.4, "b": 0.6})]


def mixed(folders, packed, weights=WEIGHTS, switches=(), **share) -> MixedLoader:
    sources = {}
    for name, folder in folders.items():
        shards = Shards(folder, "train")
        rows = PackedRows.open(folder, shards, 16) if packed else None
        sources[name] = Loader(shards, packed=rows, seq_len=16, seed=3, rows=share["rows"])
    return MixedLoader(sources, weights, switches, **share)


def source_of(rows_T1: np.ndarray) -> int:
    return int(rows_T1[rows_T1 < 256][0]) // 60


@pytest.mark.parametrize(("packed", "switches"), [(False, SWITCHES), (True, ())])
def test_three_one_two_and_four_processes_read_one_sequence(folders, packed, switches):
    whole = mixed(folders, packed, switches=switches, rows=12)
    expected = np.concatenate([next(whole).rows_BT1 for _ in range(40)])
    whole.close()
    read, position = [], None
    for world in (3, 1, 2, 4):
        ranks = [
            mixed(
                folders,
                packed,
                switches=switches,
                rows=12 // world,
                rank=rank,
                world=world,
                position=position,
            )
            for rank in range(world)
        ]
        for _ in range(10):
            batches = [next(rank) for rank in ranks]
            read += [batch.rows_BT1 for batch in batches]
            assert len({str(batch.position) for batch in batches}) == 1
        position = json.loads(json.dumps(batches[0].position))
        for rank in ranks:
            rank.close()
    assert np.array_equal(np.concatenate(read), expected)
    sources = np.array([source_of(row) for row in expected])
    assert dict(zip("abc", np.bincount(sources, minlength=3).tolist(), strict=True)) == read_of_each(position)
    begins, mixes = zip((0, WEIGHTS), *switches, strict=True)
    for begin, end, mix in zip(begins, [*begins[1:], 480], mixes, strict=True):
        counts = np.bincount(sources[begin:end], minlength=3)
        assert np.abs(counts - (end - begin) * np.array([mix.get(name, 0) for name in "abc"])).max() <= 2
        assert set(np.flatnonzero(counts)) == {"abc".index(name) for name in mix}


@pytest.mark.parametrize("packed", [False, True])
def test_each_source_is_read_in_its_own_order_and_goes_on_under_other_weights(folders, packed):
    position, read = None, []
    for weights in (WEIGHTS, {"a": 0.1, "b": 0.2, "c": 0.7}):
        position = position and anew(position)
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
