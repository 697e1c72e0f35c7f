"""Rule jobs and the invocations of the pipeline that hold them.

A job is known by its *identity*, the hash of its rule, name (wildcards), parameters and input digests. The
same work done again is the same job, once more attempted: it finds its record, and its run in the store, and
goes on with it; figures of several attempts are one curve over the attempts, or over the seconds spent. In a
workflow a job only writes its record, and the workflow's own sender process delivers it. By hand, a job
delivers its record itself when it ends, and waits for that a few seconds at most.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from spider.files import digest
from spider.tracking import spool
from spider.tracking.machine import Sampler
from spider.tracking.records import Run, Status, file_list
from spider.tracking.sender import Sender
from spider.tracking.target import Target, configure


@contextlib.contextmanager
def job(
    rule: str,
    name: str,
    *,
    results: Path,
    params: dict[str, Any] | None = None,
    inputs: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
) -> Iterator[Run]:
    """Record one rule job from start to end; what it raises passes through, recorded in one line.

    ``name`` is what the rule's wildcards say, ``demo/000``, or empty; ``params`` what decides the output
    besides the inputs. Inputs and outputs, files or folders, are recorded by `records.file_digest`.
    """
    target = Target.here()
    values = spool.redact(to_jsonable_python(params or {}))
    read = file_list(results, inputs)
    identity = digest([rule, name, values, [file.digest for file in read]])
    record = Run(kind="job", identity=identity, name=f"{rule} {name}".strip(), params=values, inputs=read)
    record.workflow, record._results = target.workflow, results
    record.tags |= {"spider.rule": rule, "spider.name": name, "spider.spec": digest(values)}
    if before := spool.before(results, record):
        # Their figures may not have been sent yet; their seconds are as far as they could tell.
        record.attempt, record.spent, record.metrics = before.attempt + 1, before.spent, before.metrics
    if not target.enabled:
        yield record
        return
    spool.mark_dead(results)
    spool.write(results, record)
    sampler = Sampler()
    try:
        with record.until_its_end():
            yield record
    finally:
        totals = sampler.stop()
        record.outputs = [file for file in file_list(results, outputs) if file.digest]
        seconds = (record.ended or time.time()) - record.started
        for key, value in {"seconds": seconds, **totals}.items():
            record.metric(key, value)
        for at, row in sampler.rows:
            for key, value in row.items():
                record.metric(key, value, int(record.spent + at - record.started), at)
        record.spent += seconds
        spool.write(results, record)
        if record.workflow is None:
            Sender(results).stop()


# ------------------------------------------------------------------------------------------------ pipeline

_senders: dict[str, Sender] = {}


def open_pipeline(results: Path, config: Any) -> str:
    """Open an invocation of the workflow (``onstart``) and start the process that sends its records.

    Tells the jobs, by environment, what `configure` takes from ``config``, and to which invocation they
    belong. Returns the invocation's id, for `close_pipeline`.
    """
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    configure(config)
    os.environ["SPIDER_WORKFLOW"] = identity
    if not Target.here().enabled:
        return identity
    spool.mark_dead(results)
    record = Run(kind="workflow", identity=identity, name=identity, config=to_jsonable_python(config))
    record.tag("spider.config", digest(record.config))
    spool.write(results, record)
    _senders[identity] = Sender(results)
    return identity


def close_pipeline(results: Path, workflow_id: str, status: Status, *, timeout: float = 20) -> None:
    """Close an invocation (``onsuccess``: status "finished"; ``onerror``: "failed") and deliver what is left.

    Jobs of the invocation that still say "running" and whose process is gone are marked as killed. Waits for
    the store ``timeout`` seconds at most; what is then missing stays in the spool, and one warning says so.
    """
    if status not in ("finished", "failed", "killed"):
        raise ValueError(f"status of a workflow: finished, failed or killed (got {status!r})")
    os.environ.pop("SPIDER_WORKFLOW", None)
    path = spool.record_path(results, "workflows", workflow_id)
    if not Target.here().enabled or not path.exists():
        return
    spool.mark_dead(results, workflow=workflow_id)
    record = Run.read(path)
    record.end(status)
    assert record.ended is not None
    totals: dict[str, float] = defaultdict(float)
    for _, file in spool.records(results, ["jobs"]):
        one = Run.read(file)
        if one.workflow == workflow_id:
            totals[f"seconds/{one.tags['spider.rule']}"] += (one.ended or record.ended) - one.started
            totals[f"jobs/{one.status}"] += 1
    for key, value in {"seconds": record.ended - record.started, **totals}.items():
        record.metric(key, value, at=record.ended)
    spool.write(results, record)
    (_senders.pop(workflow_id, None) or Sender(results)).stop(timeout)
