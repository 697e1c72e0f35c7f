"""Every rule of the workflow has a row of costs, and jobs of other runs have none."""

import re
from pathlib import Path

import pytest

from spider.config import load_config
from spider.report.costs import Needed, commands, costs
from spider.results import Results
from spider.tracking.records import File, Metric, Run
from tests.unit.evaluation.stages import write_benchmark

ROOT = Path(__file__).parents[3]


def blocks() -> dict[str, str]:
    """Return the text of each rule in the files of the workflow."""
    text = "\n".join(path.read_text() for path in (ROOT / "rules").glob("*.smk"))
    return dict(re.findall(r"^ *rule (\w+):\n(.*?)(?=^ *(?:use )?rule |\Z)", text, re.MULTILINE | re.DOTALL))


#: By rule, the path of its benchmark file below the folder of benchmarks.
BENCHMARKS = {
    rule: re.search(r'"<benchmarks>/(.*?)\.tsv"', block).group(1) for rule, block in blocks().items()
}
#: Rules whose output covers several runs, or shows the costs.
SHARED = {rule for rule, path in BENCHMARKS.items() if re.match(f"{rule}/(report|foreign)/", path)}

CONFIG = {
    "datasets": {
        "text": {"source": {"kind": "mock"}, "ngram": 0.5},
        "lessons": {"source": {"kind": "mock"}},
        "cut": {"like": "text", "tokenizer": "bpe"},
    },
    "tokenizers": {"bpe": {"data": "lessons", "vocab_size": 300}},
    "runs": {
        "small": {
            "data": "cut",
            "model": "gpt-cpu",
            "stages": [{"name": "only", "target_flops": 1e10, "packing": "best_fit", "seq_len": 512}],
        },
        "counted": {"data": "text", "model": "slim", "stages": [{"name": "only", "max_steps": 1}]},
    },
}
COUNTED = load_config(CONFIG).runs["counted"].model.ngram.counted
#: By run, the values of wildcards for its jobs.
WILDCARDS = {
    "small": {"dataset": "cut", "tokenizer": "bpe", "seq_len": "512"},
    "counted": {"dataset": "text", "counted": COUNTED, "text": "full"},
}
for run, values in WILDCARDS.items():
    values |= {"run": run, "stage": "only", "part": "003", "shape": "0" * 16, "compressed": ""}


def needs(run: str, data: str) -> Needed:
    config = load_config(CONFIG)
    return Needed.of(config, run, [("only", config.stage(run, "only").model_dump(mode="json"))], [data])


def write_all(folder: Path, owner: str, **other: str) -> set[str]:
    """Write the benchmark file of a job of each rule whose wildcards the run has, and return these rules."""
    values = WILDCARDS[owner] | other
    written = set()
    for rule, path in BENCHMARKS.items():
        names = set(re.findall(r"{(\w+)}", path))
        if rule not in SHARED and names <= values.keys() and other.keys() <= names:
            of_raw = rule == "download" or path.startswith(f"{rule}/cleaning/")
            raw = {"dataset": "text"} if of_raw and not other else {}  # `cut` is like `text`
            name = path.removeprefix(f"{rule}/").format(**values | raw)
            write_benchmark(folder / "benchmarks", rule, name, 2.0)
            written.add(rule)
    return written


def test_a_benchmark_file_has_the_path_of_an_output():
    for rule, block in blocks().items():
        folder, _, path = BENCHMARKS[rule].partition("/")
        assert folder == rule
        outputs = block.partition("output:")[2].partition("log:")[0]
        assert re.search(rf'"(<results>/)?{re.escape(path)}[".]', outputs), rule


@pytest.mark.parametrize(("run", "data"), [("small", "cut"), ("counted", "text")])
def test_every_rule_of_the_workflow_has_a_row_of_costs(run, data, tmp_path):
    rules = write_all(tmp_path, run)
    assert rules | SHARED == BENCHMARKS.keys() - (
        {"count_ngrams", "build_ngrams"} if run == "small" else {"tokenizer", "pack"}
    )
    table = costs(Results(tmp_path), needs(run, data), [])
    assert {(row.rule, row.jobs, row.seconds) for row in table} == {(rule, 1, 2.0) for rule in rules}
    order = [row.rule for row in table]
    assert order.index("download") < order.index("encode") < order.index("train")


