"""What is tracked: jobs, the invocations of the workflow that hold them, trainings and their checkpoints.

A job is known by its *identity*, the hash of its rule, name (wildcards), parameters and input digests. The
same work done again is the same job, once more attempted: it finds its record, and its run in the store, and
goes on with it; figures of several attempts are one curve over the attempts, or over the seconds spent.

A training is one top-level run in the store whatever its stages and restarts. Its key is kept in
``runs/{run}/tracking.json``; the curves are the stages' ``metrics.jsonl``, which `sync` follows. A stage
trained anew (another spec, or its rows that were already sent are gone) would draw a second line over the
first: it begins a new key, and the stages before it are drawn there again.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.errors import RESUME_ME
from spider.evaluation.result import Row
from spider.files import digest, read_json
from spider.results import Results, StageFolder
from spider.tracking import records, spool, target
from spider.tracking.machine import Sampler
from spider.tracking.records import (
    Checkpoint,
    Choice,
    Evaluation,
    File,
    Run,
    Status,
    file_list,
    relative,
    size_for_now,
)
from spider.tracking.sync import Sender, rows_were_replaced
from spider.tracking.target import configure, one_line

log = logging.getLogger(__name__)


@contextmanager
def _kept(results: Path, record: Run, *, live: bool) -> Iterator[None]:
    """Write the record as the block begins and ends; what that raises passes through, recorded in one line.

    By hand it is delivered too, at the end (which waits a few seconds at most) or, if ``live``, all the
    while; in a workflow, that one's sender does.
    """
    alone = target.workflow() is None
    spool.write(results, record)
    sender = Sender(results) if alone and live else None
    try:
        yield
    except BaseException as error:
        exits = isinstance(error, SystemExit)
        if code := getattr(error, "code" if exits else "exit_code", 1):
            stopped = isinstance(error, KeyboardInterrupt) or code == RESUME_ME
            record.end("killed" if stopped else "failed", f"exit code {code}" if exits else one_line(error))
        raise
    finally:
        if record.ended is None:
            record.end("finished")
        spool.write(results, record)
        if alone:
            (sender or Sender(results)).stop()


@contextmanager
def job(
    rule: str,
    name: str,
    *,
    results: Path,
    params: dict[str, Any] | None = None,
    inputs: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
    hashed_later: Sequence[Path] = (),
    command: str | None = None,
) -> Iterator[Run]:
    """Record one rule job from start to end.

    Inputs and outputs are files or folders, recorded by `records.file_digest`.

    Args:
        name: what the rule's wildcards say, ``demo/000``, or empty.
        params: what decides the output besides the inputs.
        hashed_later: further outputs that are large, and whose content a later job hashes (`log_hashes`).
        command: its command line, from the name of the command on.
    """
    values = spool.redact(to_jsonable_python(params or {}))
    read = file_list(results, inputs)
    identity = digest([rule, name, values, [file.digest for file in read]])
    record = Run(kind="job", identity=identity, name=f"{rule} {name}".strip(), params=values, inputs=read)
    record.workflow, record._results, record.command = target.workflow(), results, command
    record.tags |= {"spider.rule": rule, "spider.name": name, "spider.spec": digest(values)}
    if before := spool.read_run(spool.record_path(results, "jobs", identity)):
        # Their figures may not have been sent yet; their seconds are as far as they could tell.
        record.attempt, record.spent, record.metrics = before.attempt + 1, before.spent, before.metrics
    if not target.enabled():
        yield record
        return
    spool.mark_dead(results)
    with _kept(results, record, live=False):
        sampler = Sampler()
        try:
            yield record
        finally:
            seconds, totals = time.time() - record.started, sampler.stop()
            made = file_list(results, outputs) + file_list(results, hashed_later, size_for_now)
            record.outputs = [file for file in made if file.digest]
            for key, value in {"seconds": seconds, **totals}.items():
                record.metric(key, value)
            for at, row in sampler.rows:
                for key, value in row.items():
                    record.metric(key, value, int(record.spent + at - record.started), at)
            record.spent += seconds


def log_hashes(job: Run, contents: Mapping[Path, str]) -> None:
    """Name files as inputs of a running job by the SHA-256 that it has computed of them.

    Of the jobs that made a file and left the hashing to this one, the last shows the hash from now on, too.
    """
    if not target.enabled():
        return
    results = job._results
    read = [File(path=relative(results, path), digest=f"sha256:{one}") for path, one in contents.items()]
    job.inputs = [*job.inputs, *read]
    sizes = {relative(results, path): f"size:{path.stat().st_size}" for path in contents}
    made: dict[str, Run] = {}
    for _, path in spool.records(results, ["jobs"]):
        if (run := spool.read_run(path)) is None or run.ended is None:
            continue
        for file in run.outputs:
            if file.path in sizes and (file.path not in made or made[file.path].started < run.started):
                made[file.path] = run
    known = {file.path: file for file in read}
    for run in {run.identity: run for run in made.values()}.values():
        outputs = [
            known[file.path] if made.get(file.path) is run and file.digest == sizes[file.path] else file
            for file in run.outputs
        ]
        if outputs != run.outputs:
            run.outputs = outputs
            spool.write(results, run)


# ------------------------------------------------------------------------------------------------ pipeline

_senders: dict[str, Sender] = {}


def open_pipeline(results: Path, config: Any) -> str:
    """Open an invocation of the workflow (``onstart``), start the process that sends its records, and return
    its id. Tells the jobs, by environment, what `configure` takes from ``config``, and where they belong."""
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    configure(config)
    os.environ["SPIDER_WORKFLOW"] = identity
    if target.enabled():
        record = Run(kind="workflow", identity=identity, name=identity, config=to_jsonable_python(config))
        record.tag("spider.config", digest(record.config))
        spool.write(results, record)
        _senders[identity] = Sender(results)
    return identity


def close_pipeline(results: Path, workflow_id: str, status: Status, *, timeout: float = 20) -> None:
    """Close an invocation (``onsuccess``: status "finished"; ``onerror``: "failed") and deliver what is left.

    Its jobs that still say "running" and whose process is gone are marked as killed. Waits for the store
    ``timeout`` seconds at most; what is then missing stays in the spool, and one warning says so.
    """
    if status not in ("finished", "failed", "killed"):
        raise ValueError(f"status of a workflow: finished, failed or killed (got {status!r})")
    os.environ.pop("SPIDER_WORKFLOW", None)
    path = spool.record_path(results, "workflows", workflow_id)
    if not target.enabled() or not path.exists():
        return
    spool.mark_dead(results, workflow=workflow_id)
    record = Run.read(path)
    record.end(status)
    ended = record.ended or time.time()
    totals = defaultdict(float, seconds=ended - record.started)
    for _, file in spool.records(results, ["jobs"]):
        one = Run.read(file)
        if one.workflow == workflow_id:
            totals[f"seconds/{one.tags['spider.rule']}"] += (one.ended or ended) - one.started
            totals[f"jobs/{one.status}"] += 1
    for key, value in totals.items():
        record.metric(key, value, at=ended)
    spool.write(results, record)
    (_senders.pop(workflow_id, None) or Sender(results)).stop(timeout)


# ----------------------------------------------------------------------------------------------- trainings


def _pointer(results: Path, run: str) -> dict[str, Any]:
    """``tracking.json`` of a run: its key, and the identity that each stage was last trained under."""
    path = Results(results).match(run)
    return read_json(path) if path.exists() else {"key": secrets.token_hex(8), "stages": {}}


def training(
    results: Path, spec: StageSpec, *, dataset: tuple[str, str, str]
) -> AbstractContextManager[None]:
    """Track the training of one stage: its spec, its state, and its curves while they grow.

    ``dataset`` is (name, digest, source) of what it trains on.
    """
    return _kept(results, _begin(results, spec, dataset), live=True) if target.enabled() else nullcontext()


def _begin(results: Path, spec: StageSpec, dataset: tuple[str, str, str]) -> Run:
    """The run's record as this stage begins, under a new key where its rows would cross rows sent."""
    match, folder = _pointer(results, spec.run), Results(results).stage(spec.run, spec.stage)
    known = match["stages"].get(spec.stage)
    if known and (known != spec.identity or rows_were_replaced(results, folder.metrics)):
        log.info("run %s: stage %s is trained anew, in a new tracked run", spec.run, spec.stage)
        match["key"] = secrets.token_hex(8)
    match["stages"][spec.stage] = spec.identity
    spool.put(Results(results).match(spec.run), match)
    settings = spec.model_dump(mode="json", exclude={"format", "run", "stage", "index"})
    settings[spec.stage] = {name: settings.pop(name) for name in ("settings", "data")}
    record = Run(kind="training", identity=match["key"], name=spec.run, params=settings)
    if before := spool.read_run(spool.record_path(results, "training", record.identity)):
        record.started, record.datasets = before.started, before.datasets
        record.params, record.tags = before.params | record.params, before.tags | record.tags
    record.dataset(*dataset, context=f"train {spec.stage}")
    record.tags |= {"spider.run": spec.run, "spider.stage": spec.stage}
    record.tags[f"spider.spec.{spec.stage}"] = spec.identity
    return record


