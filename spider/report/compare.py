"""Compare all evaluations: ``summary.json`` for programs, tables and figures for people.

Runs may be scored on different texts. Scores are comparable only on the same text, so there is one table for
each text, with its own compressors. One dataset scored to two lengths counts as two texts. Seconds are those
of each job's last attempt; the seconds of a stage also include killed trainings.

This module does not import torch, so comparing takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from spider import files
from spider.audit.record import Badge
from spider.evaluation.noise import Noise, noise, scored_runs, undecided
from spider.evaluation.records import (
    CheckpointScores,
    Evaluation,
    Sample,
    Scored,
    results_of,
    sum_of_probabilities,
)
from spider.evaluation.result import ALONE, Result, Row, baselines, best_first, legends, scores, shortened
from spider.record import Record
from spider.report import figures
from spider.report.charts import COLOURS
from spider.report.costs import seconds_by_rule
from spider.report.formatting import DAGGER, LOSSY, markdown_table, quantity
from spider.report.render import html, picture
from spider.report.scores import (
    BASELINE_CONTEXT,
    baseline_cells,
    best_stages_first,
    dagger,
    leading,
    model_cells,
    score_columns,
)
from spider.report.stages import read_log
from spider.results import CompressedFolder, Results, StageFolder, root_of

#: Most runs in a figure, each in its own colour. Of more runs, the best are drawn.
_DRAWN_RUNS = COLOURS


class ComparedStage(Scored):
    """A checkpoint or a compressed model, from its evaluation and its sample."""

    steps: int
    """Steps of this stage, 0 for a foreign model. ``tokens``, ``bytes`` and ``seconds`` are alike."""
    tokens: int
    bytes: int
    seconds: float
    text: str
    """Name of the scored text. Stages on the same text are comparable."""
    scored_bytes: int
    results: dict[str, Result]
    """All results by name, without figures."""
    compressed: ComparedStage | None = None
    checkpoints: tuple[ComparedStage, ...] = ()
    """Scored checkpoints before the end of the stage, by rising step."""
    prompt: str | None = None
    sample: str | None = None
    audit: Badge | None = None


class ComparedRun(BaseModel, frozen=True):
    """Stages, and their names in the order of training."""

    order: list[str]
    stages: dict[str, ComparedStage]

    @property
    def last(self) -> ComparedStage:
        """Return the last stage."""
        return self.stages[self.order[-1]]

    @property
    def rows(self) -> dict[str, ComparedStage]:
        """Return by name each stage, its scored checkpoints before it, and its compressed model after it."""
        found: dict[str, ComparedStage] = {}
        for name in self.order:
            stage = self.stages[name]
            found |= {f"{name}, step {one.global_step:,}": one for one in stage.checkpoints}
            found[name] = stage
            if stage.compressed:
                found[f"{name}, compressed"] = stage.compressed
        return found

    @property
    def like_last(self) -> list[str]:
        """Return the stages that were scored on the text of the last one."""
        return [name for name in self.order if self.stages[name].text_sha256 == self.last.text_sha256]

    @property
    def leading(self) -> str:
        """Return the name of the score that orders the stages."""
        return leading(self.stages[name] for name in self.like_last)

    @property
    def best(self) -> str | None:
        """Return the best stage of those scored on the text of the last; None for a decoded text."""
        if not self.last.lossless:
            return None
        return min(self.like_last[::-1], key=lambda name: float(getattr(self.stages[name], self.leading)))


class Summary(Record):
    """``summary.json``, for programs."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "a summary"

    runs: dict[str, ComparedRun]
    foreign: dict[str, ComparedStage]
    """Models that others trained."""
    seconds_by_rule: dict[str, float]
    """Wall seconds of all jobs of each rule, from Snakemake's benchmark files."""
    noise: dict[str, Noise] = Field(default_factory=dict)
    """How much seeds move scores, by the SHA-256 of the held-out text; none where no run has two seeds."""


