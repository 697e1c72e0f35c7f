"""Every rule of the workflow has a row of costs, and the jobs of other runs are left out."""

import re
from pathlib import Path

import pytest

from spider.config import load_config
from spider.report.costs import FLOW, SHARED, Needed, commands, costs
from spider.results import Results
from tests.unit.evaluation.stages import write_benchmark

ROOT = Path(__file__).parents[3]
#: By rule, the path of its benchmark file below the folder of benchmarks.
BENCHMARKS = {
    rule: path
    for file in sorted((ROOT / "rules").glob("*.smk"))
    for rule, path in re.findall(
        r"^ *rule (\w+):.*?<benchmarks>/(.*?)\.tsv", file.read_text(), re.MULTILINE | re.DOTALL
    )
}


@pytest.fixture
def needed():
    """Return the needs of a run with all kinds of jobs, whose dataset ``cut`` is like ``text``."""
    return Needed(
        run="small",
        stages=("only",),
        datasets=frozenset({"cut"}),
        tokenizers=frozenset({"bpe"}),
        raw=frozenset({"text"}),
        rows=frozenset({"cut/512"}),
        counted="0123456789abcdef",
    )


def test_what_a_run_needs_follows_from_its_configuration():
    source = {"source": {"kind": "mock"}}
    rows = {"name": "rows", "max_steps": 1, "packing": "best_fit", "seq_len": 64}
    packed = {"data": "cut", "model": "gpt-cpu", "stages": [{"name": "a", "max_steps": 1}, rows]}
    counted = {"data": "kept", "model": "slim", "stages": [{"name": "a", "max_steps": 1}]}
    plain = {
        "datasets": {
            **{"text": source, "lessons": source, "kept": source | {"ngram": 0.5}},
            "cut": {"like": "text", "tokenizer": "t"},
        },
        "tokenizers": {"t": {"data": "lessons", "vocab_size": 300}},
        "runs": {"packed": packed, "counted": counted},
    }
    config = load_config(plain)

    def needs(run, stages, datasets):
        specs = [(name, config.stage(run, name).model_dump(mode="json")) for name in stages]
        return Needed.of(config, run, specs, datasets)

    found = needs("packed", ["a", "rows"], ["cut"])
    assert (found.datasets, found.tokenizers, found.raw) == ({"cut"}, {"t"}, {"text", "lessons"})
    assert found.rows == {"cut/64"} and found.counted == "" and found.stages == ("a", "rows")
    found = needs("counted", ["a"], ["kept"])
    assert found.counted == config.runs["counted"].model.ngram.counted and found.rows == set()
    assert found.raw == {"kept"} and found.tokenizers == set()


def names(needed):
    """Values of the wildcards for the run."""
    own = {"run": "small", "stage": "only", "dataset": "cut", "tokenizer": "bpe", "part": "003"}
    return own | {"seq_len": "512", "counted": needed.counted, "text": "full", "shape": "0" * 16}


def test_every_rule_of_the_workflow_is_counted_or_is_shared(needed, tmp_path):
    assert BENCHMARKS.keys() == {*FLOW, *SHARED}
    for rule, pattern in BENCHMARKS.items():
        folder, _, path = pattern.partition("/")
        assert folder == rule
        raw = {"dataset": "text"} if rule == "download" else {}  # the dataset that `cut` is like
        write_benchmark(tmp_path / "benchmarks", rule, path.format(**names(needed) | raw), 2.0)
    table = costs(Results(tmp_path), needed, [])
    assert [(row.rule, row.jobs, row.seconds) for row in table] == [(rule, 1, 2.0) for rule in FLOW]


def test_jobs_of_other_runs_datasets_and_settings_are_left_out(needed, tmp_path):
    others = {"run": "small-2", "stage": "gone", "dataset": "other", "tokenizer": "another"}
    others |= {"seq_len": "1024", "counted": "f" * 16}
    for name, value in others.items():
        for rule, pattern in BENCHMARKS.items():
            if f"{{{name}}}" in pattern and rule not in SHARED:
                path = pattern.partition("/")[2].format(**names(needed) | {name: value})
                write_benchmark(tmp_path / "benchmarks", rule, path, 2.0)
    assert costs(Results(tmp_path), needed, []) == []


def test_a_rule_that_somebody_added_has_a_row_too(needed, tmp_path):
    write_benchmark(tmp_path / "benchmarks", "judge", "small/only", 3.0)
    write_benchmark(tmp_path / "benchmarks", "judge", "other/only", 4.0)
    (row,) = costs(Results(tmp_path), needed, [])
    assert (row.rule, row.seconds) == ("judge", 3.0)


def record(rule, name, command, started=0.0, outputs=(), status="finished"):
    """A tracking record of a job."""
    tags = {"spider.rule": rule, "spider.name": name}
    made = [{"path": path, "digest": "d"} for path in outputs]
    told = {"command": command, "started": started, "status": status, "outputs": made}
    return {"tags": tags, "metrics": [], **told}


def test_commands_are_those_that_were_run_in_the_order_of_the_flow(needed):
    counts = f"elsewhere/ngram/cut/{needed.counted}/counts/"
    records = [
        record("evaluate_compressed", "small/only", "evaluate small/only --compressed"),
        record("harness", "runs/small/only/train.json", "harness elsewhere/runs/small/only/train.json"),
        record("train", "small/only", "train small/only --threads 1", started=1.0),
        record("train", "small/only", "train small/only --threads 2", started=2.0),
        record("train", "small/only", "train small/only --threads 3", started=3.0, status="failed"),
        record("train", "other/only", "train other/only"),
        record("encode", "cut/001", "data encode cut 001 elsewhere/raw/text/001.parquet"),
        record("encode", "cut/000", "data encode cut 000 elsewhere/raw/text/000.parquet"),
        record(
            "count_ngrams",
            "cut/000",
            f"data count-ngrams other 000 --output {counts}000",
            outputs=[f"{counts}000"],
        ),
        record(
            "count_ngrams",
            "cut/000",
            "data count-ngrams other 000 --output x",
            outputs=["ngram/cut/ff/counts/000"],
        ),
        record("pack", "cut/512", "data pack cut 512"),
        record("pack", "cut/1024", "data pack cut 1024"),
        record("tokenizer", "bpe", "data tokenizer bpe 'a file.parquet'"),
        record("index", "cut", None),
        record("compare", "report", "report compare --output x"),
    ]
    assert commands(needed.jobs(records), "small") == [
        f"spider --config run.yaml {line}"
        for line in (
            "data tokenizer bpe 'a file.parquet'",
            "data encode cut 000 elsewhere/raw/text/000.parquet   # and so on, to 001",
            "data pack cut 512",
            f"data count-ngrams small 000 --output {counts}000",
            "train small/only --threads 2",
            "harness elsewhere/runs/small/only/train.json",
            "evaluate small/only --compressed",
        )
    ]
