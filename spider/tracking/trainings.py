"""Show trainings, their curves, checkpoints and scores in MLflow's experiments *Training* and *Checkpoints*.

A run of the store shows all stages of a run. A stage that is trained again, by whatever settings, has another
first row in its ``metrics.jsonl``. Its curve would then have two values at a step, so the run of the store is
another one, and gets the curves of the stages before it too.

A chart gets some points of a curve, and all rows stay in the file. MLflow deletes no point, and a store that
is made anew must get the same ones. So the choice depends on the rows up to a point and on the planned length
of the stage alone: a metric has a point in each of a fixed number of equal spans of steps, the first one
there, and the last row of a finished stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from spider.checkpoints.metrics import Row, parse_row
from spider.checkpoints.records import Origin, Receipt
from spider.common.files import digest, read_json, sha256
from spider.common.results import CompressedFolder, Results, StageFolder
from spider.config import Config, StageSpec
from spider.config.spec import sources_of
from spider.evaluation.records import CheckpointScores, Evaluation, results_of
from spider.evaluation.result import Result, all_rows, curves, metrics
from spider.provenance.made import Job, Made, Stat, flatten, made_path, relative, stat_of, workflows
from spider.tracking.jobs import SHOWN, Item
from spider.tracking.pages import CURVE
from spider.tracking.store import ARTIFACT_LIMIT, RANKING, Point, Shown, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A checkpoint at the end of a stage, or its compressed model, with all that was measured of it."""

    folder: StageFolder
    receipt: Receipt

    @property
    def where(self) -> str:
        """The path in the folder of the run: ``main``, or ``main/compressed``."""
        path = self.folder.path
        return f"{path.parent.name}/{path.name}" if self.compressed else path.name

    @property
    def compressed(self) -> bool:
        return isinstance(self.folder, CompressedFolder)

    @property
    def weights(self) -> str:
        """The digest of the weights that are scored and loaded."""
        return self.receipt.averaged_weights or self.receipt.weights

    @property
    def identity(self) -> str:
        return digest([self.receipt.run, self.where, self.receipt.weights])

    @property
    def path(self) -> Path:
        return self.folder.path / self.receipt.checkpoint

    @cached_property
    def found(self) -> dict[str, Result]:
        """The results of the measurements of these weights."""
        return results_of(self.folder, self.weights)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the model itself, by the names of their metrics."""
        numbers = [number for row in all_rows(self.found) if not row.baseline for number in row.numbers()]
        return {name: one.value for name, _, one in numbers if one.value is not None}

    def tags(self, root: Path) -> dict[str, str]:
        """Return the tags of its version."""
        tags = {
            "spider.run": self.receipt.run,
            "spider.stage": self.where,
            "spider.digest": self.receipt.weights,
        }
        tags |= {"spider.step": str(self.receipt.global_step), "spider.path": relative(root, self.path)}
        shown = {name.replace("/", "."): str(value) for name, value in self.numbers.items()}
        return tags | {name: value.removesuffix(".0") for name, value in shown.items()}


@dataclass(frozen=True)
class Scores:
    """What was measured of weights, for the store."""

    where: str
    """The path of their folder in that of the run."""
    step: int
    """Step of the run."""
    time: float
    """When they were measured, in seconds since 1970."""
    values: Mapping[str, float]
    """Metrics by name. Those of `RANKING` stay as they are, and others begin with ``val/``."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the store shows under their own names."""
    curves: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    """The evaluation that they are from, whose text the store shows beside them."""

    @classmethod
    def of(cls, one: Evaluation, where: str, time: float, **more: Any) -> Scores:
        """Return the scores of an evaluation."""
        found = one.all_results
        return cls(where, one.global_step, time, metrics(found), more, curves(found), one)


@dataclass(frozen=True)
class Stage:
    """A stage of a run in the results folder, finished or not."""

    folder: StageFolder
    origin: Origin

    @property
    def name(self) -> str:
        return self.folder.path.name

    @cached_property
    def spec(self) -> StageSpec | None:
        """The settings that decide the weights; None for those of another version of Spider."""
        with contextlib.suppress(ValidationError, ValueError):
            return self.origin.spec
        return None

    @cached_property
    def models(self) -> list[Model]:
        """The trained and the compressed model, as far as they exist."""
        folders = (self.folder, CompressedFolder(self.folder.compressed))
        return [Model(one, Receipt.read(one.receipt)) for one in folders if one.receipt.is_file()]

    @cached_property
    def head(self) -> str:
        """A digest that differs each time that the stage is trained."""
        return head(self.folder.metrics) or (self.models[0].receipt.weights if self.models else "")