#: A table: column titles and rows of cells.
_Table = tuple[list[str], list[list[str]]]
_Stages = dict[str, list[tuple[StageFolder, Evaluation]]]


def compare(
    evaluations: list[Path],
    *,
    benchmarks: Path | None,
    output: Path,
    compressed: Sequence[Path] = (),
    foreign: Sequence[Path] = (),
) -> Summary:
    """Gather evaluations into summary.json (written last), table.md, table.html, bpb.svg and loss.svg.

    Args:
        evaluations: The evaluation.json of every stage of every run, next to its train.json and
            metrics.jsonl. The first run is the first in the report.
        compressed: The evaluation.json of compressed models, next to compress.json.
        foreign: The evaluation.json of models that others trained.
        benchmarks: Folder of Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.

    Raises:
        ValueError: The list of evaluations is empty, one has another format, or a stage is given twice.
    """
    if not evaluations:
        raise ValueError("there is nothing to compare: no evaluation was given")
    root = root_of(evaluations[0])
    results = Results(root) if root else None
    stages = _by_run(evaluations, StageFolder)
    compressed_models = _by_run(compressed, CompressedFolder)
    foreign_models = _by_run(foreign, StageFolder)
    measured = [*stages.values(), *compressed_models.values(), *foreign_models.values()]
    labels = _labels([one for own in measured for _, one in own])
    runs = {}
    for run, own in stages.items():
        others = compressed_models.get(run, [])
        small = {one.stage: _compared(folder, one, labels) for folder, one in others}
        compared = {one.stage: _compared(folder, one, labels, small.get(one.stage)) for folder, one in own}
        runs[run] = ComparedRun(order=[*compared], stages=compared)
    summary = Summary(
        format=Summary.FORMAT,
        runs=runs,
        foreign={name: _compared(*own[0], labels) for name, own in foreign_models.items()},
        seconds_by_rule=seconds_by_rule(benchmarks) if benchmarks else {},
        noise=_noise(results),
    )
    _draw(stages, output)
    tables = _tables(summary)
    models = [*(model for run in runs.values() for model in run.rows.values()), *summary.foreign.values()]
    notes = legends(model.results for model in models)
    notes.append(sum_of_probabilities(max(model.deviation for model in models)))
    if not all(model.lossless for model in models):
        notes.append(LOSSY)
    of_text = {_title(model): summary.noise.get(model.text_sha256) for model in models}
    best = {}
    for title, (header, rows) in tables.items():
        if ALONE in header:
            best[title], note = _best_row(header, rows, of_text.get(title))
            notes += [note] if note else []
    blocks = [f"## {title}\n\n{markdown_table(*table)}" for title, table in tables.items()]
    files.write_text(output / "table.md", "\n\n".join(["# Comparison", *blocks, *notes]) + "\n")
    page = html("table.html.j2", title="Spider: comparison", tables=tables, best=best, notes=notes)
    files.write_text(output / "table.html", page)
    return summary.write(output / "summary.json")


