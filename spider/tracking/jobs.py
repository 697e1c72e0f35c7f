"""Rule jobs and the invocations of the pipeline that hold them.

A job is known by its *identity*, the hash of its rule, name (wildcards), parameters and input digests. The
same work done again is the same job, once more attempted: it finds its record, and its run in the store, and
goes on with it; figures of several attempts are one curve over the attempts, or over the seconds spent. In a
workflow (``SPIDER_WORKFLOW`` names it) a job only writes its record, which costs it nothing: the workflow's
own sender process delivers it. By hand, a job delivers its record itself when it ends, and waits for that a
few seconds at most.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spider.files import digest, read_json
from spider.tracking import sender, spool
from spider.tracking.machine import Sampler

#: Exit code of a job that was told to stop and can be resumed (DESIGN 7).
PREEMPTED = 75


class Job:
    """What a running job may say about itself. Kept in memory; written when the job ends."""

    def __init__(self, results: Path, record: spool.Record) -> None:
        self._results = results
        self._record = record

    @property
    def identity(self) -> str:
        return self._record["identity"]

    def metric(self, key: str, value: float, step: int | None = None) -> None:
        """Log a number (``bytes``, ``bpb``, ...); its step is the attempt's where none is given."""
        step = self._record["attempt"] if step is None else step
        self._record["metrics"].append(_metric(key, value, step))

    def tag(self, key: str, value: object) -> None:
        self._record["tags"][key] = str(value)

    def artifact(self, path: Path) -> None:
        """Show a small file (JSON, a plot, a sample). One over 10 MiB is refused with a warning."""
        if entry := spool.artifact(self._results, path):
            self._record["artifacts"].append(entry)

    def dataset(self, name: str, digest: str, source: str, *, context: str = "input") -> None:
        """Name a dataset the job read; ``source`` says where it came from (path, or repo@revision)."""
        self._record["datasets"].append(
            {"name": name, "digest": digest, "source": source, "context": context}
        )


@contextlib.contextmanager
def job(
    rule: str,
    name: str,
    *,
    results: Path,
    params: dict[str, Any] | None = None,
    inputs: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
) -> Iterator[Job]:
    """Record one rule job from start to end; what it raises passes through, recorded in one line.

    Args:
        rule: the rule's name, ``encode``.
        name: what its wildcards say, ``demo/000``; may be empty.
        results: root of the results folder.
        params: what decides the job's output besides its inputs; JSON-like.
        inputs, outputs: files or folders, recorded by path and digest (`spool.file_digest`).
    """
    values = spool.redact(spool.plain(params or {}))
    read = spool.file_list(results, inputs)
    identity = digest([rule, name, values, [f["digest"] for f in read]])
    record = spool.new_run("job", identity, f"{rule} {name}".strip(), values)
    record |= {"workflow": os.environ.get("SPIDER_WORKFLOW"), "inputs": read, "outputs": []}
    record |= _earlier(spool.record_path(results, "jobs", identity))
    record["tags"] |= {"spider.rule": rule, "spider.name": name, "spider.spec": digest(values)}
    if not spool.enabled():
        yield Job(results, record)
        return
    spool.mark_dead(results)
    spool.write(results, "jobs", record)
    before, sampler = _usage(), Sampler().start()
    try:
        yield Job(results, record)
        spool.end_run(record, "finished")
    except SystemExit as error:
        done = error.code in (None, 0)
        status = "finished" if done else "killed" if error.code == PREEMPTED else "failed"
        spool.end_run(record, status, None if done else f"exit code {error.code}")
        raise
    except KeyboardInterrupt as error:
        spool.end_run(record, "killed", error)
        raise
    except BaseException as error:
        spool.end_run(record, "failed", error)
        raise
    finally:
        sampler.stop()
        record["outputs"] = [f for f in spool.file_list(results, outputs) if f["digest"]]
        cost = _cost(before, record, sampler)
        record["metrics"] += [_metric(key, value, record["attempt"]) for key, value in cost.items()]
        for at, row in sampler.rows:
            second = int(record["spent"] + at - record["started"])
            record["metrics"] += [_metric(key, value, second, at) for key, value in row.items()]
        record["spent"] += cost["seconds"]
        spool.write(results, "jobs", record)
        if record["workflow"] is None:
            sender.send(results)


def _metric(key: str, value: float, step: int, at: float | None = None) -> dict[str, Any]:
    return {"key": key, "value": float(value), "step": step, "time": time.time() if at is None else at}