def stages_of(results: Results, run: str) -> list[Stage]:
    """Return the stages of a run that have begun, in their order."""
    begun = [folder for folder in results.stages(run) if folder.origin.is_file()]
    stages = [Stage(folder, Origin.read(folder.origin)) for folder in begun]
    return sorted(stages, key=lambda stage: stage.origin.fields.get("index", 0))


class Trainings:
    """The runs of a results folder. A run whose files have not changed since the last call is left out."""

    def __init__(self, store: Store, results: Results, config: Config) -> None:
        self.store, self.results, self.config = store, results, config
        self._curves: dict[Path, Curve] = {}
        self._seen: dict[str, object] = {}

    def items(self) -> Iterator[Item]:
        for run in self.results.runs:
            stages = self.results.stages(run)
            folders = [*stages, *(CompressedFolder(one.compressed) for one in stages)]
            paths = [file for one in folders for file in (*_files(one), one.metrics, one.receipt)]
            paths += [self._record(file) for file in paths]
            busy = any(_is_trained(one) for one in stages)
            state = [busy, *((path, stat_of(path)) for path in paths)]
            if state != self._seen.get(run):
                yield Item("runs", run, partial(self._run, run, busy))
                self._seen[run] = state
        for path in self.results.foreign_scores:
            state = [stat_of(path), stat_of(self._record(path))]
            if self._seen.get(str(path)) != state:
                yield Item("foreign models", path.parent.name, partial(self._foreign, path))
                self._seen[str(path)] = state

    def _record(self, output: Path) -> Path:
        return made_path(self.results.root, relative(self.results.root, output))

    def _job(self, output: Path) -> Job | None:
        """Return the newest run of the job that makes an output; None for a command by hand."""
        path = self._record(output)
        jobs = Made.read(path).jobs if path.exists() else []
        return jobs[-1] if jobs else None

    def _time(self, path: Path) -> float | None:
        """Return when a file was made: when its job began, which touches it at the end; None before that."""
        stat, job = stat_of(path), self._job(path)
        assert stat is not None
        if job and job.status == "running" and stat[1] / 1e9 > job.started - 1:
            return None
        own = [file for file in job.outputs if file.stat == stat] if job else []
        return job.started if job and own else stat[1] / 1e9

    def _run(self, run: str, busy: bool) -> int:
        """Show a run: its settings and status, then curves, then checkpoints with their scores."""
        stages = stages_of(self.results, run)
        if not stages:
            return 0
        before = self.store.writes
        heads = {stage.name: stage.head for stage in stages if stage.head}

        def fits(one: Shown) -> bool:
            return all(one.tags.get(f"spider.head.{name}", value) == value for name, value in heads.items())

        jobs = {stage.name: self._job(stage.folder.receipt) for stage in stages}
        last = jobs[stages[-1].name]
        tags = self._tags(run, stages[-1].name, last, f"train {run}/{stages[-1].name}")
        tags |= {f"spider.head.{name}": value for name, value in heads.items()}
        tags |= {f"spider.spec.{stage.name}": stage.origin.identity for stage in stages}
        begun = stages[0].folder.origin.stat().st_mtime
        params = {key: value for stage in stages for key, value in self._params(stage).items()}
        shown = self.store.show("Training", run, name=run, start=begun, tags=tags, params=params, fits=fits)
        if shown.deleted:
            return 0
        for stage in stages:
            self._datasets(shown, stage)
            self._curve(shown, stage)
            self._models(shown, stages, stage)
        if busy or (last is not None and last.status == "running"):
            status, ended = "running", None
        else:
            finished = all(stage.folder.receipt.is_file() for stage in stages)
            stopped = last.status if last and last.status == "failed" else "killed"
            status = "finished" if finished else stopped
            files = [file for one in stages for file in (one.folder.metrics, one.folder.receipt)]
            ended = max((file.stat().st_mtime for file in files if file.is_file()), default=begun)
        self.store.set_status(shown, status, ended)
        return int(self.store.writes > before)

    def _tags(self, run: str, stage: str, job: Job | None, command: str) -> dict[str, object]:
        """Return the tags of a run: its names, and the user, the command and the commit of its last job."""
        workflow = workflows(self.results.root).get(job.workflow) if job else None
        commit = job.commit if job else None
        return {
            "spider.kind": "training",
            "spider.run": run,
            "spider.stage": stage,
            "git.commit": commit,
            "mlflow.source.git.commit": (commit or "").removesuffix("-dirty"),
            "mlflow.source.name": f"spider {job.command if job else command}",
            "mlflow.user": workflow.user if workflow else None,
            "spider.host": workflow.process.host if workflow else None,
            "spider.version": workflow.version if workflow else None,
        }

    def _params(self, stage: Stage) -> dict[str, Any]:
        """Return the settings of a stage; those that the stages of a run share have no name of a stage."""
        spec = stage.spec
        run = stage.folder.path.parent.name
        if run in self.config.runs and stage.name in [one.name for one in self.config.runs[run].stages]:
            own = self.config.stage(run, stage.name)  # has what decides no weights, too
            spec = own if stage.origin.identity in own.identities else spec
        plain = spec.model_dump(mode="json") if spec else {**stage.origin.fields}
        for name in ("format", "run", "stage", "index"):
            plain.pop(name, None)
        plain[stage.name] = {name: plain.pop(name) for name in ("settings", "data") if name in plain}
        return flatten(plain)

    def _datasets(self, shown: Shown, stage: Stage) -> None:
        of = str(stage.origin.fields.get("data_digest"))
        if shown.tags.get(f"spider.data.{stage.name}") != of:
            for name in sources_of(stage.origin.fields):
                self.store.log_dataset(shown.run_id, name, of, self._address(name), f"training {stage.name}")
            self.store.note(shown, {f"spider.data.{stage.name}": of})

    def _address(self, dataset: str) -> str:
        """Return where a dataset comes from."""
        known = self.config.datasets.get(dataset)
        return known.source.address if known else str(self.results.shards(dataset))

    def _curve(self, shown: Shown, stage: Stage) -> None:
        """Send the chosen points of new rows. The store notes how far it got."""
        path = stage.folder.metrics
        if not head(path):
            return
        curve = self._curves.pop(path, None)
        if curve is None or curve.head != head(path):
            curve = Curve(path, stage.spec)
        before, _, end = shown.tags.get(f"spider.curve.{stage.name}", "0").partition(" ")
        new = [point for offset, points in curve.read() if offset > int(before) for point in points]
        finished = "end" if stage.folder.receipt.is_file() else ""
        if finished and not end:
            new += curve.end()
        self.store.log_points(shown.run_id, new)
        self.store.note(shown, {f"spider.curve.{stage.name}": f"{curve.offset} {finished}".strip()})
        self._curves[path] = curve

    def _models(self, shown: Shown, stages: Sequence[Stage], stage: Stage) -> None:
        """Show the trained and the compressed model of a stage, with all that was measured of them."""
        for model in stage.models:
            folder, sent = model.folder, f"spider.sent.{model.where}"
            files = _files(folder)
            hashes = [(path.name, _sha256(path, stat_of(path))) for path in files]
            state = digest([model.receipt.weights, *hashes]) + " without model" * (not self.store.has_models)
            measured = folder.evaluation if folder.evaluation.is_file() else folder.receipt
            # Checkpoints have the time of the training, so scoring again adds no point to a curve.
            times = [self._time(path) for path in (measured, folder.receipt)]
            if None in times or shown.tags.get(sent) == state:
                continue
            receipt = model.receipt
            params = {k: v for k, v in receipt if isinstance(v, (str, int, float)) and k != "format"}
            params["path"] = relative(self.results.root, model.path)
            name = f"{receipt.run}-{model.where.replace('/', '-')}"
            until = stages[: stages.index(stage) + 1]
            self._scores(shown, _at_the_end(model, until, times[0] or 0.0), name, model.identity, params)
            if folder.checkpoint_scores.is_file():
                begin = sum(one.models[0].receipt.bytes for one in until[:-1] if one.models)
                for one in CheckpointScores.read(folder.checkpoint_scores).scores:
                    self._on_the_way(shown, one, model, begin + one.training.bytes, times[1] or 0.0)
            for path in files:
                self.store.upload(shown.run_id, path, under=model.where)
            self.store.note(shown, {sent: state})

    def _scores(
        self, shown: Shown, scores: Scores, name: str, identity: str, params: Mapping[str, Any]
    ) -> None:
        """Show weights as a model of a run, without the weights themselves, and log their scores for it."""
        run = str(shown.tags["spider.run"])
        receipt = self.results.stage(run, scores.where).receipt
        if scores.where.endswith("/compressed"):
            receipt = CompressedFolder(receipt.parent).receipt
        made_by = self._tags(run, scores.where, self._job(receipt), f"train {run}/{scores.where}")
        tags = {key: str(value) for key, value in made_by.items() if value and key.startswith("mlflow.")}
        tags |= {"spider.run": run, "spider.stage": scores.where, "spider.digest": params["weights"]}
        model = self.store.show_model(
            identity, shown.run_id, name=name, step=scores.step, tags=tags, params=params
        )
        self._log(shown, scores, str(model.model_id) if model else None)

    def _on_the_way(self, shown: Shown, one: Evaluation, end: Model, trained: int, time: float) -> None:
        """Show a scored checkpoint as a point of its run's curve, a model, and a run of *Checkpoints*."""
        params = one.model_dump(include={"run", "stage", "weights", "checkpoint", "global_step"})
        identity, name = digest([*params.values()]), f"{one.run}-{one.stage}-step-{one.global_step}"
        job = self._job(end.folder.receipt)
        tags = {**self._tags(one.run, one.stage, job, ""), "spider.kind": "checkpoint"}
        row = self.store.show("Checkpoints", identity, name=name, start=time, tags=tags, params=params)
        if row.deleted:
            return
        figures = {CURVE: one.bpb, "bytes": trained, "step": one.global_step}
        self._log(row, Scores(one.stage, trained, time, {}, figures, evaluation=one))
        self.store.set_status(row, "finished", time)
        if one.global_step == end.receipt.global_step:
            identity, name = end.identity, f"{one.run}-{one.stage}"
        curve = Scores(one.stage, trained, time, {}, {CURVE: one.bpb}, evaluation=one)
        self._scores(shown, curve, name, identity, params)

    def _log(self, shown: Shown, scores: Scores, model: str | None = None) -> None:
        """Log scores for a run, and for the model with this id, with the text.

        Metrics of a model also appear on its run, at the last step of the stage. MLflow groups charts by the
        part of the name before the slash. The ranking scores and the costs lack a slash and come first. A
        curve whose steps are not training steps has the stage in its name, so that the curves of a run's
        stages stay apart.
        """
        on = {"model_id": model} if model else {}
        if one := scores.evaluation:
            address = self._address(one.data)
            self.store.log_dataset(shown.run_id, one.data, one.data_digest, address, "validation")
            if model:
                on |= {"dataset_name": one.data, "dataset_digest": one.data_digest[:36]}
        when = int(scores.time * 1000)
        named = {key if key in RANKING else f"val/{key}": value for key, value in scores.values.items()}
        points = [(key, value, when, scores.step) for key, value in {**named, **scores.costs}.items()]
        for name, steps in scores.curves.items():
            points += [(f"val/{name}/{scores.where}", value, when, step) for step, value in steps]
        # MLflow would store a NaN of a model as 0, which ranks first. That of a run stays NaN and ranks last.
        self.store.log_points(shown.run_id, [one for one in points if not math.isnan(one[1])], **on)
        self.store.log_points(shown.run_id, [one for one in points if math.isnan(one[1])])

    def _foreign(self, path: Path) -> int:
        """Show a model that others trained as a run beside the trainings, with its scores."""
        measured = Evaluation.read(path)
        identity = f"foreign/{digest([measured.run, measured.weights])}"
        state, at = sha256(path), self._time(path)
        if at is None or self.store.is_sent("Training", identity, state):
            return 0
        tags = self._tags(measured.run, "foreign", self._job(path), f"evaluate --model {measured.run}")
        tags |= {"spider.digest": measured.weights}
        params = flatten({**measured.results["foreign"].details, "folder": measured.checkpoint})
        shown = self.store.show("Training", identity, name=measured.run, start=at, tags=tags, params=params)
        self._log(shown, Scores.of(measured, "foreign", at, parameters=measured.parameters))
        self.store.upload(shown.run_id, path)
        return self.store.close(shown, state, "finished", at)


