"""The jobs that made a run, by their records, with their costs and commands."""

import pytest

from spider.report.costs import commands, costs, jobs_of
from tests.unit.records import write_job


@pytest.fixture
def root(tmp_path):
    """Return a results folder with the records of two runs on one text."""
    for number, (rule, output, inputs, command) in enumerate(
        [
            ("download", "raw/text/000.parquet", [], "data download text 000"),
            ("download", "raw/text/001.parquet", [], "data download text 001"),
            ("encode", "shards/text/train/001.bin", ["raw/text/001.parquet"], "data encode text 001 b"),
            ("encode", "shards/text/train/000.bin", ["raw/text/000.parquet"], "data encode text 000 'a b'"),
            (
                "index",
                "shards/text/metadata.json",
                ["shards/text/train/000.bin", "shards/text/train/001.bin"],
                "data index text",
            ),
            ("pack", "shards/text/packed-64.json", ["shards/text/metadata.json"], "data pack text 64"),
            (
                "count_ngrams",
                "ngram/text/ff/counts/000",
                ["shards/text/metadata.json"],
                "data count-ngrams other 000",
            ),
            (
                "train",
                "runs/small/a/train.json",
                ["shards/text/metadata.json", "ngram/text/ff/counts/000"],
                "train small/a --threads 1",
            ),
            ("train", "runs/other/a/train.json", ["shards/text/packed-64.json"], "train other/a"),
            ("evaluate", "runs/small/a/evaluation.json", ["runs/small/a/train.json"], "evaluate small/a"),
            ("train", "runs/small/gone/train.json", [], "train small/gone"),
            ("judge", "runs/small/a/verdict.json", ["runs/small/a/evaluation.json"], "judge"),
            ("compare", "report/summary.json", ["runs/small/a/evaluation.json"], "report compare"),
        ]
    ):
        path = f"benchmarks/{rule}/{output}.tsv"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"s\tmax_rss\tcpu_time\n2.0\t{number}\tNA\n")
        changed = {"rule": rule, "command": command, "benchmark": path}
        write_job(tmp_path, output, inputs, **changed, started=float(number), ended=number + 1.0)
    return tmp_path


def test_a_run_costs_what_its_jobs_and_those_of_its_data_cost(root):
    rows = costs(root, jobs_of(root, "small", ["a"]))
    found = [(row.rule, row.jobs, row.seconds, row.cpu_seconds) for row in rows]
    assert found == [
        ("download", 2, 4.0, None),
        ("encode", 2, 4.0, None),
        ("index", 1, 2.0, None),
        ("count_ngrams", 1, 2.0, None),
        ("train", 1, 2.0, None),
        ("evaluate", 1, 2.0, None),
        ("judge", 1, 2.0, None),  # a rule of another workflow
    ]
    assert [row.peak_mb for row in rows][:2] == [1, 3]


def test_commands_are_those_of_the_newest_jobs_in_their_order(root):
    write_job(
        root, "runs/small/a/train.json", status="failed", command="train small/a --threads 9", ended=99.0
    )
    assert commands(jobs_of(root, "small", ["a"]), "small") == [
        f"spider --config run.yaml {line}"
        for line in (
            "data download text 000   # and so on, to 001",
            "data encode text 000 'a b'   # and so on, to 001",
            "data index text",
            "data count-ngrams small 000",  # another run counted
            "train small/a --threads 1",
            "evaluate small/a",
            "judge",
        )
    ]


def test_an_input_whose_job_ran_again_belongs_to_its_newest_job(root):
    changed = {"rule": "index", "command": "data index text --again", "started": 50.0, "ended": 51.0}
    write_job(root, "shards/text/metadata.json", ["raw/text/000.parquet"], **changed)
    found = commands(jobs_of(root, "small", ["a"]), "small")
    assert "spider --config run.yaml data index text --again" in found and not any(
        "encode" in one for one in found
    )