def _by_run(paths: Sequence[Path], kind: type[StageFolder]) -> _Stages:
    """Return evaluations by run, in the order of the stages, each with its folder."""
    runs: _Stages = defaultdict(list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        one = Evaluation.read(path)
        if before := seen.get((one.run, one.stage)):
            raise ValueError(f"{path}: {one.run}/{one.stage} was already given as {before}")
        seen[one.run, one.stage] = path
        runs[one.run].append((kind(path.parent), one))
    return {run: sorted(own, key=lambda item: item[1].index) for run, own in runs.items()}


def _labels(evaluations: list[Evaluation]) -> dict[str, str]:
    """Return the name of each text by its hash: its datasets, with the size if they have several texts.

    The name of a decoded text has a dagger.
    """
    datasets: dict[str, dict[str, None]] = defaultdict(dict)
    for one in evaluations:
        datasets[one.text_sha256][one.data] = None
    names = {sha: ", ".join(own) for sha, own in datasets.items()}
    labels: dict[str, str] = {}
    for one in evaluations:
        sha = one.text_sha256
        if sha in labels:
            continue
        label = names[sha] + dagger(one)
        if list(names.values()).count(names[sha]) > 1:
            label += f" ({one.bytes:,} bytes)"
        labels[sha] = f"{label} {sha[:8]}" if label in labels.values() else label
    return labels


def _compared(
    folder: StageFolder, one: Evaluation, labels: dict[str, str], compressed: ComparedStage | None = None
) -> ComparedStage:
    """Return the entry of a stage or of its compressed model in the summary."""
    sample = Sample.read(folder.sample) if folder.sample.exists() else None
    # Tables show neither figures nor details.
    results = {
        name: found.model_copy(update={"figures": [], "details": {}})
        for name, found in results_of(folder, one.weights).items()
    }
    return ComparedStage(
        **_costs_and_scores(one, labels),
        results=results,
        compressed=compressed,
        checkpoints=tuple(
            ComparedStage(**_costs_and_scores(earlier, labels), results=earlier.all_results)
            for earlier in CheckpointScores.of(folder, one)
        ),
        prompt=sample.prompt if sample else None,
        sample=sample.text if sample else None,
        audit=Badge.of(folder),
    )


def _costs_and_scores(one: Evaluation, labels: dict[str, str]) -> dict[str, Any]:
    """Return the fields of an entry that do not depend on the results of measurements."""
    fields = one.model_dump(include=set(Scored.model_fields))
    fields |= one.training.model_dump(exclude={"global_step"})
    return fields | {"text": labels[one.text_sha256], "scored_bytes": one.bytes}


def foreign_label(name: str, model: ComparedStage) -> str:
    """Return the name of a foreign model in tables, and whether its tokenizer keeps the text."""
    return f"{name} ({'lossless' if model.lossless else 'lossy'} tokenizer of its own)"


def _draw(stages: _Stages, output: Path) -> None:
    """Draw the figures of all runs, or of the best."""
    best = [one.run for one in best_stages_first(own[-1][1] for own in stages.values())[:_DRAWN_RUNS]]
    drawn = {run + dagger(own[-1][1]): own for run, own in stages.items() if run in best}
    decoded = f" ({DAGGER} of decoded text)" if any(DAGGER in name for name in drawn) else ""
    all_drawn = len(drawn) == len(stages)
    which = "all runs" if all_drawn else f"the best {len(drawn)} of {len(stages)} runs"
    logs = []
    for name, own in drawn.items():
        begin = 0.0
        for folder, one in own:
            logs.append(replace(read_log(folder, begin, one, CheckpointScores.of(folder, one)), run=name))
            begin = logs[-1].end
    title = "Training loss"
    if len(stages) > 1:
        title += f" (lines) and held-out text (marks) of {which}"
    picture(output / "loss.svg", [(1, [figures.loss(logs, title + decoded)])])
    chart = figures.bits_by_stage(
        {run: [(one.stage, one.bpb) for _, one in own] for run, own in drawn.items()},
        {run: _rates(own[-1][1]) for run, own in drawn.items()},
        decoded if all_drawn else f", {which}{decoded}",
    )
    picture(output / "bpb.svg", [(1, [chart])], figures.width_of(chart))


def _rates(one: Evaluation) -> dict[str, float]:
    """Return the rates of the baselines that a figure shows, each document alone, by label."""
    rows = shortened(baselines(one.results))
    return {row.label: row.value for row in rows if row.value is not None}


# ---------------------------------------------------------------------------------------------------- tables


def _tables(summary: Summary) -> dict[str, _Table]:
    """Return tables by title: scores and baselines for each text, other results, seconds."""
    tables: dict[str, _Table] = {}
    models = {
        f"{run} / {name}": model for run, one in summary.runs.items() for name, model in one.rows.items()
    }
    models |= {foreign_label(name, model): model for name, model in summary.foreign.items()}
    for text in dict.fromkeys(model.text for model in models.values()):
        own = {name: model for name, model in models.items() if model.text == text}
        tables[_title(next(iter(own.values())))] = _score_table(own)
    for key in dict.fromkeys(key for model in models.values() for key in model.results):
        measured = {name: model.results[key] for name, model in models.items() if key in model.results}
        columns = {row.name: row.label for one in measured.values() for row in one.own_rows()}
        if columns:
            rows = [[name, *model_cells(one.own_rows(), columns)] for name, one in measured.items()]
            title = next(iter(measured.values())).title
            tables[title] = ["", *columns.values()], rows
    if audited := {name: model.audit for name, model in models.items() if model.audit}:
        rows = [
            [name, badge.state.upper() if badge.state != "passed" else "passed", badge.text]
            for name, badge in audited.items()
        ]
        tables["Audit"] = ["", "result", "checks"], rows
    if summary.seconds_by_rule:
        rows = [[rule, f"{seconds:,.1f}"] for rule, seconds in summary.seconds_by_rule.items()]
        tables["Wall time by rule, all jobs together"] = ["rule", "seconds"], rows
    return tables


def _title(model: ComparedStage) -> str:
    return f"Held-out text of {model.text}, {model.scored_bytes:,} bytes"


def _score_table(models: dict[str, ComparedStage]) -> _Table:
    """Return the scores of models on one text, and of the baselines."""
    trained = {name: model for name, model in models.items() if model.steps}
    columns = score_columns((model.results for model in models.values()), leading(trained.values()))
    mark = dagger(next(iter(models.values())))
    rows = []
    for name, model in models.items():
        costs = [f"{model.steps:,}", f"{model.bytes / 1e6:,.2f}", f"{model.seconds:,.1f}"]
        cells = model_cells(scores(model.results), columns, mark)
        size = quantity(model.parameters, "")
        rows.append([name, *cells, model.context, size, *(costs if model.steps else [""] * len(costs))])
    for label, row in _baselines(trained):
        rows.append([label, *baseline_cells(row, columns, mark), BASELINE_CONTEXT, "", "", "", ""])
    return ["", *columns.values(), "context", "parameters", "steps", "MB trained", "seconds"], rows


def _baselines(stages: dict[str, ComparedStage]) -> Iterable[tuple[str, Row]]:
    """Return label and row of each baseline of the last stage of each run, best first.

    A baseline whose rate differs between runs has a row for each rate, which names its runs.
    """
    last = {name.partition(" / ")[0]: stage for name, stage in stages.items()}
    runs: dict[str, list[str]] = defaultdict(list)
    rows: dict[str, Row] = {}
    for run, stage in last.items():
        for row in baselines(stage.results):
            key = row.model_dump_json()
            runs[key].append(run)
            rows[key] = row
    for row in best_first(rows.values()):
        key = row.model_dump_json()
        own = "" if len(runs[key]) == len(last) else f", for {', '.join(runs[key])}"
        yield (row.note or row.label) + own, row


def _noise(results: Results | None) -> dict[str, Noise]:
    """Return the noise of a seed in a results folder, for each text."""
    runs = scored_runs(results) if results else []
    texts = dict.fromkeys(one.text for one in runs)
    found = {text: noise(one for one in runs if one.text == text) for text in texts}
    return {text: one for text, one in found.items() if one}


def _best_row(
    header: list[str], rows: list[list[str]], noise: Noise | None
) -> tuple[list[str] | None, str | None]:
    """Return the row with the least score, or None and a note if another one is within the noise of seeds.

    The first column of scores counts.
    """
    scored = [(float(row[1].split()[0].rstrip(DAGGER)), row) for row in rows if row[1]]
    size = header.index("parameters")
    if note := undecided(((row[0], value, bool(row[size])) for value, row in scored), noise):
        return None, note
    return min(scored, key=lambda one: one[0])[1], None