def _at_the_end(model: Model, stages: Sequence[Stage], time: float) -> Scores:
    """Return the scores of a model at the end of the last of these stages, with what all of them cost."""
    step, found = model.receipt.global_step, model.found
    evaluation = Evaluation.read(model.folder.evaluation) if model.folder.evaluation.is_file() else None
    if evaluation and evaluation.weights != model.weights:
        evaluation = None  # of an earlier training
    if model.compressed:
        # The training run has the metrics of the checkpoint, which these must not replace. The bytes of the
        # file go before those of the text.
        further = {key: value for one in found.values() for key, value in one.metrics.items()}
        values = {f"compressed/{key}": value for key, value in (further | model.numbers).items()}
        return Scores(model.where, step, time, values, {}, curves(found), evaluation)
    costs = dict[str, float]()
    if evaluation:
        trained = [stage.models[0].receipt for stage in stages if stage.models]
        costs = {name: sum(getattr(one, name) for one in trained) for name in ("bytes", "seconds")}
        costs["parameters"] = evaluation.parameters
    return Scores(model.where, step, time, metrics(found), costs, curves(found), evaluation)


@cache
def _sha256(path: Path, stat: Stat) -> str:
    """Return the SHA-256 of a file with this size and time."""
    return sha256(path)


def _files(folder: StageFolder) -> list[Path]:
    """Return the small files of a stage that MLflow shows."""
    found = [*folder.path.glob("*"), *folder.samples.glob("*.txt")]
    small = [path for path in found if path.suffix in SHOWN and path.name[0] != "." and path.is_file()]
    return sorted(path for path in small if path.stat().st_size <= ARTIFACT_LIMIT)


