"""A stage that is trained on a mixture resumes to the bit, and is validated by dataset."""

from __future__ import annotations

import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.checkpoints.records import Receipt
from spider.config.run import Mixture
from spider.data.encode import encode_part
from spider.data.mixture import read_of_each
from spider.data.packing import pack
from spider.data.shards import build_metadata
from spider.evaluation.text import LearnedFrom, all_text, stage_text
from spider.training.stage import train
from tests.unit.small_datasets import dataset
from tests.unit.training.disturb import read_until
from tests.unit.training.outcomes import outcome, rows

MIX = {"toy": 3, "numbers": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, shards):
    """Return the folder of a dataset; its neighbour is another one, of numbers."""
    root = tmp_path_factory.mktemp("mixed")
    shutil.copytree(shards, root / "toy")
    table = pa.table({"text": [f"{i} and {i + 1} are numbers" for i in range(90)], "id": list("0" * 90)})
    table = table.set_column(1, "id", [[str(i) for i in range(90)]])
    pq.write_table(table, root / "000.parquet")
    settings = dataset(validation=0.2)
    encode_part(root / "000.parquet", root / "numbers", "000", settings)
    build_metadata(root / "numbers", "numbers", settings, source={}, parts=["000"])
    for name in MIX:
        pack(root / name, 32)
    return root / "toy"


@pytest.fixture
def mix_spec(make_spec):
    def make(stage="a", mix=MIX, more=None, **changes):
        spec = make_spec(stage, **changes)
        settings = spec.settings.model_copy(update={"data": Mixture(mix=mix, **more or {})})
        return spec.model_copy(update={"settings": settings})

    return make


#: At a sample inside of a step.
SWITCHED = {"switches": {37: {"numbers": 1, "toy": 1}}}


@pytest.mark.parametrize(
    ("packing", "more", "read"),
    [("ring", {}, {"numbers": 20, "toy": 60}), ("best_fit", SWITCHED, {"numbers": 31, "toy": 49})],
)
def test_a_killed_training_on_a_mixture_ends_with_the_same_bytes(
    tmp_path, mix_spec, folders, start, packing, more, read
):
    spec = mix_spec(more=more, max_steps=20, packing=packing, val_every=5)
    for target in (3, 8, 13):
        process = start(spec, tmp_path / "killed", data=folders)
        read_until(process, target)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    killed = train(spec, tmp_path / "killed", folders)
    train(spec, tmp_path / "whole", folders)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert read_of_each(killed.position) == read


def test_validation_has_a_figure_for_each_dataset_and_their_weighted_mean(tmp_path, mix_spec, folders):
    train(mix_spec(max_steps=4, val_every=4, ckpt_every=4, log_every=2), tmp_path, folders)
    last = rows(tmp_path)[-1]["metrics"]
    weighted = 0.75 * last["val/bpb_toy"] + 0.25 * last["val/bpb_numbers"]
    assert last["val/bpb"] == pytest.approx(weighted) and last["val/bpb_toy"] != last["val/bpb_numbers"]
    assert last["train/epoch_numbers"] > 0 and last["train/epoch_toy"] > 0


def test_the_next_stage_goes_on_in_each_dataset_under_other_weights(tmp_path, mix_spec, folders):
    first = train(mix_spec(max_steps=4), tmp_path / "a", folders)
    spec = mix_spec("b", {"toy": 1, "numbers": 3}, max_steps=4)
    second = train(spec, tmp_path / "b", folders, previous=tmp_path / "a/train.json")
    assert first.position["seed"] == second.position["seed"]
    assert second.position["before"] == read_of_each(first.position) == {"numbers": 4, "toy": 12}
    assert read_of_each(second.position) == {"numbers": 16, "toy": 16}


def test_switches_are_counted_from_the_beginning_of_each_stage(tmp_path, mix_spec, folders):
    more = {"switches": {10: {"numbers": 1}}}
    train(mix_spec(more=more, max_steps=4), tmp_path / "a", folders)
    second = mix_spec("b", more=more, max_steps=4)
    receipt = train(second, tmp_path / "b", folders, previous=tmp_path / "a/train.json")
    assert receipt.position["before"] == {"numbers": 9, "toy": 7}
    assert read_of_each(receipt.position) == {"numbers": 18, "toy": 14}


def test_the_training_text_is_that_of_all_datasets(tmp_path, mix_spec, folders):
    train(mix_spec(max_steps=4), tmp_path, folders)
    receipt = tmp_path / "train.json"
    both = LearnedFrom([(receipt, folders), (receipt, folders.with_name("numbers"))])
    (stage, reasons), (whole, _) = stage_text(both, None), all_text(both, None)
    assert not reasons and b"are numbers" in stage.raw() and b"quick brown" in stage.raw()
    assert Receipt.read(receipt).position["sample"] * 32 <= stage.size + 64 * 32
    assert b"are numbers" in whole.raw()
