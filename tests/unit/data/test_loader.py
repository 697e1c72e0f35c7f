"""The loader's order is a bijection, the same for any number of ranks, and resumes anywhere."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spider.data.loader import ROUNDS, Loader, permute
from spider.data.shards import Shards
from tests.unit.small_datasets import forget, shards_of_ids


def shards_of(folder: Path, lengths: list[int]) -> tuple[Shards, np.ndarray]:
    """Write shards of random tokens of the given lengths; return them with their concatenation."""
    ids = np.random.default_rng(0).integers(0, 259, sum(lengths)).astype("<u2")
    return shards_of_ids(folder, np.split(ids, np.cumsum(lengths)[:-1])), ids


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Shards, np.ndarray]:
    return shards_of(tmp_path_factory.mktemp("shards"), [100, 0, 3, 1, 450, 7])


def keys(seed: int) -> list[np.uint64]:
    return list(np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64))


def take(loader: Loader, steps: int) -> np.ndarray:
    rows = np.concatenate([next(loader).rows_BT1 for _ in range(steps)])
    loader.close()
    return rows


def test_permutation_shuffles():
    """Neighbours are sent far apart, and evenly over the domain."""
    image = permute(np.arange(100_000), 100_000, keys(1))
    steps = np.abs(np.diff(image))
    assert 0.32 < steps.mean() / 100_000 < 0.35  # a uniform shuffle has a mean of one third
    assert np.histogram(image[:10_000], 10, (0, 100_000))[0].std() < 5 * 30
    assert abs(np.corrcoef(np.arange(100_000), image)[0, 1]) < 0.02


def test_the_order_never_changes(data):
    """A new order would break the exact resume of checkpoints made before."""
    loader = Loader(data[0], seq_len=16, rows=1, seed=7)
    assert loader.starts(np.arange(8)).tolist() == [543, 46, 127, 143, 239, 111, 351, 383]


@pytest.mark.parametrize("seq_len", [1, 4, 16, 100, 560])
def test_every_epoch_covers_every_token(data, seq_len):
    shards, ids = data
    loader = Loader(shards, seq_len=seq_len, rows=1, seed=3)
    for epoch in range(3):
        starts = loader.starts(np.arange(epoch * loader.windows, (epoch + 1) * loader.windows))
        seen = np.bincount(
            (starts[:, None] + np.arange(1, seq_len + 1)).ravel() % len(ids), minlength=len(ids)
        )
        assert seen.min() == 1, "every token is a target"
        assert (seen - 1).sum() == loader.windows * seq_len - len(ids) < seq_len, (
            "only the last window overlaps"
        )


@settings(max_examples=25)
@given(seq_len=st.integers(1, 200), rows=st.integers(1, 40), seed=st.integers(0, 5), steps=st.integers(1, 4))
def test_rows_are_the_windows_of_the_concatenation(data, seq_len, rows, seed, steps):
    """Windows cross shard borders, empty shards, the ring's end and the end of the epoch."""
    shards, ids = data
    loader = Loader(shards, seq_len=seq_len, rows=rows, seed=seed)
    ring = np.concatenate([ids, ids])
    starts = loader.starts(np.arange(rows * steps))
    assert np.array_equal(take(loader, steps), [ring[s : s + seq_len + 1] for s in starts])


@pytest.mark.parametrize("seq_len", [1, 16, 100, 560])
def test_the_order_of_the_text_is_one_walk_around_the_ring(data, seq_len):
    shards, ids = data
    rows = take(Loader(shards, seq_len=seq_len, rows=3, seed=3, shuffled=False), 30)
    targets = rows[:, 1:].ravel()
    assert np.array_equal(targets, np.resize(np.roll(ids, -1), len(targets)))
    assert np.array_equal(rows[:, 0], np.resize(ids, len(targets) + 1)[:-1:seq_len])


@settings(max_examples=25)
@given(
    before=st.integers(0, 30),
    after=st.integers(1, 10),
    world=st.sampled_from([1, 2, 3, 4]),
    shuffled=st.booleans(),
)
def test_resume_equals_never_stopping_on_any_number_of_ranks(data, before, after, world, shuffled):
    order = {"seq_len": 16, "seed": 1, "shuffled": shuffled}
    whole = take(Loader(data[0], rows=12, **order), before + after)
    first = Loader(data[0], rows=12, **order)
    position = None
    for _ in range(before):
        position = next(first).position
    first.close()
    ranks = [
        take(Loader(data[0], rows=12 // world, rank=r, world=world, position=position, **order), after)
        for r in range(world)
    ]
    shares = [np.split(rows, after) for rows in ranks]
    rest = np.concatenate([share[s] for s in range(after) for share in shares])
    assert np.array_equal(whole[12 * before :], rest)


@pytest.mark.parametrize(("field", "value"), [("seed", 5), ("seq_len", 8), ("data", "other")])
def test_a_position_of_another_order_is_an_error_with_the_field(data, field, value):
    position = next(Loader(data[0], seq_len=16, rows=1, seed=1)).position
    with pytest.raises(ValueError, match=f"has {field} = {value!r}"):
        Loader(data[0], seq_len=16, rows=1, seed=1, position={**position, field: value})


def test_a_token_outside_the_vocabulary_is_an_error_with_its_position(tmp_path):
    shards_of(tmp_path, [50, 50])
    forget(tmp_path / "train/001.json")
    with open(tmp_path / "train/001.bin", "r+b") as file:
        file.seek(2 * 17)
        file.write(b"\xff\xff")
    loader = Loader(Shards(tmp_path, "train"), seq_len=10, rows=10, seed=0)
    with pytest.raises(ValueError, match=r"001\.bin, token 17: 65535 is not one of the 272 token ids"):
        next(loader)


def test_a_forgotten_loader_leaves_no_thread(data):
    before = set(threading.enumerate())
    loader = Loader(data[0], seq_len=16, rows=1, seed=0)
    next(loader)
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name.startswith("loader"))
    del loader
    gc.collect()
    deadline = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