def _is_trained(folder: StageFolder) -> bool:
    """Return whether a process of this machine trains in a folder."""
    with contextlib.suppress(ValueError, KeyError, psutil.NoSuchProcess):
        holder = read_json(folder.holder)
        since = time.mktime(time.strptime(holder["since"], "%Y-%m-%d %H:%M:%S"))
        here = holder["host"] == socket.gethostname()
        return here and psutil.Process(holder["pid"]).create_time() <= since + 1
    return False


# ----------------------------------------------------------------------------------------------------- curves


#: Most points of a metric in each of the first three stages of a run. Later ones halve it, so that a metric
#: of a run has at most 2,000.
POINTS = 500


class Curve:
    """The curve of one stage, which is read from the file as far as it has grown.

    Args:
        spec: The settings of the stage; None if this version cannot read them.
    """

    def __init__(self, path: Path, spec: StageSpec | None) -> None:
        self.path = path
        self.head = head(path)
        self.offset = 0
        self._steps: int | None = None
        self._points = POINTS
        if spec is not None:
            limits = [
                spec.settings.max_steps,
                spec.settings.tokens and spec.settings.tokens // spec.tokens_per_step,
            ]
            self._steps = min(filter(None, limits), default=None)
            self._points = max(1, POINTS >> max(0, spec.index - 2))
        self._first = 0
        self._last: Row | None = None
        self._spans: dict[str, int] = {}

    def read(self) -> Iterator[tuple[int, list[Point]]]:
        """Yield the chosen points of the new rows, with the number of bytes up to the end of each row.

        A last line without a newline is incomplete and left for the next call.
        """
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self.offset = self.offset, self.offset + len(line)
                try:
                    row = parse_row(line)
                except ValueError as error:
                    log.warning("%s: skipped a malformed row at byte %d (%s)", self.path, start, error)
                    continue
                self._first = self._first if start else row.step
                self._last = row
                span = self._span(row.step - self._first)
                chosen = [name for name in row.metrics if self._spans.get(name, -1) < span]
                self._spans |= dict.fromkeys(chosen, span)
                yield self.offset, points(row, chosen)

    def end(self) -> list[Point]:
        """Return the points of the last row, which belong to the curve once the stage has finished."""
        return points(self._last, list(self._last.metrics)) if self._last else []

    def _span(self, step: int) -> int:
        """Return the number of the span that a step of the stage lies in."""
        if self._steps:
            return step * self._points // self._steps if self._steps > self._points else step
        # Without a planned end, each doubling of the steps has as many spans.
        bits = (self._points // 16).bit_length()
        octave = max(0, step.bit_length() - bits - 1)
        return (octave << bits) + (step >> octave)


def points(row: Row, names: list[str]) -> list[Point]:
    return [(name, row.metrics[name], int(row.time * 1000), row.step) for name in names]


def head(path: Path) -> str:
    """Return the digest of the first row, which identifies a file of rows; empty without a whole one."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(line).hexdigest()[:16] if line.endswith(b"\n") else ""
