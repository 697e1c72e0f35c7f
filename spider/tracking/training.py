"""Training runs, their checkpoints and the scores of these.

A training run is one top-level run in the store whatever its stages and restarts. Its key is kept in
``runs/{run}/tracking.json``; the curves are the stages' ``metrics.jsonl``, which `sync` follows. A stage
trained anew (another spec, or its rows that were already sent are gone) would draw a second line over the
first: it begins a new key, and the stages before it are drawn there again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.files import digest, read_json, write_json
from spider.results import Results
from spider.tracking import sender, spool
from spider.tracking.sync import rows_were_replaced

log = logging.getLogger(__name__)

#: What of an evaluation says how good a checkpoint is; the rest says how it was scored.
SCORES = ("bpb", "bpb_strict", "bytes", "bytes_per_second", "compressors", "model")


def pointer_path(results: Path, run: str) -> Path:
    return results / "runs" / run / "tracking.json"


@contextlib.contextmanager
def training(
    results: Path,
    spec: StageSpec,
    *,
    dataset: tuple[str, str, str],
    tags: dict[str, str] | None = None,
) -> Iterator[None]:
    """Track the training of one stage: its spec, its state, and its curves while they grow.

    Args:
        results: root of the results folder; the stage's rows are in ``runs/{run}/{stage}/metrics.jsonl``.
        spec: the resolved stage.
        dataset: (name, digest, source) of what it trains on.
        tags: device, precision, ...
    """
    if not spool.enabled():
        yield
        return
    key = _key_for(results, spec)
    record = _begin(results, spec, key, dataset, tags or {})
    spool.write(results, "training", record)
    delivery = sender.start_sender(results)
    try:
        yield
        spool.end_run(record, "finished")
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        spool.end_run(record, "killed" if stopped else "failed", error)
        raise
    finally:
        spool.write(results, "training", record)
        delivery.stop()


def _key_for(results: Path, spec: StageSpec) -> str:
    """The key this stage's rows belong to: the run's, or a new one where they would cross rows sent."""
    path = pointer_path(results, spec.run)
    pointer = _read_pointer(path)
    rows = f"runs/{spec.run}/{spec.stage}/metrics.jsonl"
    known = pointer["stages"].get(spec.stage)
    if known is not None and (known != spec.identity or rows_were_replaced(results, rows)):
        log.info(
            "run %s: stage %s is trained anew, so its curves begin a new tracked run", spec.run, spec.stage
        )
        pointer["key"] = secrets.token_hex(8)
    pointer["stages"][spec.stage] = spec.identity
    _write_pointer(path, pointer)
    return pointer["key"]


def _read_pointer(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {"key": secrets.token_hex(8), "stages": {}}


def _write_pointer(path: Path, pointer: dict[str, Any]) -> None:
    try:
        write_json(path, pointer)
    except OSError as error:
        log.warning("%s: cannot write (%s); the curves of this stage go untracked", path, error)


def _begin(
    results: Path, spec: StageSpec, key: str, dataset: tuple[str, str, str], tags: dict[str, str]
) -> spool.Record:
    plain = spec.model_dump(mode="json")
    stage_fields = {"settings": plain.pop("settings"), "data": plain.pop("data")}
    for name in ("format", "run", "stage", "index"):
        del plain[name]
    params = plain | {spec.stage: stage_fields}
    record = spool.new_run("training", key, spec.run, params)
    path = spool.record_path(results, "training", key)
    if path.exists():
        before = read_json(path)
        record["started"] = before["started"]
        record["params"] = before["params"] | params
        record["tags"] = before["tags"] | record["tags"]
        record["datasets"] = before["datasets"]
    name, data_digest, source = dataset
    entry = {"name": name, "digest": data_digest, "source": source, "context": f"train {spec.stage}"}
    if entry not in record["datasets"]:
        record["datasets"].append(entry)
    record["tags"] |= tags | {
        "spider.run": spec.run,
        "spider.stage": spec.stage,
        f"spider.spec.{spec.stage}": spec.identity,
    }
    return record


def _key_of(results: Path, run: str) -> str:
    """Key of a run, made here for one that was trained with tracking off."""
    path = pointer_path(results, run)
    pointer = _read_pointer(path)
    if path.exists():
        return pointer["key"]
    _write_pointer(path, pointer)
    record = spool.new_run("training", pointer["key"], run, {})
    record["tags"]["spider.run"] = run
    spool.end_run(record, "finished")
    spool.write(results, "training", record)
    return pointer["key"]


def _model_identity(run: str, stage: str, receipt: Receipt) -> str:
    return digest([run, stage, receipt.weights])


def log_checkpoint(results: Path, run: str, stage: str, receipt: Receipt) -> None:
    """Record a stage's last checkpoint as a model, by path, step and digest; no weights are copied.

    Args:
        receipt: the stage's ``train.json``; ``weights``, ``global_step`` and ``checkpoint`` are needed, every
            other number or text in it becomes a parameter of the model.
    """
    if not spool.enabled():
        return
    identity = _model_identity(run, stage, receipt)
    checkpoint = Results(results).stage(run, stage).path / receipt.checkpoint
    scalars = {k: v for k, v in receipt if isinstance(v, (str, int, float)) and k != "format"}
    record = {
        "format": 1,
        "kind": "model",
        "identity": identity,
        "name": f"{run}-{stage}",
        "training": _key_of(results, run),
        "step": receipt.global_step,
        "params": scalars | {"path": spool.relative(results, checkpoint)},
        "tags": spool.origin() | {"spider.run": run, "spider.stage": stage, "spider.digest": receipt.weights},
    }
    spool.write(results, "models", record)


def log_evaluation(
    results: Path,
    run: str,
    stage: str,
    evaluation: dict[str, Any],
    artifacts: Sequence[Path] = (),
    *,
    dataset: tuple[str, str, str] | None = None,
    curves: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> None:
    """Record the scores of a stage's checkpoint, on its model and so on its training run.

    Args:
        evaluation: ``evaluation.json``; of its numbers those under `SCORES` are logged, nested ones as
            ``val/compressors/xz``. The file itself is best among the artifacts.
        artifacts: plots, the sample, ``evaluation.json`` itself.
        dataset: (name, digest, source) of the text that was scored.
        curves: (step, value) points of the checkpoint, over something else than steps of training; shown as
            ``val/{name}/{stage}``.

    Raises:
        ValueError: the stage has no receipt (``train.json``).
    """
    if not spool.enabled():
        return
    receipt = Receipt.read(Results(results).stage(run, stage).receipt)
    identity = _model_identity(run, stage, receipt)
    if not spool.record_path(results, "models", identity).exists():
        log_checkpoint(results, run, stage, receipt)
    numbers = {
        key.replace(".", "/"): float(value)
        for key, value in spool.flatten({k: evaluation[k] for k in SCORES if k in evaluation}).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    record = {
        "format": 1,
        "kind": "evaluation",
        "identity": identity,
        "model": identity,
        "training": _key_of(results, run),
        "stage": stage,
        "step": receipt.global_step,
        "time": time.time(),
        "metrics": numbers,
        "dataset": list(dataset) if dataset else None,
        "curves": {name: [list(point) for point in points] for name, points in (curves or {}).items()},
        "artifacts": [entry for path in artifacts if (entry := spool.artifact(results, path))],
    }
    spool.write(results, "evaluations", record)
