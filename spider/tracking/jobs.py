"""Show the invocations of the workflow and their jobs in MLflow's experiment *Pipeline*."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spider.common.files import digest
from spider.common.formatting import redact
from spider.provenance.made import (
    Job,
    Made,
    Stat,
    Workflow,
    flatten,
    records,
    stat_of,
    usage,
    workflows,
)
from spider.tracking.store import Point, Store

#: Files of these kinds are uploaded if they are small.
SHOWN = (".json", ".txt", ".svg", ".png", ".html", ".md")
#: What was measured of a job, by Snakemake's names, and the metrics.
_MEASURED = {
    "cpu_time": "cpu_seconds",
    "max_rss": "peak_rss_mb",
    "io_in": "read_mb",
    "io_out": "written_mb",
}


class Item(NamedTuple):
    """Something that the store shows. ``send`` sends what it lacks, and returns how much that is."""

    kind: str
    name: str
    send: Callable[[], int]


class Pipeline:
    """The workflows and jobs of a results folder. A record is read again when it has changed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._made: dict[Path, tuple[Stat | None, Made]] = {}

    def items(self) -> Iterator[Item]:
        """Yield workflows, and then jobs, whose runs lie below those of their workflows."""
        root = self.store.root
        known = workflows(root)
        changed = {}
        for path in records(root):
            stat = stat_of(path)
            if path not in self._made or self._made[path][0] != stat:
                self._made[path] = None, Made.read(path)
                changed[path] = stat
        jobs = defaultdict[str, list[Job]](list)
        for _, made in self._made.values():
            for job in made.jobs:
                jobs[job.workflow].append(job)
        for one in known.values():
            yield Item("workflows", one.identity, partial(self._workflow, one, jobs[one.identity]))
        for path, stat in changed.items():
            _, made = self._made[path]
            same = defaultdict[str, list[Job]](list)
            for job in made.jobs:
                same[_identity(job)].append(job)
            # The digests of large files follow.
            hashed = {
                key: runs
                for key, runs in same.items()
                if all(one.digest for one in runs[-1].inputs if one.stat)
            }
            for identity, runs in hashed.items():
                yield Item("jobs", runs[-1].name, partial(self._job, identity, runs, known))
            self._made[path] = stat, made

    def _workflow(self, one: Workflow, jobs: list[Job]) -> int:
        state = digest([one.plain(), sorted((job.started, job.status) for job in jobs)])
        if self.store.is_sent("Pipeline", one.identity, state):
            return 0
        tags: dict[str, object] = {"spider.kind": "workflow", "mlflow.source.name": "snakemake"}
        tags |= {"mlflow.user": one.user}
        tags |= {"mlflow.source.git.commit": (one.commit or "").removesuffix("-dirty")}
        tags |= {"git.commit": one.commit, "spider.version": one.version, "spider.host": one.process.host}
        run = self.store.show(
            "Pipeline", one.identity, name=one.identity, start=one.started, tags=tags, params={}
        )
        if one.ended:
            totals = defaultdict[str, float](float, seconds=one.ended - one.started)
            for job in jobs:
                totals[f"seconds/{job.rule}"] += (job.ended or one.ended) - job.started
                totals[f"jobs/{job.status}"] += 1
            at = int(one.ended * 1000)
            self.store.log_points(run.run_id, [(name, value, at, 0) for name, value in totals.items()])
        self.store.client.log_dict(run.run_id, redact(one.plain()), "record.json")
        return self.store.close(run, state, one.status, one.ended)

    def _job(self, identity: str, runs: list[Job], known: dict[str, Workflow]) -> int:
        """Show the runs of a job with the same parameters and inputs as one, with a point for each."""
        last, root = runs[-1], self.store.root
        plain = [job.model_dump(mode="json") for job in runs]
        state = digest(plain)
        if self.store.is_sent("Pipeline", identity, state):
            return 0
        workflow = known.get(last.workflow)
        above = self.store.newest("Pipeline", last.workflow)
        tags = {
            "spider.kind": "job",
            "spider.rule": last.rule,
            "spider.name": last.of,
            "spider.workflow": last.workflow,
            "spider.reason": last.reason,
            "spider.command": last.command,
            "spider.inputs": "\n".join(f"{file.path} {file.digest}" for file in last.inputs),
            "spider.outputs": "\n".join(f"{file.path} {file.digest}" for file in last.outputs if file.stat),
            "spider.error": last.error,
            "spider.code": last.code,
            "spider.processor": last.processor,
            "spider.snapshot": last.snapshot,
            "git.commit": last.commit,
            "mlflow.source.git.commit": (last.commit or "").removesuffix("-dirty"),
            "mlflow.source.name": f"spider {last.name}".replace("/", " "),
            "mlflow.user": workflow.user if workflow else None,
            "mlflow.parentRunId": above.run_id if above else None,
        }
        params = flatten(last.params) | {"threads": last.threads} | flatten({"resources": last.resources})
        run = self.store.show(
            "Pipeline", identity, name=last.name, start=runs[0].started, tags=tags, params=params
        )
        points: list[Point] = [
            ("seconds", job.ended - job.started, int(job.ended * 1000), number)
            for number, job in enumerate(runs)
            if job.ended
        ]
        if last.status == "finished" and last.ended:
            took = usage(root, last)
            points += [
                (f"system/{name}", took[key], int(last.ended * 1000), len(runs) - 1)
                for key, name in _MEASURED.items()
                if key in took
            ]
        self.store.log_points(run.run_id, points)
        names = [Path(file.path).name for file in last.outputs]
        for file in last.outputs:
            path = root / file.path
            if path.suffix in SHOWN and file.stat and stat_of(path) == file.stat:
                # Those of several splits have the same name.
                self.store.upload(run.run_id, path, path.parent.name if names.count(path.name) > 1 else "")
        self.store.client.log_dict(run.run_id, redact({"runs": plain}), "record.json")
        return self.store.close(run, state, last.status, last.ended)


def _identity(job: Job) -> str:
    """Return what equal jobs share: rule, name, parameters, and the content of their inputs."""
    return digest([job.rule, job.of, job.params, [file.digest for file in job.inputs]])