def test_parts_of_the_dataset_of_a_tokenizer_are_counted_too(tmp_path):
    for dataset in ("text", "lessons", "other"):
        write_benchmark(tmp_path / "benchmarks", "download", f"raw/{dataset}/000", 2.0)
    (row,) = costs(Results(tmp_path), needs("small", "cut"), [])
    assert row.jobs == 2


@pytest.mark.parametrize("run", ["small", "counted"])
def test_jobs_of_other_runs_datasets_and_settings_are_left_out(run, tmp_path):
    others = {"run": "small-2", "stage": "gone", "dataset": "other", "tokenizer": "another"}
    others |= {"seq_len": "1024", "counted": "f" * 16}
    for name in others.keys() & WILDCARDS[run].keys():
        assert write_all(tmp_path, run, **{name: others[name]})
    assert costs(Results(tmp_path), needs(run, WILDCARDS[run]["dataset"]), []) == []


def test_a_rule_of_another_workflow_has_a_row_too(tmp_path):
    write_benchmark(tmp_path / "benchmarks", "judge", "runs/small/only/verdict", 3.0)
    write_benchmark(tmp_path / "benchmarks", "judge", "runs/other/only/verdict", 4.0)
    (row,) = costs(Results(tmp_path), needs("small", "cut"), [])
    assert (row.rule, row.seconds) == ("judge", 3.0)


def record(rule, command, *outputs, started=0.0, status="finished", ended=()):
    """Return a tracking record of a job, whose attempts ended at these times."""
    return Run(
        kind="job",
        identity="i",
        name=rule,
        tags={"spider.rule": rule},
        metrics=[Metric(key="seconds", value=1.0, step=0, time=time) for time in ended],
        command=command,
        started=started,
        status=status,
        outputs=[File(path=path, digest="d") for path in outputs],
    )


def test_commands_are_those_of_the_newest_jobs_in_the_order_of_the_flow():
    stage = "runs/small/only"
    records = [
        record("harness", f"harness elsewhere/{stage}/train.json", f"{stage}/harness.json", started=6.0),
        record("evaluate", "evaluate small only", f"{stage}/evaluation.json", started=5.0),
        record("train", "train small only --threads 1", f"{stage}/train.json", started=1.0),
        # This job ran again after its stage was scored, and found nothing to do.
        record("train", "train small only --threads 2", f"{stage}/train.json", started=9.0, ended=[2.0, 9.5]),
        record("train", "train small only --threads 3", started=10.0, status="failed"),
        record("train", "train other only", "runs/other/only/train.json"),
        record("encode", "encode cut 001 a.parquet", "shards/cut/train/001.idx", started=0.2),
        record("encode", "encode cut 000 a.parquet", "shards/cut/train/000.idx", started=0.3),
        record("pack", "pack cut 512", "shards/cut/packed-512.json", started=0.4),
        record("pack", "pack cut 1024", "shards/cut/packed-1024.json", started=0.4),
        record("tokenizer", "tokenizer bpe 'a file.parquet'", "tokenizers/bpe/tokenizer.json", started=7.0),
        record("index", None, "shards/cut/metadata.json"),
        record("compare", "compare --output x", "report/summary.json"),
    ]
    jobs = needs("small", "cut").jobs(records)
    assert commands(jobs, "small") == [
        f"spider --config run.yaml {line}"
        for line in (
            "tokenizer bpe 'a file.parquet'",
            "encode cut 000 a.parquet   # and so on, to 001",
            "pack cut 512",
            "train small only --threads 2",
            "evaluate small only",
            f"harness elsewhere/{stage}/train.json",
        )
    ]


def test_commands_that_counted_for_another_run_name_this_one():
    folder = f"ngram/text/{COUNTED}"
    records = [
        record("count_ngrams", "count-ngrams other 000 --output x", f"{folder}/counts/000"),
        record("count_ngrams", "count-ngrams other 000 --output y", "ngram/text/ff/counts/000"),
        record("build_ngrams", "build-ngrams other x", f"{folder}/split/index.json", started=1.0),
    ]
    assert commands(needs("counted", "text").jobs(records), "counted") == [
        "spider --config run.yaml count-ngrams counted 000 --output x",
        "spider --config run.yaml build-ngrams counted x",
    ]
