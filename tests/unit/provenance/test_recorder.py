"""What Snakemake says of jobs is in their records, with digests and the reasons of failures."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from spider.common.files import write_json
from spider.config import load_config
from spider.provenance.made import File, Job, Made, file_at, made_path, stat_of, workflows
from spider.provenance.recorder import Hashes, Recorder

CONFIG = {
    "datasets": {"d": {"source": {"kind": "pydocs"}}},
    "runs": {"r": {"data": "d", "model": "tiny", "stages": [{"name": "s", "max_steps": 1}]}},
}


class Output(str):
    async def exists(self):
        return stat_of(self) is not None


class Persistence:
    """Snakemake's own records, which know nothing."""

    def __getattr__(self, name):
        if name == "finished":
            return self._finished
        return lambda *arguments, **options: False

    async def _finished(self, job):
        pass


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = []
    made = Recorder(
        tmp_path / "results",
        Persistence(),
        write=True,
        elsewhere=False,
        config=load_config(CONFIG),
        snapshot="0123",
        on_begin=lambda: events.append("begin"),
        on_end=lambda: events.append("end"),
    )
    made.events = events
    yield made
    made.close()
    logging.getLogger("snakemake.logging").removeHandler(made)


def job_of(root, number=1, **params):
    """Return a job as Snakemake describes it."""
    output = Output(root / "shards/d/train/000.bin")
    return SimpleNamespace(
        jobid=number,
        rule=SimpleNamespace(name="encode_with_ngrams"),
        wildcards_dict={"dataset": "d", "part": "000"},
        params={"spider": "trap : TERM; spider", "identity": {"validation": 0.1}, **params},
        non_derived_params=[{"validation": 0.1}],
        input=["own.txt", str(root / "raw/d/000.parquet")],
        output=[output],
        log=[str(root / "logs/encode/d/000.log")],
        benchmark=str(root / "benchmarks/encode/shards/d/train/000.tsv"),
        threads=2,
        resources={"_cores": 2, "mem_mb": 100},
        shellcmd=f"trap : TERM; spider --config c --log {root}/logs/encode/d/000.log data encode d 000",
        dag=SimpleNamespace(reason=lambda job: "Missing output files"),
    )


def run(recorder, job, error=None):
    """Let Snakemake run a job."""
    recorder.started(job)
    if error is None:
        write_json(recorder.root / "shards/d/train/000.bin", "made")
    else:
        (recorder.root / "logs/encode/d").mkdir(parents=True, exist_ok=True)
        (recorder.root / "logs/encode/d/000.log").write_text(f"12:00:00 data encode: error: {error}\n")
        said = {"event": LogEvent.JOB_ERROR, "jobid": job.jobid}
        logging.getLogger("snakemake.logging").error("Error in rule", extra=said)
    asyncio.run(recorder.finished(job))


def test_failed_attempts_stay_with_their_reasons_and_do_not_replace_what_was_made(recorder):
    run(recorder, job_of(recorder.root))
    path = made_path(recorder.root, "shards/d/train/000.bin")
    before = Made.read(path).params
    changed = job_of(recorder.root, 2)
    changed.non_derived_params = [{"validation": 0.2}]
    run(recorder, changed, "no space left on the disk")
    run(recorder, changed, "password=sesame is wrong")
    recorder.close()
    made = Made.read(path)
    assert [job.status for job in made.jobs] == ["finished", "failed", "failed"] and made.params == before
    assert made.jobs[1].error == "no space left on the disk" and "sesame" not in made.jobs[2].error
    assert [one.status for one in workflows(recorder.root).values()] == ["failed"]


def test_a_job_that_runs_when_its_workflow_ends_was_killed(recorder):
    recorder.started(job_of(recorder.root))
    recorder.close()
    (job,) = Made.read(made_path(recorder.root, "shards/d/train/000.bin")).jobs
    assert job.status == "killed" and job.ended
    assert [one.status for one in workflows(recorder.root).values()] == ["killed"]


def test_a_digest_that_the_results_hold_is_not_computed_again(tmp_path):
    raw, shard = tmp_path / "raw/d/000.parquet", tmp_path / "shards/d/train/000.bin"
    for path in (raw, shard):
        write_json(path, "content")
    write_json(raw.with_suffix(".json"), {"bytes": raw.stat().st_size, "sha256": "of the download"})
    shards = [{"file": "train/000.bin", "sha256": "of the index"}]
    write_json(tmp_path / "shards/d/metadata.json", {"splits": {"train": {"shards": shards}}})
    job = Job(rule="encode", workflow="w", started=0, inputs=[file_at(tmp_path, raw)])
    found = Hashes(tmp_path, []).of(job.model_copy(update={"outputs": [file_at(tmp_path, shard)]}))
    assert found["inputs"][0].digest == "sha256:of the download"
    assert found["outputs"][0].digest == "sha256:of the index"
    known = job.model_copy(update={"outputs": [File(path="a", stat=(1, 2), digest="sha256:known")]})
    again = job.model_copy(update={"inputs": [File(path="a", stat=(1, 2))]})
    assert Hashes(tmp_path, [Made(jobs=[known])]).of(again)["inputs"][0].digest == "sha256:known"
