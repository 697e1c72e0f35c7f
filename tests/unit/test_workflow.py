"""What the rules ask of a configuration: inputs, params, resources, targets and refusals."""

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.iocontainers import Wildcards

from spider.config import ConfigError, load_config
from spider.provenance.made import STANDS_FOR
from spider.workflow.plan import Plan, watched

ROOT = Path(__file__).parents[2]
LOCAL = {"source": {"kind": "local", "files": ["a.jsonl", "b.jsonl"]}, "validation": 0.1}
STAGES = [{"name": "one", "max_steps": 2}, {"name": "two", "max_steps": 2}]
RUN = {"data": "text", "model": "tiny", "stages": STAGES}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that makes the plan of a configuration in a folder with two files of text."""
    monkeypatch.chdir(tmp_path)
    for name in LOCAL["source"]["files"]:
        (tmp_path / name).write_text('{"text": "Text."}\n')

    def made(datasets=None, here=True, bound=None, **blocks):
        plain = {"datasets": {"text": LOCAL, **(datasets or {})}, "runs": {"r": RUN}, **blocks}
        return Plan(load_config(plain), tmp_path / "results", here=here, bound=bound)

    return made


def of(**wildcards):
    return Wildcards(fromdict={name: str(value) for name, value in wildcards.items()})


def job(rule, gpu=None, inputs=(), **wildcards):
    resources = {} if gpu is None else {"gpu": gpu}
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule), wildcards=of(**wildcards), resources=resources, input=list(inputs)
    )


def test_parts_that_are_added_are_cleaned_apart_from_finished_ones(plan):
    cleaning = {"exact": True, "near": 0.8, "against": ["text"]}
    made = plan({"more": LOCAL | {"cleaning": cleaning}})
    assert made.cleaned("more") == [("000", "001")]
    parts = ["text/{}/000", "text/{}/001", "more/{}/000", "more/{}/001"]
    keys = [f"<results>/cleaning/{one.format('signatures')}.parquet" for one in parts]
    raw = [f"<results>/raw/{one.replace('/{}', '')}.parquet" for one in parts]
    assert made.keys(of(dataset="more", last="001", bucket="0")) == keys + raw
    assert made.keys(of(dataset="more", last="001", bucket="1")) == keys
    assert made.buckets(of(dataset="more", part="000")) == ["<results>/cleaning/more/buckets/001-0"]
    pairs = [f"<results>/cleaning/more/pairs/{part}.parquet" for part in ("000", "001")]
    assert made.evidence("more", ("000", "001")) == pairs + raw  # `text` compares and removes none

    made.cleaned = lambda dataset: [("000",), ("001",)]
    assert made.first_cleaned(of(dataset="more", last="001")) == "001"
    assert made.buckets(of(dataset="more", part="000")) == ["<results>/cleaning/more/buckets/000-0"]
    removed = "<results>/cleaning/more/removed/000.parquet"
    assert made.evidence("more", ("001",)) == [pairs[1], removed, *raw]


def test_no_rule_of_the_core_has_an_ancient_input():
    """While a job runs that makes one, Snakemake ignores changed params and files of the jobs after it."""
    files = [*ROOT.glob("rules/*.smk"), ROOT / "workflow/Snakefile"]
    assert not [path for path in files if "ancient" in path.read_text(encoding="utf-8")]


def test_braces_in_a_path_are_no_wildcard_and_the_file_is_still_known():
    plain, braced = watched(["a.txt", "b{c}.txt"])
    assert plain == "a.txt" and "{" not in braced
    assert braced.flags[STANDS_FOR] == "b{c}.txt" and braced.flags["ancient"]


def test_a_missing_file_of_a_key_ends_snakemake_with_the_key(plan):
    tasks = {"mine": {"file": "none.jsonl"}}
    run = RUN | {"evaluation": {"tasks": tasks}}
    made = plan(runs={"r": run})
    with pytest.raises(SystemExit, match=r"error: runs.r.evaluation.tasks.mine: none.jsonl: no such file"):
        made.task_files(of(run="r", stage="one"))


def test_files_of_downloads_are_made_by_the_workflow_and_no_others(plan):
    hub, web = f"hf://datasets/acme/texts@{'1' * 40}", f"https://example.org/b.zip#sha256={'a' * 64}"
    made = plan(downloads={"data/g": hub, "data/b.zip": web})
    names = ("data/g/a/b.parquet", "data/b.zip", "data/g", "data/b.zip/x", "data/gx/a", "mine")
    assert [*map(made.config.download, names)] == [f"{hub}/a/b.parquet", web, None, None, None, None]
    assert [bool(re.fullmatch(made.downloaded(), name)) for name in names] == [True] * 2 + [False] * 4
    assert made.existing("key", names[:2]) == [names[1], names[0]]
    for wrong in ("acme/texts", "hf://datasets/acme/texts", web[:-1], f"{hub}/a"):
        with pytest.raises(ConfigError, match=r"downloads.data/g: must be a dataset repository, hf://data"):
            plan(downloads={"data/g": wrong})


def test_a_stage_waits_for_the_one_before_and_for_all_datasets_of_its_mixture(plan):
    two = {"name": "two", "max_steps": 2, "packing": "best_fit", "data": {"mix": {"text": 1, "more": 1}}}
    made = plan({"more": LOCAL}, runs={"r": RUN | {"stages": [RUN["stages"][0], two]}})
    first, second = of(run="r", stage="one"), of(run="r", stage="two")
    assert made.previous_receipt(first) == [] and made.packed_rows(first) == []
    assert made.previous_receipt(second) == "<results>/runs/r/one/train.json"
    assert made.training_data(second) == [
        f"<results>/shards/{name}/metadata.json" for name in ("text", "more")
    ]
    assert len(made.packed_rows(second)) == 2 and made.scored_data(first) == made.training_data(second)
    shape = made.stage("r", "two").shape
    assert made.warmup(second) == f"<results>/runs/r/warmup-{shape}.json"
    assert made.measured_stage(of(run="r", shape=shape)).shape == shape


def test_targets_of_a_run_are_its_scores_figures_and_what_extras_measure(plan):
    made = plan(runs={"r": RUN | {"compress": {}, "evaluation": {"checkpoints": 4}}})
    made.measured_by.append(lambda run: [f"<results>/runs/{run}/extra.json"])
    found = made.measured("r")
    stage = "<results>/runs/r/two"
    wanted = ("evaluation.json", "compressed/sample.txt", "checkpoints.json", "baselines.json", "loss.svg")
    assert {f"{stage}/{name}" for name in wanted} | {"<results>/runs/r/extra.json"} <= set(found)
    assert len(found) == len(set(found))
    assert made.scores("r") == [file for file in found if not file.endswith(("svg", "html"))]


def test_jobs_that_lack_their_gpus_are_refused_by_the_bound(plan):
    run = RUN | {"resources": {"gpus": 4, "nodes": 2}}
    made = plan(runs={"r": run, "cpu": RUN}, here=False, bound=2)
    gpus, gpu, nodes = made.of_run("gpus"), made.of_run("gpu"), made.of_nodes()
    assert (gpus(of(run="r")), gpu(of(run="r")), gpu(of(run="cpu"))) == (4, 1, 0)
    assert [nodes[name](of(run="r")) for name in ("mpi", "tasks", "tasks_per_gpu")] == ["srun", 2, 0]
    assert not any(value(of(run="cpu")) for value in nodes.values())
    assert plan(runs={"cpu": RUN}).of_nodes() == {}
    # Snakemake bounds the request itself.
    jobs = [job("train", gpu=2, run="r", stage="one"), job("train", gpu=0, run="cpu", stage="one")]
    assert made.lacking_gpus(jobs) == [
        "runs.r.resources.gpus: is 4, and --resources gpu=2 allows fewer; raise the bound"
    ]
    assert plan(runs={"r": run}, here=False).lacking_gpus(jobs[:1]) == []


def test_jobs_are_refused_if_their_text_is_gone_or_its_time_is_in_the_future(plan, tmp_path):
    made = plan()
    os.utime(tmp_path / "a.jsonl", (time.time() + 3600,) * 2)
    (tmp_path / "b.jsonl").unlink()
    jobs = [
        job("download", dataset="text", part=part, inputs=[f])
        for part, f in (("000", "a.jsonl"), ("001", "b.jsonl"))
    ]
    future, missing = made.hopeless(jobs)
    assert future.startswith("a.jsonl: its time (") and "is in the future" in future
    assert missing.startswith("datasets.text: ") and "b.jsonl: no such file" in missing
    assert made.hopeless([job("train", run="r", stage="one")]) == []
