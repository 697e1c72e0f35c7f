"""Record jobs, invocations of the workflow, trainings and checkpoints.

The *identity* of a job is the hash of its rule, name (wildcards), parameters and input digests. If the same
job runs again, it is another attempt: it continues its record and its run in the store. Metrics of several
attempts are one curve over the attempts, or over the seconds of all attempts.

A training is one top-level run in the store, with all its stages and restarts. ``runs/{run}/tracking.json``
holds its key, and `sync` sends the ``metrics.jsonl`` of the stages as its curves. A stage may be trained
again with another spec, or without the rows that were sent already. Its curve would then have two values at a
step. So it begins a run with a new key, which gets the curves of the stages before it too.
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
from spider.codefiles import code_files
from spider.config import StageSpec
from spider.errors import RESUME_ME
from spider.evaluation import result
from spider.evaluation.records import Evaluation as Measured
from spider.evaluation.result import Result
from spider.files import digest, read_json
from spider.results import CompressedFolder, Results, StageFolder
from spider.tracking import code, records, spool, target
from spider.tracking.machine import Sampler, processor, threads
from spider.tracking.records import Checkpoint, Choice, Evaluation, Run, Status, file_list
from spider.tracking.store import RANKING
from spider.tracking.sync import Sender, rows_were_replaced
from spider.tracking.target import configure, one_line

log = logging.getLogger(__name__)


@contextmanager
def _recorded(results: Path, record: Run, *, live: bool) -> Iterator[None]:
    """Write the record at the beginning and at the end of the block, with the error that the block raises.

    Outside of a workflow, also send it: at the end, for a few seconds at most, or continuously if ``live``.
    In a workflow its own sender does so.
    """
    alone = target.workflow() is None
    code_files()  # the code as it is now, which may be edited while the job runs
    spool.write(results, record)
    sender = Sender(results) if alone and live else None
    try:
        yield
    except BaseException as error:
        exits = isinstance(error, SystemExit)
        status = getattr(error, "code" if exits else "exit_code", 1)
        if status:
            stopped = isinstance(error, KeyboardInterrupt) or status == RESUME_ME
            reason = f"exit code {status}" if exits else one_line(error)
            record.end("killed" if stopped else "failed", reason)
        raise
    finally:
        if record.ended is None:
            record.end("finished")
        stage = record.tags.get("spider.stage")
        record.tag(f"spider.code.{stage}" if stage else "spider.code", code.record(results))
        record.tag("spider.processor", processor())
        record.tag("spider.threads", threads())
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
    command: str | None = None,
    config: Path | None = None,
) -> Iterator[Run]:
    """Record a job of a rule from its start to its end.

    Inputs and outputs are files or folders, recorded by `records.file_digest`.

    Args:
        name: the values of the rule's wildcards, such as ``demo/000``, or an empty string.
        params: the settings that determine the output together with the inputs.
        command: the command line, from the name of the command on.
        config: the configuration that the job reads; a snapshot in the results folder is recorded by name.
    """
    values = spool.redact(to_jsonable_python(params or {}))
    read = file_list(results, inputs)
    identity = digest([rule, name, values, [file.digest for file in read]])
    record = Run(kind="job", identity=identity, name=f"{rule} {name}".strip(), params=values, inputs=read)
    record.workflow = target.workflow()
    record.command = command
    record._results = results
    record.tags |= {"spider.rule": rule, "spider.name": name, "spider.spec": digest(values)}
    if config and config.parent.resolve() == (results / "configs").resolve():
        record.tags["spider.snapshot"] = config.stem
    if before := spool.read_run(spool.record_path(results, "jobs", identity)):
        record.attempt = before.attempt + 1
        record.spent = before.spent
        record.metrics = before.metrics  # they may not be sent yet
    if not target.enabled():
        yield record
        return
    spool.mark_dead(results)
    with _recorded(results, record, live=False):
        sampler = Sampler()
        try:
            yield record
        finally:
            seconds = time.time() - record.started
            totals = sampler.stop()
            record.outputs = [file for file in file_list(results, outputs) if file.digest]
            for key, value in {"seconds": seconds, **totals}.items():
                record.metric(key, value)
            for at, row in sampler.rows:
                for key, value in row.items():
                    record.metric(key, value, int(record.spent + at - record.started), at)
            record.spent += seconds


# ------------------------------------------------------------------------------------------------ pipeline

_senders: dict[str, Sender] = {}


def open_pipeline(results: Path, config: Any) -> str:
    """Open an invocation of the workflow (``onstart``) and return its id.

    Start the process that sends its records. Set environment variables for its jobs: this id, and the
    settings of ``config`` (`configure`).
    """
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    configure(config)
    os.environ["SPIDER_WORKFLOW"] = identity
    if target.enabled():
        record = Run(kind="workflow", identity=identity, name=identity, config=to_jsonable_python(config))
        record.tag("spider.config", digest(record.config))
        record.tag("spider.environment", code.record_environment(results))
        spool.write(results, record)
        _senders[identity] = Sender(results)
    return identity


def close_pipeline(results: Path, workflow_id: str, status: Status, *, timeout: float = 20) -> None:
    """Close an invocation (``onsuccess``: status "finished"; ``onerror``: "failed") and send its records.

    Mark its running jobs whose process has ended as killed. Wait for the store ``timeout`` seconds at most.
    Records that are not sent by then stay in the spool, and a warning names the remedy.
    """
    os.environ.pop("SPIDER_WORKFLOW", None)
    path = spool.record_path(results, "workflows", workflow_id)
    if not target.enabled() or not path.exists():
        return
    spool.mark_dead(results, workflow=workflow_id)
    record = Run.read(path)
    record.end(status)
    ended = record.ended or time.time()
    totals = defaultdict(float, seconds=ended - record.started)
    for run in spool.jobs(results):
        if run.workflow == workflow_id:
            totals[f"seconds/{run.tags['spider.rule']}"] += (run.ended or ended) - run.started
            totals[f"jobs/{run.status}"] += 1
    for key, value in totals.items():
        record.metric(key, value, at=ended)
    spool.write(results, record)
    (_senders.pop(workflow_id, None) or Sender(results)).stop(timeout)


# ----------------------------------------------------------------------------------------------- trainings


def _pointer(results: Path, run: str) -> dict[str, Any]:
    """Return the content of a run's ``tracking.json``: its key, and the last identity of each stage."""
    path = Results(results).match(run)
    return read_json(path) if path.exists() else {"key": secrets.token_hex(8), "stages": {}}


