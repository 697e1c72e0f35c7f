"""`spider batch` and `spider seen` on a run of two stages, against a search of its batches."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from spider_trust.order import Order

from spider.cli import cli
from spider.common.results import Results
from spider.config import load_config
from spider.training.stage import train
from tests.unit.small_training import DEFAULTS, MODEL


@pytest.fixture
def trained(tmp_path, shards):
    """The configuration of a finished run, whose stages have other windows and batches."""
    run = {"data": "toy", "model": MODEL, "precision": "fp32"}
    run["defaults"] = {**DEFAULTS, "max_steps": 6, "ckpt_every": 1}
    run["evaluation"] = {"checkpoints": 6}
    run["stages"] = [{"name": "a"}, {"name": "b", "seq_len": 48, "micro_batch": 2}]
    toy = {"source": {"kind": "pydocs"}, "validation": 0.1}
    written = {"results": str(tmp_path / "results"), "datasets": {"toy": toy}, "runs": {"r": run}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(written))
    config = load_config(path)
    results = Results(tmp_path / "results")
    shutil.copytree(shards, results.shards("toy"))
    results.raw("toy", "000").parent.mkdir(parents=True)
    shutil.copy(shards.parent / "000.parquet", results.raw("toy", "000"))
    train(config.stage("r", "a"), results.stage("r", "a").path, results.shards("toy"))
    parent = results.stage("r", "a").receipt
    train(config.stage("r", "b"), results.stage("r", "b").path, results.shards("toy"), previous=parent)
    return path, config, results


def said(path, *words) -> str:
    done = CliRunner().invoke(cli, ["--config", str(path), *words])
    if done.exception:
        raise done.exception
    return done.output


def test_what_a_step_read_and_which_steps_read_a_document_agree(trained):
    path, config, results = trained
    order = Order(config, "r")
    assert order.names == ["a", "b"]
    steps: dict[str, set[int]] = {}
    for step in range(1, 13):
        plain = json.loads(said(path, "batch", "r", str(step), "--json"))
        assert plain["digest"] == plain["logged"] and plain["global_step"] == step
        ids, _ = order.stage("a" if step <= 6 else "b").batch(step - 6 * (step > 6))
        for row, row_T1 in zip(plain["rows"], ids, strict=True):
            assert np.array_equal(np.concatenate([piece["ids"] for piece in row]), row_T1)
            for piece in row:
                assert piece["id"] == str(piece["raw_row"])
                assert piece["begin"] or re.search(r"D|^.{0,8}$", piece["text"])
                steps.setdefault(piece["id"], set()).add(step)
    assert "row 0\n  toy/000:" in said(path, "batch", "r", "1", "--stage", "b")
    for id in list(steps)[:5]:
        text = said(path, "seen", f"toy:{id}")
        listed = re.findall(r"^r/(a|b): read.*steps: (.*)", text, re.M)
        read = {int(n) + 6 * (name == "b") for name, numbers in listed for n in numbers.split(", ")}
        assert read == steps[id]
        kept = [int(p.name[5:]) for p in results.run("r").glob("*/checkpoints/step-*")]
        before = [step for step in kept if step < min(read)]
        ends = f"/step-{max(before)}" if before else "every kept checkpoint has seen it"
        assert re.sub("step-0+", "step-", text).rstrip().endswith(ends)
    unread = next(str(i) for i in range(200) if str(i) not in steps)
    assert "r/a: never read it" in said(path, "seen", f"toy/000:{unread}", "--run", "r")


def test_wrong_names_and_damaged_folders_are_errors(trained):
    path, _, results = trained
    cases = [
        (("batch", "r", "13"), "r: step 13 was never trained; its steps are 1 to 12"),
        (("seen", "toy:none"), "toy:none: toy has no document of this id"),
        (("seen", "toy"), "DATASET:ID or DATASET/PART:ROW"),
    ]
    for words, message in cases:
        with pytest.raises(ValueError, match=message):
            said(path, *words)
    next(results.shards("toy").glob("train/*.rows")).unlink()
    with pytest.raises(ValueError, match="published tokens have none"):
        said(path, "batch", "r", "1")
    results.stage("r", "a").receipt.unlink()
    results.stage("r", "b").receipt.unlink()
    with pytest.raises(ValueError, match="no such receipt; train r first"):
        said(path, "batch", "r", "1")
