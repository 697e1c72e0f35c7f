"""The inverted order equals an enumeration of all samples, and its digests those that a trainer logs."""

from __future__ import annotations

import types

import numpy as np
import pytest
from spider_trust.order import Source, StageOrder, logged, stage_order, unpermute

from spider.checkpoints.metrics import read_rows
from spider.checkpoints.records import Receipt
from spider.data.loader import Loader, MixedLoader, epoch_keys, permute
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards
from spider.training.stage import train
from tests.unit.processes.test_parallel import job, run_together
from tests.unit.small_datasets import shards_of_ids
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.test_mixed_stages import SWITCHED, folders, mix_spec  # noqa: F401 (fixtures)

SEQ, WINDOWS = 16, 5


def split_of(folder, seed, lengths=(100, 0, 3, 1, 450, 7)) -> Shards:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 259, length).astype("<u2") for length in lengths]
    begins = [np.unique(np.append(0, rng.integers(0, n or 1, n // 12)))[: n or 0] for n in lengths]
    return shards_of_ids(folder, ids, begins)


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> dict[str, Shards]:
    root = tmp_path_factory.mktemp("data")
    made = {"a": split_of(root / "a", 1), "b": split_of(root / "b", 2, (211, 90))}
    made["c"] = split_of(root / "c", 3, (SEQ + 1,))
    for name in made:
        pack(root / name, SEQ)
    return made


def source(name, split, packed=False, shuffled=True) -> Source:
    rows = PackedRows.open(split.files[0].parents[1], split, SEQ) if packed else None
    loader = Loader(split, seq_len=SEQ, rows=1, seed=7, packed=rows, shuffled=shuffled)
    return Source(name, split, loader, rows, SEQ)


def finished(position, sources, steps, before=0) -> StageOrder:
    """The order of a stage of so many steps that ended at a position."""
    receipt = {"run": "r", "stage": "s", "position": position, "steps": steps, "global_step": before + steps}
    return StageOrder(types.SimpleNamespace(**receipt), WINDOWS, sources)  # type: ignore[arg-type]


def enumerated(stage: StageOrder, split: Shards) -> list[list[tuple[int, int]]]:
    """Every row of every step that reads each token, found by reading all steps."""
    found = [[] for _ in range(split.tokens)]
    for step in range(1, stage.receipt.steps + 1):
        ids, rows = stage.batch(step)
        for number, row in enumerate(rows):
            text = np.concatenate([row.shards.read(a, b - a) for a, b in row.spans])
            assert np.array_equal(text, ids[number][: len(text)])
            for a, b in row.spans if row.shards is split else []:
                for token in range(a, b):
                    found[token].append((step, number))
    return found


def check(stage: StageOrder, split: Shards, queries=70) -> None:
    truth = enumerated(stage, split)
    rng = np.random.default_rng(5)
    for _ in range(queries):
        begin = int(rng.integers(0, split.tokens))
        end = int(rng.integers(begin + 1, min(split.tokens, begin + rng.choice([2, 9, 600])) + 1))
        expected = sorted({read for token in range(begin, end) for read in truth[token]})
        reads = list(stage.reads(split.digest, begin, end))
        assert sorted((read.step, read.row) for read in reads) == expected
        assert all(read.global_step == stage.global_step(read.step) for read in reads)


@pytest.mark.parametrize(
    ("name", "packed", "shuffled", "start"),
    [
        ("b", False, True, 13),
        ("a", True, True, 13),
        ("b", True, False, 0),
        ("c", False, True, 13),
    ],
)
def test_the_inverse_equals_an_enumeration_over_several_epochs(splits, name, packed, shuffled, start):
    """A stage may begin at a sample inside of an epoch, where the stage before ended."""
    split = splits[name]
    one = source(name, split, packed, shuffled)
    stage = finished({"data": split.digest, "sample": start + 24 * WINDOWS}, [one], 24, before=11)
    check(stage, split)
    how = {"seq_len": SEQ, "seed": 7, "packed": one.rows, "shuffled": shuffled}
    real = Loader(split, rows=WINDOWS, position={**one.loader.order, "sample": start}, **how)
    for step in range(1, 25):
        assert np.array_equal(next(real).rows_BT1, stage.batch(step)[0])
    real.close()


@pytest.mark.parametrize("packed", [True, False])
def test_the_inverse_of_a_mixture_equals_an_enumeration(splits, packed):
    weights, switches = {"a": 0.7, "b": 0.3}, [(37, {"b": 0.5, "c": 0.5}), (90, {"a": 1.0})]
    sources = [source(name, splits[name], packed) for name in "abc"]
    loaders = {one.dataset: one.loader for one in sources}
    real = MixedLoader(loaders, weights, switches, rows=WINDOWS)
    batches = [next(real) for _ in range(40)]
    real.close()
    stage = finished(batches[-1].position, sources, 40)
    for step, batch in enumerate(batches, start=1):
        assert np.array_equal(batch.rows_BT1, stage.batch(step)[0])
    later = finished(batches[-1].position, sources, 20, before=3)  # it began in the middle of the order
    went_on = {"a": 5, "b": 60, "c": 1}  # the windows that the stage before had read
    third = finished(batches[-1].position | {"before": went_on}, sources, 40)
    for order in (stage, later, third):
        for one in sources:
            check(order, one.split, 30)


def test_the_permutation_is_inverted():
    for size in (1, 2, 3, 100, 4999, 2**40 + 1):
        keys, _ = epoch_keys(3, size)
        index = np.unique(np.random.default_rng(0).integers(0, size, 500))
        assert np.array_equal(unpermute(permute(index, size, keys), size, keys), index)


def logged_once(folder) -> list[str]:
    """The digests of all steps from 1 on, each of which the file has once."""
    found = logged(folder / "metrics.jsonl")
    assert len(found) == sum(len(row.batches) for row in read_rows(folder / "metrics.jsonl"))
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def computed(spec, folder, data) -> list[str]:
    receipt = Receipt.read(folder / "train.json")
    stage = stage_order(spec, receipt, data)
    return [stage.digest(step) for step in range(1, receipt.steps + 1)]


def test_a_resumed_training_on_a_mixture_logs_the_digest_of_each_step_once(tmp_path, mix_spec, folders):  # noqa: F811
    """Checkpoints lie within log intervals, and a step after the last one is repeated."""
    how = {"packing": "best_fit", "max_steps": 14, "ckpt_every": 4, "log_every": 3, "val_every": 0}
    spec = mix_spec(more=SWITCHED, **how)
    for step in (5, 10):
        with pytest.raises(Stop):
            train(spec, tmp_path / "s", folders, on_step=crash_at(step))
    other = spec.settings.model_copy(update={"log_every": 2})  # it decides no weights, so it may change
    train(spec.model_copy(update={"settings": other}), tmp_path / "s", folders)
    found = logged_once(tmp_path / "s")
    assert len(found) == len(set(found)) == 14 and found == computed(spec, tmp_path / "s", folders)


def test_one_and_two_processes_log_the_digests_of_the_order(tmp_path, make_spec, shards):
    spec = make_spec(micro_batch=4, max_steps=6, log_every=4, ckpt_every=3)
    train(spec, tmp_path / "one", shards)
    run_together(2, [job(tmp_path, spec, "two", "ddp", shards, record=False)], tmp_path)
    expected = computed(spec, tmp_path / "one", shards)
    assert logged_once(tmp_path / "one") == logged_once(tmp_path / "two") == expected


def test_an_order_that_is_not_known_is_an_error(tmp_path, make_spec, shards):
    spec = make_spec(max_steps=2)
    train(spec, tmp_path / "s", shards)
    receipt = Receipt.read(tmp_path / "s/train.json")
    with pytest.raises(ValueError, match="r/a: has no step 3; it was trained for 2 steps"):
        stage_order(spec, receipt, shards).batch(3)
    with pytest.raises(ValueError, match="r/a: was trained with other settings"):
        stage_order(make_spec(max_steps=3), receipt, shards)
    changed = receipt.model_copy(update={"position": receipt.position | {"data": "other/train"}})
    with pytest.raises(ValueError, match="was encoded again since r/a was trained on it"):
        stage_order(spec, changed, shards)
