"""Manifest, origin and receipt are read and written without change."""

from __future__ import annotations

import json

import pytest
import torch

from spider.checkpoints.records import Manifest, Origin, Receipt, at_shares, read_manifest, steps
from spider.checkpoints.save import save
from spider.common import files
from spider.common.errors import CheckpointError, TrainingError
from spider.common.results import StageFolder
from spider.common.sealed import content_digest
from spider.training.stage import train
from tests.unit.records import receipt, saved


@pytest.fixture(scope="module")
def stage(tmp_path_factory, make_spec, shards):
    """Return the folder of a finished stage."""
    folder = tmp_path_factory.mktemp("stage")
    train(make_spec(max_steps=3), folder, shards)
    return StageFolder(folder)


def test_a_record_is_written_again_with_the_same_bytes(stage, tmp_path):
    for kind, path in ((Receipt, stage.receipt), (Origin, stage.origin)):
        kind.read(path).write(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_receipt_is_a_function_of_the_final_manifest(stage):
    written = Receipt.read(stage.receipt)
    manifest = read_manifest(stage.path / written.checkpoint)
    assert isinstance(manifest, Manifest)
    assert Receipt.of(manifest, written.checkpoint) == written


def test_a_manifest_holds_its_epoch_and_one_of_before_is_read_without_it(stage, tmp_path):
    newest = steps(stage.checkpoints)[-1]
    plain = files.read_json(newest / "manifest.json")
    row = json.loads(stage.metrics.read_text().splitlines()[-1])
    assert plain["epoch"] == row["metrics"]["train/epoch"] > 0
    del plain["epoch"]
    files.write_json(tmp_path / "manifest.json", plain | {"digest": content_digest(plain)})
    before = read_manifest(tmp_path)
    assert isinstance(before, Manifest)
    assert before.epoch is None


def test_an_edited_manifest_is_refused(stage, tmp_path):
    newest = steps(stage.checkpoints)[-1]
    plain = files.read_json(newest / "manifest.json")
    files.write_json(tmp_path / "manifest.json", plain | {"step": plain["step"] + 1})
    with pytest.raises(CheckpointError, match=r"manifest\.json: edited since it was written"):
        read_manifest(tmp_path)


def test_an_error_names_the_file_and_the_remedy(tmp_path):
    path = tmp_path / "train.json"
    for plain, message in (
        (receipt(format=7), "a receipt of format 7, this Spider reads 1; delete it and run"),
        ([], "a receipt of format None"),
        ({"format": 1, **dict.fromkeys(Receipt.model_fields, None)}, "a receipt of format None"),
        (receipt(steps="many"), r"not complete \(steps: .*\); delete it and run"),
    ):
        files.write_json(path, plain)
        with pytest.raises(TrainingError, match=rf"train\.json: .*{message}"):
            Receipt.read(path)
    path.write_text("{")
    with pytest.raises(TrainingError, match=r"train\.json: not valid JSON"):
        Receipt.read(path)
    files.write_json(path, {"format": 7})
    with pytest.raises(CheckpointError, match="a checkpoint of format 7, this Spider reads 2 and 3; "):
        Manifest.read(path)


def test_the_last_share_of_hours_is_the_end_and_no_checkpoint_just_before_it(tmp_path):
    spec = {"settings": {"max_hours": 0.01}}
    for step, seconds in ((4, 19), (8, 36), (9, 37)):
        record = saved(step, seconds=seconds, validation_seconds=0, spec=spec, end=9, final=step == 9)
        save(tmp_path, {"model.w": torch.ones(1)}, record)
    assert [path.name for path in at_shares(tmp_path, 2)] == ["step-00000004", "step-00000009"]