def training(
    results: Path, spec: StageSpec, *, datasets: Sequence[tuple[str, str, str]]
) -> AbstractContextManager[None]:
    """Track the training of a stage: its spec, its status and its growing curves.

    ``datasets`` are the name, the digest and the source of each training text.
    """
    return (
        _recorded(results, _begin(results, spec, datasets), live=True) if target.enabled() else nullcontext()
    )


def _begin(results: Path, spec: StageSpec, datasets: Sequence[tuple[str, str, str]]) -> Run:
    """Return the record of the run for this stage, with a new key if the stage is trained again."""
    pointer = _pointer(results, spec.run)
    folder = Results(results).stage(spec.run, spec.stage)
    before = pointer["stages"].get(spec.stage)
    if before and (before not in spec.identities or rows_were_replaced(results, folder.metrics)):
        log.info("run %s: stage %s is trained again, in a new tracked run", spec.run, spec.stage)
        pointer["key"] = secrets.token_hex(8)
    pointer["stages"][spec.stage] = spec.identity
    spool.put(Results(results).match(spec.run), pointer)
    settings = spec.model_dump(mode="json", exclude={"format", "run", "stage", "index"})
    settings[spec.stage] = {name: settings.pop(name) for name in ("settings", "data")}
    record = Run(kind="training", identity=pointer["key"], name=spec.run, params=settings)
    if earlier := spool.read_run(spool.record_path(results, "training", record.identity)):
        record.started = earlier.started
        record.datasets = earlier.datasets
        record.params = earlier.params | record.params
        record.tags = earlier.tags | record.tags
    for dataset in datasets:
        record.dataset(*dataset, context=f"train {spec.stage}")
    record.tags |= {"spider.run": spec.run, "spider.stage": spec.stage}
    record.tags[f"spider.spec.{spec.stage}"] = spec.identity
    return record


def _key_of(results: Path, run: str) -> str:
    """Return the key of a run; write its record if it was trained with tracking off."""
    pointer = _pointer(results, run)
    if not spool.record_path(results, "training", pointer["key"]).exists():
        spool.put(Results(results).match(run), pointer)
        tags = records.origin() | {"spider.run": run}
        record = Run(kind="training", identity=pointer["key"], name=run, tags=tags)
        record.end("finished")
        spool.write(results, record)
    return pointer["key"]