def _key_of(results: Path, run: str) -> str:
    """Key of a run, made here for one that was trained with tracking off."""
    match = _pointer(results, run)
    if not spool.record_path(results, "training", match["key"]).exists():
        spool.put(Results(results).match(run), match)
        tags = records.origin() | {"spider.run": run}
        record = Run(kind="training", identity=match["key"], name=run, tags=tags)
        record.end("finished")
        spool.write(results, record)
    return match["key"]


def log_checkpoint(
    results: Path, run: str, stage: str, receipt: Receipt, folder: StageFolder | None = None
) -> None:
    """Record a stage's last checkpoint as a model, by path, step and digest; no weights are copied. With a
    ``folder`` in the stage's, the one that it is compressed into there.

    Every number or text in the receipt becomes a parameter of the model.
    """
    if not target.enabled():
        return
    checkpoint = (folder or Results(results).stage(run, stage)).path / receipt.checkpoint
    scalars = {k: v for k, v in receipt if isinstance(v, (str, int, float)) and k != "format"}
    record = Checkpoint(
        identity=digest([run, stage, receipt.weights]),
        name=f"{run}-{stage}-{folder.path.name}" if folder else f"{run}-{stage}",
        training=_key_of(results, run),
        step=receipt.global_step,
        params=scalars | {"path": records.relative(results, checkpoint)},
        tags=records.origin() | {"spider.run": run, "spider.stage": stage, "spider.digest": receipt.weights},
    )
    spool.write(results, record)


