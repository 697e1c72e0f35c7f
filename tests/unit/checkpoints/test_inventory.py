"""`spider checkpoint list` and `verify`: every checkpoint below a folder, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from spider.checkpoints.save import save
from spider.cli import cli
from spider.common.errors import CheckpointError
from spider.common.files import write_json
from tests.unit.records import receipt, saved


def write(root, step, **record):
    given = saved(step, bytes=1000 * step, best_loss=1.5)
    tensors = {"model.w": torch.full((300, 2), float(step)), "optimizer.w.step": torch.zeros(30)}
    return save(root, tensors, given | record).path


@pytest.fixture
def results(tmp_path):
    """Two runs; one checkpoint has a flipped bit and a missing file, one a torn manifest."""
    runs = tmp_path / "results/runs"
    write(runs / "demo/main/checkpoints", 50)
    write(runs / "demo/main/checkpoints", 100, final=True)
    damaged = write(runs / "demo/anneal/checkpoints", 150)
    torn = write(runs / "other/main/checkpoints", 9, best_loss=None)
    file = damaged / "model-00001-of-00002.safetensors"
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(bytes(text))
    (damaged / "model-00002-of-00002.safetensors").unlink()
    (torn / "manifest.json").write_text('{"format": 1, ')
    (runs / "demo/main/metrics.jsonl").write_text("{}")
    return tmp_path / "results"


def say(*arguments):
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def test_list_shows_each_checkpoint_below_a_folder_with_its_state(results):
    said = say("list", results)
    lines = [line.split() for line in said.output.splitlines()]
    assert said.exit_code == 0
    assert [line[0] for line in lines[2:]] == ["demo/anneal", "demo/main", "demo/main", "other/main"]
    assert lines[2][1:] == ["150", "0.15", "0.0", "damaged"]
    assert lines[4][1:] == ["100", "0.10", "0.0", "good,", "final"]
    assert lines[5][1:] == ["?", "?", "0.0", "damaged"]


def test_list_ranks_scored_checkpoints_over_all_bytes_of_the_run(results):
    run = results / "runs/demo"
    given = receipt(stage="main", global_step=100, bytes=100_000)
    write_json(run / "main/train.json", given)
    late = write(run / "anneal/checkpoints", 60, global_step=160)
    weights = json.loads((late / "manifest.json").read_text())["weights"]
    scores = [
        {"run": "demo", "stage": "anneal", "global_step": step, "bpb": bpb, "weights": weights,
         "training": {"steps": own, "bytes": 1000 * own}}
        for step, own, bpb in [(160, 60, 1.25), (130, 30, 1.5)]
    ]  # fmt: skip
    write_json(run / "anneal/checkpoints.json", {"scores": scores})
    lines = [line.split() for line in say("list", run).output.splitlines()[2:]]
    assert lines[0] == ["demo/anneal", "160", "0.16", "0.0", "1.2500", "good"]
    assert [line[1] for line in lines[1:]] == ["150", "50", "100"]


def test_a_damaged_receipt_or_table_of_scores_leaves_only_its_own_values_out(results):
    run = results / "runs/demo"
    (run / "main/train.json").write_text("{")
    (run / "anneal/checkpoints.json").write_text("{")
    said = say("list", run).output
    lines = [line.split() for line in said.splitlines()]
    assert [line[:3] for line in lines if line[0].startswith("demo/")] == [
        ["demo/anneal", "150", "?"], ["demo/main", "50", "?"], ["demo/main", "100", "?"],
    ]  # fmt: skip
    assert said.count("not valid JSON") == 2


def test_a_run_is_found_beside_a_folder_of_its_name(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    Path("demo").mkdir()
    write_json(Path("config.yaml"), {
        "datasets": {"d": {"source": {"kind": "pydocs"}}},
        "runs": {"demo": {"data": "d", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}},
    })  # fmt: skip
    said = CliRunner().invoke(cli, ["checkpoint", "list", "demo"])
    assert "demo/main" in said.output
    (Path("config.yaml")).unlink()
    assert "demo/main" in say("list", "results").output


def test_verify_names_every_damaged_file_and_fails(results):
    said = say("verify", results)
    at = results / "runs"
    assert said.exit_code == 1
    assert said.output.splitlines() == [
        f"{at}/demo/anneal/checkpoints/step-00000150/model-00001-of-00002.safetensors: "
        "SHA-256 differs from the manifest",
        f"{at}/demo/anneal/checkpoints/step-00000150/model-00002-of-00002.safetensors: missing",
        f"{at}/demo/main/checkpoints/step-00000050: good",
        f"{at}/demo/main/checkpoints/step-00000100: good",
        said.output.splitlines()[-1],
    ]
    assert f"{at}/other/main/checkpoints/step-00000009/manifest.json: not valid JSON" in said.output
    assert say("verify", at / "demo/main").exit_code == 0
    assert say("verify", at / "demo/main/checkpoints/step-00000050").exit_code == 0


def test_weights_that_are_not_finite_are_said_to_be_so(tmp_path):
    tensors = {"model.w": torch.tensor([1.0, float("nan")])}
    path = save(tmp_path / "demo/main/checkpoints", tensors, saved(7)).path
    verified = say("verify", tmp_path)
    assert verified.exit_code == 1
    assert verified.output.startswith(f"{path}/model-00001-of-00001.safetensors: not finite: model.w; ")
    assert "not finite" in say("list", tmp_path).output


def test_ls_as_json_has_what_the_table_has_and_the_reasons(results):
    entries = json.loads(say("list", results / "runs/demo", "--json").output)
    assert [(e["stage"], e["step"], e["good"]) for e in entries] == [
        ("demo/anneal", 150, False),
        ("demo/main", 50, True),
        ("demo/main", 100, True),
    ]
    assert len(entries[0]["problems"]) == 2
    last = entries[2]
    assert last["size"] == sum(f.stat().st_size for f in Path(last["path"]).iterdir())
    assert (last["bytes"], last["final"], last["best_loss"]) == (100_000, True, 1.5)
    quick = json.loads(say("list", results / "runs/demo/anneal", "--json", "--quick").output)
    assert len(quick[0]["problems"]) == 1, "a missing file is seen, and a flipped bit is not"
    assert isinstance(say("list", results / "nowhere").exception, CheckpointError)
