"""A run on a tokenizer's ids beside one on bytes, of the same downloaded text, through the real workflow."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spider import load_model
from spider.data.packing import Packing
from spider.files import read_json
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens

ROOT = Path(__file__).parents[2]
TOY = "tests.families.toy"


@pytest.fixture
def two(workflow, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workflow.config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe"}
    workflow.config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 350}}
    run = workflow.config["runs"].pop("small")
    first = run["stages"][0] | {"max_steps": 10}
    packed = {"name": "packed", "max_steps": 5, "warmup_steps": 0, "packing": "best_fit"}
    run |= {"model": {"family": TOY, "width": 8}, "stages": [first]}
    workflow.config["runs"] = {"bytes": run, "bpe": {**run, "data": "text-bpe", "stages": [first, packed]}}
    workflow.config["runs"]["bpe"]["compress"] = {"cap": 1_000_000, "windows": 4}
    workflow.config["runs"]["bpe"]["harness"] = {"tasks": ["mine"], "include": standard_task(workflow.folder)}
    return workflow


def standard_task(folder):
    """A task as lm-evaluation-harness describes one, in a folder."""
    own = folder / "own"
    own.mkdir()
    rows = [{"query": f"Document {i} is", "choices": ["short", "long"], "gold": i % 2} for i in range(6)]
    (own / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = {"task": "mine", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(own / "rows.jsonl")}}}
    task |= {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
    (own / "mine.yaml").write_text(yaml.safe_dump(task | {"metric_list": [{"metric": "acc_bytes"}]}))
    return str(own)


def spider(workflow, *words):
    done = subprocess.run(
        [Path(sys.executable).with_name("spider"), *words],
        cwd=workflow.folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tokenizer_is_learned_once_and_goes_where_its_ids_go(two):
    assert two().count("(Rule: pack)") == 1
    results = two.results
    assert [path.name for path in (results / "raw").iterdir()] == ["text"], "what it is like is fetched once"
    learned = read_tokens(results / "tokenizers/bpe/tokenizer.json")
    stages = {run: results / "runs" / run / "first" for run in ("bytes", "bpe")}
    measured = {run: read_json(stage / "evaluation.json") for run, stage in stages.items()}
    assert measured["bytes"]["text_sha256"] == measured["bpe"]["text_sha256"]
    assert measured["bytes"]["bytes"] == measured["bpe"]["bytes"] == measured["bpe"]["targets"]["byte"]
    assert measured["bytes"]["compressors"]["xz"] == measured["bpe"]["compressors"]["xz"]

    # The rows are planned once, and what was trained on them knows by which plan.
    plan = Packing.read(results / "shards/text-bpe/packed-32.json")
    trained = read_json(results / "runs/bpe/packed/train.json")
    assert trained["position"]["packing"] == plan.digest and trained["global_step"] == 15
    assert "packing" not in read_json(stages["bpe"] / "train.json")["position"]

    # Whatever holds ids holds what they stand for.
    export = two.folder / "exported"
    spider(two, "checkpoint", "export", str(stages["bpe"]), str(export))
    for place in (stages["bpe"], export):
        model, _ = load_model(place, family_module=TOY)
        assert model.tokens.digest == learned.digest and model.tokens.size == 350
    assert load_model(stages["bytes"], family_module=TOY)[0].tokens is BYTES
    small = results / "runs/bpe/packed/artifact"
    summary = read_json(results / "report/summary.json")["runs"]["bpe"]["stages"]["packed"]
    scored = read_json(small / "evaluation.json")
    assert (
        summary["artifact"]["bpb"] == scored["bpb"]
        and scored["text_sha256"] == measured["bpe"]["text_sha256"]
    )
    assert summary["artifact"]["bytes"] == (small / "model.spider").stat().st_size
    assert "bpe / packed, pressed into" in (results / "report/table.md").read_text()
    assert "Pressed into a file" in (results / "report/runs/bpe.html").read_text()
    asked = read_json(results / "runs/bpe/packed/harness.json")
    assert asked["tasks"][0]["items"] == 6 and 0 <= asked["tasks"][0]["metrics"]["acc_bytes"]["value"] <= 1
    assert "Standard tasks" in (results / "report/runs/bpe.html").read_text()
    assert spider(
        two, "--family-module", TOY, "generate", str(export), "--prompt", "Document", "--bytes", "40"
    )
    assert "Nothing to be done" in two("--dry-run")

    # Another size is another tokenizer: what is written in it is made again, and no more.
    two.config["tokenizers"]["bpe"]["vocab_size"] = 300
    again = two.planned()
    data = ("download", "tokenizer", "encode", "index", "pack", "train")
    assert {rule: again.get(rule) for rule in data} == {
        **{"download": None, "tokenizer": 1, "encode": 1, "index": 1, "pack": 1, "train": 2}
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_configuration_and_the_commands_on_a_page_make_the_run_again(two, tmp_path):
    """Every kind of step is in this run: tokenizer, packed rows, harness, compressed file."""
    del two.config["runs"]["bytes"]
    two.config |= {"results": "made/here", "tracking": {"registry": False}}
    two("made/here/report/runs/bpe.html", patience=1500)
    page = (two.folder / "made/here/report/runs/bpe.html").read_text()
    blocks = [html.unescape(text) for text in re.findall(r'<pre class="code">(.*?)</pre>', page, re.DOTALL)]
    (written,) = (text for text in blocks if "datasets:" in text)
    (listed,) = (text for text in blocks if "spider --config" in text)
    again = tmp_path / "again"
    again.mkdir()
    (again / "run.yaml").write_text(written)
    shutil.copy(two.folder / "text.jsonl", again)
    lines = listed.splitlines()
    run = [line.split()[3] for line in lines]
    once = ["download", "tokenizer", "encode", "index", "pack"]
    assert run[:5] == once and run.count("train") == run.count("evaluate") - 1 == 2
    assert {"harness", "compress", "sample", "draw"} < set(run) and "--artifact" in listed
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in lines:
        subprocess.run(
            line,
            shell=True,
            cwd=again,
            env={**os.environ, "PATH": path, "SPIDER_TRACKING": "off"},
            check=True,
        )
    for name in ("first/train.json", "packed/train.json", "packed/artifact/artifact.json"):
        before, after = (read_json(root / "made/here/runs/bpe" / name) for root in (two.folder, again))
        assert before["weights"] == after["weights"]
    figures = re.findall(r"<th>(\w+)</th><td>(\d+)</td>", page.split('id="costs"')[1].split("</table>")[0])
    assert dict(figures) == {rule: str(run.count(rule)) for rule in once} | {
        **{"warmup": "1", "train": "2", "evaluate": "2", "sample": "2", "draw": "2"},
        **{"harness": "1", "compress": "1", "evaluate_artifact": "1", "sample_artifact": "1"},
    }
