"""The jobs that made a run, by their records, with their costs and commands."""

import os
import subprocess
import sys

import pytest

from spider.provenance.codefiles import read_note
from spider.provenance.lineage import Lineage
from spider.provenance.made import Job, usage
from spider.report.page import commands, costs, jobs_of
from tests.unit.records import write_job

SHARDS = ["shards/text/train/000.bin", "shards/text/train/001.bin"]
DATA, COUNTS = "shards/text/metadata.json", "ngram/text/ff/counts/000"
JOBS = [
    ("download", "raw/text/000.parquet", [], "data download text 000"),
    ("download", "raw/text/001.parquet", [], "data download text 001"),
    ("encode", SHARDS[1], ["raw/text/001.parquet"], "data encode text 001 b"),
    ("encode", SHARDS[0], ["raw/text/000.parquet"], "data encode text 000 'a b'"),
    ("index", DATA, SHARDS, "data index text"),
    ("pack", "shards/text/packed-64.json", [DATA], "data pack text 64"),
    ("count_ngrams", COUNTS, [DATA], "data count-ngrams other 000"),
    ("train", "runs/small/a/train.json", [DATA, COUNTS], "train small/a --threads 1"),
    ("train", "runs/other/a/train.json", ["shards/text/packed-64.json"], "train other/a"),
    ("evaluate", "runs/small/a/evaluation.json", ["runs/small/a/train.json"], "evaluate small/a"),
    ("train", "runs/small/gone/train.json", [], "train small/gone"),
    ("judge", "runs/small/a/verdict.json", ["runs/small/a/evaluation.json"], "judge"),
    ("compare", "report/summary.json", ["runs/small/a/evaluation.json"], "report compare"),
]


@pytest.fixture
def root(tmp_path):
    """Return a results folder with the records of two runs on one text."""
    for number, (rule, output, inputs, command) in enumerate(JOBS):
        path = f"benchmarks/{rule}/{output}.tsv"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"s\tmax_rss\tcpu_time\n2.0\t{number}\tNA\n")
        changed = {"rule": rule, "command": command, "benchmark": path}
        write_job(tmp_path, output, inputs, **changed, started=float(number), ended=number + 1.0)
    return tmp_path


def of_small(root):
    return jobs_of(Lineage(root), "small", ["a"])


def test_a_run_costs_what_its_jobs_and_those_of_its_data_cost(root):
    table = costs(root, of_small(root))
    assert [(row.name, row.value, row.columns["time"].value) for row in table.rows] == [
        ("download", 2, 4.0),
        ("encode", 2, 4.0),
        ("index", 1, 2.0),
        ("count_ngrams", 1, 2.0),
        ("train", 1, 2.0),
        ("evaluate", 1, 2.0),
        ("judge", 1, 2.0),  # a rule of another workflow
        ("all", 9, 18.0),
    ]
    first = table.rows[1].columns
    assert (first["processor time"].value, first["peak memory"].value) == (None, 3 * 2**20)


def test_a_job_knows_its_processor_time_and_memory_better_than_snakemake(root):
    # Snakemake looked at it for the last time when it had taken a second.
    (root / "benchmarks/train/late.tsv").write_text("s\tmax_rss\tcpu_time\n20.0\t50.0\t1.0\n")
    late = {"benchmark": "benchmarks/train/late.tsv", "rule": "train", "workflow": "w", "started": 1.0}
    assert usage(root, Job(**late)) == {"s": 20.0, "max_rss": 50.0, "cpu_time": 1.0}
    noted = Job(**late, cpu_seconds=19.5, peak_rss_mb=70.0)
    assert usage(root, noted) == {"s": 20.0, "max_rss": 70.0, "cpu_time": 19.5}
    # Snakemake adds up the memory of all processes of a job.
    assert usage(root, noted.model_copy(update={"peak_rss_mb": 30.0}))["max_rss"] == 50.0
    for lost in (None, "benchmarks/gone.tsv", "benchmarks/empty.tsv"):
        (root / "benchmarks/empty.tsv").write_text("s\tmax_rss\tcpu_time\n")
        assert usage(root, noted.model_copy(update={"benchmark": lost})) == {
            "cpu_time": 19.5,
            "max_rss": 70.0,
        }


BUSY = """
import subprocess, sys, time
from pathlib import Path
from spider.provenance.codefiles import write_note

busy = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", busy])
exec(busy)
write_note(Path("job.log"), Path("results"))
"""


def test_a_job_notes_the_processor_time_of_its_processes_unless_it_is_one_of_several(tmp_path):
    for size in ("", "1", "2"):
        environment = {**os.environ, "WORLD_SIZE": size, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", BUSY], cwd=tmp_path, env=environment, check=True)
        note = read_note(tmp_path / "job.log", 0.0)
        assert ("cpu_seconds" in note, "peak_rss_mb" in note) == (size != "2", size != "2")
        if size != "2":
            assert note["cpu_seconds"] >= 0.6 and note["peak_rss_mb"] > 5


def test_commands_are_those_of_the_newest_jobs_in_their_order(root):
    failed = {"status": "failed", "command": "train small/a --threads 9", "ended": 99.0}
    write_job(root, "runs/small/a/train.json", **failed)
    own = (
        "data download text 000   # and so on, to 001",
        "data encode text 000 'a b'   # and so on, to 001",
        "data index text",
        "data count-ngrams small 000",  # another run counted
        "train small/a --threads 1",
        "evaluate small/a",
        "judge",
    )
    assert commands(of_small(root), "small") == [f"spider --config run.yaml {line}" for line in own]
    again = {"rule": "index", "command": "data index text --again", "started": 50.0, "ended": 51.0}
    write_job(root, DATA, ["raw/text/000.parquet"], **again)
    found = "".join(commands(of_small(root), "small"))
    assert "spider --config run.yaml data index text --again" in found and "encode" not in found
