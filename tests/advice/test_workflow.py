"""Advice to delete a file and run again, with the real Snakemake, which makes few lost files by itself."""

from __future__ import annotations

import re
import shlex

import pytest

from spider.checkpoints.records import Receipt, Warmup
from spider.cli.evaluate import check_settings
from spider.config import load_config
from spider.data.shards import Metadata, verify
from spider.evaluation.records import Evaluation, Sample
from spider.report.summary import Summary
from tests.unit.small_datasets import flip
from tests.workflow.conftest import PATIENCE, finished
from tests.workflow.test_gpus import Machine, runs

from .followed import advised, refused

RECEIPT = "results/runs/small/second/train.json"


def commands(message: str) -> list[str]:
    """Return the targets of the commands that a message names."""
    return [word for found in re.findall(r"`snakemake (.*?)`", message) for word in shlex.split(found)]


def test_a_part_with_a_damaged_shard_is_encoded_again_and_a_failed_job_runs_again(trained, monkeypatch):
    """The stage was trained before, so files of its earlier settings are there while its job fails."""
    monkeypatch.chdir(trained.folder)
    shards = trained.results.relative_to(trained.folder) / "shards/text"
    flip(shards / "train/000.bin", 100)
    first = trained.receipt("first")
    trained.run["stages"][1]["lr"] = 2e-3
    said = trained(RECEIPT, fails=True)
    advised(said, "data/shards.py", "{}. Then run again (`spider data verify` finds other damage)")
    assert trained.planned()["train"] == 1
    with refused("data/shards.py", "and run `snakemake datasets/{}`, which encodes the part again"):
        verify(shards)
    for name in re.search(r"delete (\S+) and (\S+), and run", said).groups():
        (trained.folder / name).unlink()
    trained(*commands(said))
    verify(shards)
    trained(RECEIPT)
    assert trained.receipt("first") == first


def test_a_damaged_record_is_made_again_by_the_command_that_its_message_names(trained, monkeypatch):
    monkeypatch.chdir(trained.folder)
    stage = trained.results.relative_to(trained.folder) / "runs/small/second"
    (warmup,) = stage.parent.glob("warmup-*.json")
    records = {
        Receipt: stage / "train.json",
        Evaluation: stage / "evaluation.json",
        Sample: stage / "sample.json",
        Summary: stage.parents[2] / "report/summary.json",
        Metadata: stage.parents[2] / "shards/text/metadata.json",
        Warmup: warmup,
    }
    targets = []
    for (record, path), damage in zip(records.items(), ("{", "{}", '{"format": 99}') * 2, strict=True):
        path.write_text(damage)
        with pytest.raises(ValueError) as caught:
            record.read(path)
        advised(str(caught.value), "common/record.py", "which makes it again")
        targets += commands(str(caught.value))
    for path in records.values():
        path.unlink()
    trained(*targets)
    for record, path in records.items():
        record.read(path)


def test_a_stage_of_other_settings_is_trained_again_or_its_settings_are_restored(trained, monkeypatch):
    monkeypatch.chdir(trained.folder)
    receipt = trained.results.relative_to(trained.folder) / "runs/small/second/train.json"
    before = trained.run["defaults"]["lr"]
    for lr in (before * 2, before):
        trained.run["defaults"]["lr"] = lr
        spec = load_config(trained.config).stage("small", "second")
        if lr != before:
            with refused("cli/evaluate.py", "restore them, or {}") as caught:
                check_settings(receipt, spec)
    check_settings(receipt, spec)
    trained.run["defaults"]["lr"] = before * 2
    receipt.unlink()
    trained(*commands(str(caught.value)))
    check_settings(receipt, load_config(trained.config).stage("small", "second"))


def test_a_damaged_record_of_what_an_output_was_made_from_is_deleted(trained):
    record = trained.results / "made/runs/small/first/train.json.json"
    record.write_text("{")
    said = trained("--dry-run", fails=True)
    advised(said, "provenance/made.py", "its output then counts as made from the settings and files of now")
    assert "first/train.json.json: not valid JSON" in said and "Traceback" not in said
    record.unlink()
    assert trained.planned() == {}


def test_a_bound_below_the_gpus_of_a_run_is_raised(tmp_path):
    machine, target = Machine(tmp_path, 2), "results/runs/r0/a/train.json"
    words = runs(1, gpus=2), "--resources", "mem=1GB"
    said, status = finished(machine.start("one", *words, "gpu=1", "--", target), PATIENCE)
    assert status == 1
    advised(said, "workflow/plan.py", "is {}, and --resources gpu={} allows fewer; raise the bound")
    machine.run(*words, "gpu=2", "--", target)
    assert [len(job[2]) for job in machine.jobs() if job[0] == "train"] == [2]