def log_checkpoint(results: Path, folder: StageFolder, *, earlier: Receipt | None = None) -> None:
    """Record the checkpoint of a stage as a model, by path, step and digest, without its weights.

    Each number and text in the receipt becomes a parameter of the model.

    Args:
        folder: the folder of the stage, or of its compressed model.
        earlier: the receipt of a checkpoint before the end of the stage, to record that one.
    """
    if not target.enabled():
        return
    receipt = earlier or Receipt.read(folder.receipt)
    stage = _stage(folder, receipt)
    scalars = {k: v for k, v in receipt if isinstance(v, (str, int, float)) and k != "format"}
    tags = {"spider.run": receipt.run, "spider.stage": stage, "spider.digest": receipt.weights}
    record = Checkpoint(
        identity=_identity(receipt, earlier),
        name=f"{receipt.run}-{stage.replace('/', '-')}" + (f"-step-{receipt.global_step}" if earlier else ""),
        training=_key_of(results, receipt.run),
        step=receipt.global_step,
        final=earlier is None,
        params=scalars | {"path": records.relative(results, folder.path / receipt.checkpoint)},
        tags=records.origin() | tags,
    )
    spool.write(results, record)


def log_scores(
    results: Path,
    folder: StageFolder,
    found: Mapping[str, Result],
    artifacts: Sequence[Path] = (),
    *,
    of: str | None = None,
    dataset: tuple[str, str, str] | None = None,
    costs: Mapping[str, float] | None = None,
    earlier: Receipt | None = None,
    at: float | None = None,
) -> None:
    """Record what was measured of a checkpoint, for its model and its training run.

    Args:
        folder: the folder of the stage, or of its compressed model.
        found: the results by name.
        of: name of the measurement; None is the evaluation of the stage.
        dataset: name, digest and source of the text.
        costs: parameters, and the bytes and seconds of training up to this stage.
        earlier: the receipt of the checkpoint, if it is not the one at the end of the stage.
        at: the time of the measurement (default: now).

    Raises:
        ValueError: the folder lacks a receipt.
    """
    if not target.enabled():
        return
    receipt = earlier or Receipt.read(folder.receipt)
    model = _identity(receipt, earlier)
    if not spool.record_path(results, "models", model).exists():
        log_checkpoint(results, folder, earlier=earlier)
    rows = list(result.all_rows(found))
    metrics = result.metrics(found)
    if isinstance(folder, CompressedFolder):
        # The training run has the metrics of the checkpoint, which these must not replace.
        rows = [row for row in rows if not row.baseline]
        numbers = [number for row in rows for number in row.numbers()]
        metrics = {f"compressed/{name}": one.value for name, _, one in numbers if one.value is not None}
    record = Evaluation(
        identity=digest([model, of]) if of else model,
        model=model,
        training=_key_of(results, receipt.run),
        stage=_stage(folder, receipt),
        step=receipt.global_step,
        time=time.time() if at is None else at,
        metrics=metrics,
        costs=dict(costs or {}),
        rows=rows,
        dataset=dataset,
        curves=result.curves(found),
        artifacts=records.artifacts(results, artifacts),
    )
    spool.write(results, record)


def _stage(folder: StageFolder, receipt: Receipt) -> str:
    """Return the path in the folder of the run: ``main``, or ``main/compressed``."""
    inside = f"/{folder.path.name}" if isinstance(folder, CompressedFolder) else ""
    return receipt.stage + inside


def _identity(receipt: Receipt, earlier: Receipt | None = None) -> str:
    """Return the identity of the checkpoint that a receipt names, with the step of an earlier one."""
    step = [] if earlier is None else [earlier.global_step]
    return digest([receipt.run, receipt.stage, receipt.weights, *step])


def log_foreign(
    results: Path, measured: Measured, path: Path, dataset: tuple[str, str, str], command: str | None
) -> None:
    """Record a model that others trained as a run beside the trainings, with its scores.

    Args:
        measured: its evaluation, which lies at ``path``.
        dataset: name, digest and source of the text.
        command: the command line that scored it.
    """
    if not target.enabled():
        return
    identity = digest(["foreign", measured.run, measured.weights])
    params = {**measured.results["foreign"].details, "folder": measured.checkpoint}
    record = Run(kind="training", identity=identity, name=measured.run, params=params, command=command)
    record.tags |= {"spider.run": measured.run, "spider.stage": "foreign", "spider.digest": measured.weights}
    record.dataset(*dataset, context="validation")
    record.artifacts = records.artifacts(results, [path])
    for name, value in result.metrics(measured.all_results).items():
        record.metric(name if name in RANKING else f"val/{name}", value)
    record.metric("parameters", measured.parameters)
    record.end("finished")
    spool.write(results, record)


def log_choice(results: Path, run: str, stage: str, weights: str) -> None:
    """Record the best stage of a run and the digest of its weights."""
    if target.enabled():
        spool.write(results, Choice(identity=digest(run), run=run, stage=stage, weights=weights))
