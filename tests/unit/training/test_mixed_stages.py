"""Stages on a mixture or on tokens resume to the bit; figures are by dataset, and count bytes."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider import load_model
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.common.errors import CheckpointError
from spider.config import TokenizerConfig, load_config
from spider.config.run import Mixture
from spider.data.encode import encode_part
from spider.data.mixture import read_of_each
from spider.data.packing import pack
from spider.data.shards import build_metadata
from spider.data.tokenizer import learn
from spider.evaluation.text import LearnedFrom, all_text, stage_text
from spider.tokens.stored import read_tokens
from spider.training.stage import train
from tests.unit.small_datasets import dataset
from tests.unit.tokens.texts import texts
from tests.unit.training.disturb import Stop, crash_at
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


def test_validation_has_a_figure_for_each_dataset_and_their_weighted_mean(tmp_path, mix_spec, folders):
    train(mix_spec(max_steps=4, val_every=4, ckpt_every=4, log_every=2), tmp_path, folders)
    last = rows(tmp_path)[-1]["metrics"]
    weighted = 0.75 * last["val/bpb_toy"] + 0.25 * last["val/bpb_numbers"]
    assert last["val/bpb"] == pytest.approx(weighted) and last["val/bpb_toy"] != last["val/bpb_numbers"]
    assert last["train/epoch_numbers"] > 0 and last["train/epoch_toy"] > 0


def test_the_training_text_is_that_of_all_datasets(tmp_path, mix_spec, folders):
    train(mix_spec(max_steps=4), tmp_path, folders)
    receipt = tmp_path / "train.json"
    both = LearnedFrom([(receipt, folders), (receipt, folders.with_name("numbers"))])
    (stage, reasons), (whole, _) = stage_text(both, None), all_text(both, None)
    assert not reasons and b"are numbers" in stage.raw() and b"quick brown" in stage.raw()
    assert Receipt.read(receipt).position["sample"] * 32 <= stage.size + 64 * 32
    assert b"are numbers" in whole.raw()


@pytest.mark.parametrize(
    ("packing", "more", "read"),
    [("ring", {}, {"numbers": 12, "toy": 36}), ("best_fit", SWITCHED, {"numbers": 15, "toy": 33})],
)
def test_an_interrupted_training_on_a_mixture_ends_with_the_same_bytes(
    tmp_path, mix_spec, folders, packing, more, read
):
    spec = mix_spec(more=more, max_steps=12, packing=packing, val_every=5)
    for step in (3, 7, 11):
        with pytest.raises(Stop):
            train(spec, tmp_path / "crashed", folders, on_step=crash_at(step))
    crashed = train(spec, tmp_path / "crashed", folders)
    train(spec, tmp_path / "whole", folders)
    assert outcome(tmp_path / "crashed") == outcome(tmp_path / "whole")
    assert read_of_each(crashed.position) == read


def test_the_next_stage_goes_on_in_each_dataset_by_its_own_weights_and_switches(tmp_path, mix_spec, folders):
    first = train(mix_spec(max_steps=4), tmp_path / "a", folders)
    assert read_of_each(first.position) == {"numbers": 4, "toy": 12}
    for name, weights, more, read in (
        ("b", {"toy": 1, "numbers": 3}, {}, {"numbers": 16, "toy": 16}),
        # A switch is counted from the beginning of its stage.
        ("c", MIX, {"switches": {10: {"numbers": 1}}}, {"numbers": 13, "toy": 19}),
    ):
        spec = mix_spec("b", weights, more, max_steps=4)
        second = train(spec, tmp_path / name, folders, previous=tmp_path / "a/train.json")
        assert first.position["seed"] == second.position["seed"]
        assert second.position["before"] == read_of_each(first.position)
        assert read_of_each(second.position) == read


def spec():
    run = {
        "data": "text",
        "model": {"family": "tests.families.toy", "width": 8},
        "precision": "fp32",
        "defaults": {"seq_len": 16, "micro_batch": 4, "max_steps": 4, "ckpt_every": 2},
        "stages": [{"name": "a"}],
    }
    source = {"source": {"kind": "pydocs"}, "tokenizer": "t"}
    tokenizers = {"t": {"data": "text", "vocab_size": 300}}
    config = {"datasets": {"text": source}, "tokenizers": tokenizers, "runs": {"r": run}}
    return load_config(config).stage("r", "a")


def test_training_counts_bytes_and_a_checkpoint_holds_its_tokenizer(written, tmp_path):
    receipt = train(spec(), tmp_path / "a", written)
    assert receipt.tokens == 4 * 4 * 16 and receipt.bytes > 1.5 * receipt.tokens
    checkpoint = Checkpoint.at(tmp_path / "a")
    assert checkpoint.tokens.digest == read_tokens(written / "tokenizer.json").digest
    assert load_model(tmp_path / "a")[0].tokens.size == 300
    (checkpoint.path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Checkpoint.at(checkpoint.path)


def test_a_training_on_packed_answers_ends_with_the_same_bytes_after_crashes(tmp_path, talk, talk_spec):
    train(talk_spec, tmp_path / "undisturbed", talk)
    for step in (5, 8):  # within a log interval, and with a checkpoint
        with pytest.raises(Stop):
            train(talk_spec, tmp_path / "crashed", talk, on_step=crash_at(step))
    train(talk_spec, tmp_path / "crashed", talk)
    assert outcome(tmp_path / "crashed") == outcome(tmp_path / "undisturbed")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder of shards in 300 ids."""
    root, settings = tmp_path_factory.mktemp("data"), dataset(validation=0.1)
    table = pa.table({"text": texts(200), "id": [str(i) for i in range(200)]})
    pq.write_table(table, root / "000.parquet")
    config = TokenizerConfig(data="text", vocab_size=300, max_bytes=10**6)
    learn([root / "000.parquet"], learned := root / "tokenizer.json", "t", config, settings)
    encode_part(root / "000.parquet", folder := root / "shards", "000", settings, read_tokens(learned))
    build_metadata(folder, "text", settings, source={}, parts=["000"], tokenizer=learned)
    return folder