def _earlier(path: Path) -> dict[str, Any]:
    """What attempts at this job before left: how many, seconds as far as they could tell, and figures, which
    may not have been sent yet."""
    try:
        before = read_json(path)
        return {"attempt": before["attempt"] + 1, "spent": before["spent"], "metrics": before["metrics"]}
    except (ValueError, KeyError, TypeError, OSError):  # there is none, or none that can be read
        return {"attempt": 0, "spent": 0.0}


def _usage() -> float:
    """CPU seconds of this process and of its children that ended."""
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _cost(cpu_before: float, record: spool.Record, sampler: Sampler) -> dict[str, float]:
    peak_kib = max(
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    cost = {
        "seconds": record["ended"] - record["started"],
        "system/cpu_seconds": _usage() - cpu_before,
        "system/peak_rss_bytes": peak_kib * 1024.0,
    }
    return cost if sampler.energy is None else cost | {"system/gpu_energy_joules": sampler.energy}


# ------------------------------------------------------------------------------------------------ pipeline

_senders: dict[str, sender.Sender] = {}


def configure(config: Any) -> None:
    """Hand the ``tracking:`` block of a configuration to this process and those it starts, by environment.

    ``SPIDER_TRACKING=off`` where disabled, ``SPIDER_TRACKING_URI`` for the store,
    ``SPIDER_TRACKING_EXPERIMENT`` for whose experiments; what the environment already says wins.
    """
    block = spool.plain(config).get("tracking") or {}
    if not block.get("enabled", True):
        os.environ.setdefault("SPIDER_TRACKING", "off")
    for key in ("uri", "experiment"):
        if block.get(key):
            os.environ.setdefault(f"SPIDER_TRACKING_{key.upper()}", block[key])


def open_pipeline(results: Path, config: Any) -> str:
    """Open an invocation of the workflow (``onstart``) and start the process that sends its records.

    Sets ``SPIDER_WORKFLOW`` and, from ``config`` (a `spider.config.Config` or a mapping), what `configure`
    sets, for the jobs to inherit. Does not import mlflow: the sender creates the store where there is none,
    alone.

    Returns:
        The invocation's id, for `close_pipeline`.
    """
    configure(config)
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    os.environ["SPIDER_WORKFLOW"] = identity
    if not spool.enabled():
        return identity
    spool.mark_dead(results)
    record = spool.new_run("workflow", identity, identity, {})
    record["config"] = spool.plain(config)
    record["tags"]["spider.config"] = digest(record["config"])
    spool.write(results, "workflows", record)
    _senders[identity] = sender.start(results)
    return identity


def close_pipeline(
    results: Path, workflow_id: str, status: str, log: Path | None = None, *, timeout: float = 20
) -> None:
    """Close an invocation (``onsuccess``: status "finished"; ``onerror``: "failed") and deliver what is left.

    Jobs of the invocation that still say "running" and whose process is gone are marked as killed. ``log`` is
    shown as an artifact, secrets removed. Waits for the store ``timeout`` seconds at most; what is then
    missing stays in the spool, and one warning says so.
    """
    if status not in ("finished", "failed", "killed"):
        raise ValueError(f"status of a workflow: finished, failed or killed (got {status!r})")
    os.environ.pop("SPIDER_WORKFLOW", None)
    path = spool.record_path(results, "workflows", workflow_id)
    if not spool.enabled() or not path.exists():
        return
    spool.mark_dead(results, workflow=workflow_id)
    record = read_json(path)
    spool.end_run(record, status)
    totals: dict[str, float] = {"seconds": record["ended"] - record["started"]}
    for file in spool.folder(results, "jobs").glob("*.json"):
        one = read_json(file)
        if one["workflow"] == workflow_id:
            took = (one["ended"] or record["ended"]) - one["started"]
            for key, value in ((f"seconds/{one['tags']['spider.rule']}", took), (f"jobs/{one['status']}", 1)):
                totals[key] = totals.get(key, 0) + value
    record["metrics"] = [
        {"key": k, "value": v, "step": 0, "time": record["ended"]} for k, v in totals.items()
    ]
    if log is not None and (entry := spool.artifact(results, log)):
        record["artifacts"] = [entry]
    spool.write(results, "workflows", record)
    (_senders.pop(workflow_id, None) or sender.start(results)).stop(timeout)