def log_scores(
    results: Path,
    run: str,
    stage: str,
    metrics: dict[str, float],
    artifacts: Sequence[Path] = (),
    *,
    rows: Sequence[Row] = (),
    of: str | None = None,
    folder: StageFolder | None = None,
    dataset: tuple[str, str, str] | None = None,
    curves: dict[str, list[tuple[int, float]]] | None = None,
) -> None:
    """Record numbers as scores of a stage's checkpoint, on its model and on its training run.

    Args:
        rows: the measured rows, which the registry's descriptions show.
        of: name of what measured them, for all but the stage's evaluation.
        folder: folder of a compressed model that they are of.
        dataset: name, digest and source of the text.
        curves: pairs of step and value over something other than training steps, shown as
            ``val/{name}/{stage}``.

    Raises:
        ValueError: the stage has no receipt (``train.json``).
    """
    if not target.enabled():
        return
    receipt = Receipt.read((folder or Results(results).stage(run, stage)).receipt)
    model = digest([run, stage, receipt.weights])
    if not spool.record_path(results, "models", model).exists():
        log_checkpoint(results, run, stage, receipt, folder)
    record = Evaluation(
        identity=digest([model, of]) if of else model,
        model=model,
        training=_key_of(results, run),
        stage=stage,
        step=receipt.global_step,
        time=time.time(),
        metrics=metrics,
        rows=list(rows),
        dataset=dataset,
        curves=curves or {},
        artifacts=records.shown(results, artifacts),
    )
    spool.write(results, record)


def log_choice(results: Path, run: str, stage: str, *, weights: str, bpb: float, text_sha256: str) -> None:
    """Record which of a run's stages is the best: its weights, and what they scored on which text."""
    if target.enabled():
        choice = Choice(
            identity=digest(run), run=run, stage=stage, weights=weights, bpb=bpb, text_sha256=text_sha256
        )
        spool.write(results, choice)
