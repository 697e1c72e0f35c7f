"""All evaluations side by side: ``summary.json`` for programs, tables and figures for people.

Runs may be scored on different texts. Figures are comparable only with the same text, so compressors are
kept for each, and the tables have one block a text. A dataset scored to two lengths counts as two texts.
Seconds are those of each job's last attempt: what a killed training spent stands in its stage's seconds.

Nothing here imports torch: comparing takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from spider import files
from spider.checkpoints.compressed import CompressedReceipt
from spider.evaluation.records import Evaluation, Sample, further_results
from spider.evaluation.result import BITS, Result, Results, Row, baselines, legends, scores, shortened
from spider.record import Record
from spider.report import figures
from spider.report.charts import COLOURS
from spider.report.costs import seconds_by_rule
from spider.report.formatting import DAGGER, LOSSY, markdown_table
from spider.report.render import html, picture
from spider.report.stages import Log, read_log
from spider.results import CompressedFolder, StageFolder

#: Runs that a figure can hold and still be read, each in a colour of its own; of more, the best.
_DRAWN_RUNS = COLOURS


class ComparedStage(BaseModel, frozen=True):
    """One stage of a run, as its evaluation, its receipt and its sample have it."""

    bpb: float
    bpb_strict: float
    bpb_assistant: float | None = None
    learn: str
    steps: int
    """Steps of this stage, as ``tokens``, ``bytes`` and ``seconds`` are."""
    tokens: int
    bytes: int
    seconds: float
    global_step: int
    """Steps of the run so far."""
    data: str
    text: str
    """Name of the scored text; stages of one text are comparable."""
    text_sha256: str
    scored_bytes: int
    lossless: bool
    context: str
    seq_len: int
    overlap: float
    n_loops: int
    weights: str
    device: str
    parameters: int
    results: dict[str, Result]
    """What was measured, by name, without figures."""
    compressed: CompressedStage | None = None
    prompt: str | None = None
    sample: str | None = None

    @property
    def dagger(self) -> str:
        """Return the mark behind scores of a decoded text."""
        return "" if self.lossless else DAGGER


class CompressedStage(BaseModel, frozen=True):
    """The compressed model of a stage."""

    bytes: int
    code_bytes: int
    total_bytes: int
    cap: int
    clip: float
    bpb: float
    bpb_strict: float
    lost: float
    """Bits per byte that compression costs."""
    text_sha256: str
    results: dict[str, Result]


class ComparedRun(BaseModel, frozen=True):
    """Stages, and their names in the order they were trained."""

    order: list[str]
    stages: dict[str, ComparedStage]

    @property
    def last(self) -> ComparedStage:
        """Return the last stage."""
        return self.stages[self.order[-1]]

    @property
    def like_last(self) -> list[str]:
        """Return the stages that were scored on the text of the last one."""
        return [name for name in self.order if self.stages[name].text_sha256 == self.last.text_sha256]

    @property
    def leading(self) -> str:
        """Return the name of the score that ranks the stages."""
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
    REMEDY: ClassVar[str] = "compare again"

    runs: dict[str, ComparedRun]
    seconds_by_rule: dict[str, float]
    """Wall seconds summed over each rule's jobs, from Snakemake's benchmark files."""


def compare(
    evaluations: list[Path], *, benchmarks: Path | None, output: Path, compressed: Sequence[Path] = ()
) -> Summary:
    """Gather evaluations into summary.json (written last), table.md, table.html, bpb.svg and loss.svg.

    Args:
        evaluations: the evaluation.json of every stage of every run; each stage's train.json and
            metrics.jsonl stand beside it. The first run named is the first in the report.
        compressed: the evaluation.json of compressed models, with compress.json beside it.
        benchmarks: Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.

    Raises:
        ValueError: no evaluation, one of another version, or a stage given twice.
    """
    stages = _by_run(evaluations)
    measured = [one for own in stages.values() for _, one in own]
    labels = _labels(measured)
    scored = [(path, Evaluation.read(path)) for path in compressed]
    small = {(one.run, one.stage): (path, one) for path, one in scored}
    runs = {}
    for run, own in stages.items():
        own_stages = {
            one.stage: _compared(folder, one, labels[one.text_sha256], small.get((run, one.stage)))
            for folder, one in own
        }
        runs[run] = ComparedRun(order=[*own_stages], stages=own_stages)
    summary = Summary(
        format=Summary.FORMAT,
        runs=runs,
        seconds_by_rule=seconds_by_rule(benchmarks) if benchmarks else {},
    )
    _draw(stages, output)
    tables = _tables(summary)
    blocks = ["# Comparison", *(f"## {title}\n\n{markdown_table(*table)}" for title, table in tables.items())]
    compared = [one.results for run in runs.values() for one in run.stages.values()]
    notes = [*legends(compared), *([] if all(one.lossless for one in measured) else [LOSSY])]
    files.write_text(output / "table.md", "\n\n".join([*blocks, *notes]) + "\n")
    best = {title: _best_row(header, rows) for title, (header, rows) in tables.items() if BITS in header}
    page = html("table.html.j2", title="Spider: comparison", tables=tables, best=best, notes=notes)
    files.write_text(output / "table.html", page)
    return summary.write(output / "summary.json")


def leading(stages: Iterable[Evaluation | ComparedStage]) -> str:
    """Return the name of the score that ranks stages.

    It is that of the answers if one of the stages learned answers alone: such a stage forgets what the others
    learned of the rest of a conversation.
    """
    stages = list(stages)
    answers = any(one.learn == "assistant" for one in stages)
    return "bpb_assistant" if answers and all(one.bpb_assistant is not None for one in stages) else "bpb"


def best_first(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Sort evaluations by the score that ranks them, the least first."""
    evaluations = list(evaluations)
    score = leading(evaluations)
    return sorted(evaluations, key=lambda one: float(getattr(one, score)))


def _compared(
    folder: StageFolder, one: Evaluation, text: str, small: tuple[Path, Evaluation] | None
) -> ComparedStage:
    """Return what the summary holds of a stage."""
    sample = Sample.read(folder.sample) if folder.sample.exists() else None
    return ComparedStage(
        **one.model_dump(include=ComparedStage.model_fields.keys() - {"bytes", "seconds", "results"}),
        **one.training.model_dump(exclude={"global_step"}),
        text=text,
        scored_bytes=one.bytes,
        context=one.context,
        results=_tabled(one.all_results | further_results(folder, one.weights)),
        compressed=_compressed(*small, one) if small else None,
        prompt=sample.prompt if sample else None,
        sample=sample.text if sample else None,
    )


def _compressed(path: Path, scored: Evaluation, whole: Evaluation) -> CompressedStage:
    """Return what the summary holds of a stage's compressed model."""
    folder = CompressedFolder(path.parent)
    record = CompressedReceipt.read(folder.receipt).compressed
    return CompressedStage(
        **record.model_dump(include={"bytes", "code_bytes", "total_bytes", "cap", "clip"}),
        **scored.model_dump(include={"bpb", "bpb_strict", "text_sha256"}),
        lost=scored.bpb - whole.bpb,
        results=_tabled(scored.all_results | further_results(folder, scored.weights)),
    )


def _tabled(results: dict[str, Result]) -> dict[str, Result]:
    """Return results without what tables do not show."""
    return {name: one.model_copy(update={"figures": [], "details": {}}) for name, one in results.items()}


def _best_row(header: str, rows: list[list[str]]) -> list[str]:
    """Return the row of a table with the least value in the first column of scores."""
    return min((row for row in rows if row[1]), key=lambda row: float(row[1].rstrip(DAGGER)))


_Stages = dict[str, list[tuple[StageFolder, Evaluation]]]


def _by_run(paths: list[Path]) -> _Stages:
    """Evaluations grouped by run, in the order of the stages."""
    if not paths:
        raise ValueError("there is nothing to compare: no evaluation was given")
    runs: _Stages = defaultdict(list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        one = Evaluation.read(path)
        if before := seen.get((one.run, one.stage)):
            raise ValueError(f"{path}: {one.run}/{one.stage} was already given as {before}")
        seen[one.run, one.stage] = path
        runs[one.run].append((StageFolder(path.parent), one))
    return {run: sorted(own, key=lambda item: item[1].index) for run, own in runs.items()}


def _labels(evaluations: list[Evaluation]) -> dict[str, str]:
    """Return what each text is called, by its hash: as its datasets, with its size where these have several
    texts. A text that is not what was written has a dagger."""
    by_hash = {one.text_sha256: one for one in evaluations}
    datasets = {sha: ", ".join(dict.fromkeys(one.data for one in evaluations if one.text_sha256 == sha))
                for sha in by_hash}  # fmt: skip
    names = [*datasets.values()]
    labels: dict[str, str] = {}
    for sha, one in by_hash.items():
        name = datasets[sha] if one.lossless else f"{datasets[sha]}{DAGGER}"
        label = name if names.count(datasets[sha]) == 1 else f"{name} ({one.bytes:,} bytes)"
        labels[sha] = label if label not in labels.values() else f"{label} {sha[:8]}"
    return labels


def _draw(stages: _Stages, output: Path) -> None:
    """Draw the figures of all runs, or of the best."""
    best = [one.run for one in best_first(own[-1][1] for own in stages.values())[:_DRAWN_RUNS]]
    names = {run: run if own[-1][1].lossless else f"{run}{DAGGER}" for run, own in stages.items()}
    drawn = {names[run]: own for run, own in stages.items() if run in best}
    few = len(drawn) == len(stages)
    decoded = "" if drawn.keys() <= stages.keys() else f" ({DAGGER} of decoded text)"
    which = ("all runs" if few else f"the best {len(drawn)} of {len(stages)} runs") if len(stages) > 1 else ""
    logs: list[Log] = []
    for name, own in drawn.items():
        begin = 0.0
        for folder, one in own:
            logs.append(replace(read_log(folder, begin, one.bpb), run=name))
            begin = logs[-1].end
    title = f"Training loss (lines) and held-out text (marks) of {which}" if which else "Training loss"
    loss = figures.loss(logs, title + decoded)
    picture(output / "loss.svg", [(1, [loss])])
    chart = figures.bits_by_stage(
        {run: [(one.stage, one.bpb) for _, one in own] for run, own in drawn.items()},
        {run: _rates(own[-1][1]) for run, own in drawn.items()},
        decoded if few else f", {which}{decoded}",
    )
    picture(output / "bpb.svg", [(1, [chart])], figures.width_of(chart))


def _rates(one: Evaluation) -> dict[str, float]:
    """Return the rates of the baselines that a figure shows, by label."""
    return {row.label: row.value or 0.0 for row in shortened(baselines(one.results))}


def _tables(summary: Summary) -> dict[str, tuple[str, list[list[str]]]]:
    """Return tables by title: scores and baselines for each text, the other results, seconds by rule."""
    tables = {}
    named = [(f"{run} / {name}", one.stages[name]) for run, one in summary.runs.items() for name in one.order]
    for text in dict.fromkeys(stage.text for _, stage in named):
        own = [(name, stage) for name, stage in named if stage.text == text]
        title = f"Held-out text of {text}, {own[0][1].scored_bytes:,} bytes"
        tables[title] = _score_table(own)
    results = [(name, stage.results) for name, stage in named]
    results += [(_title(name, s.compressed), s.compressed.results) for name, s in named if s.compressed]
    for key in dict.fromkeys(key for _, found in results for key in found):
        measured = [(name, found[key]) for name, found in results if key in found]
        columns = {row.name: row.label for _, one in measured for row in one.own_rows()}
        if columns:
            rows = [[name, *_cells(one.own_rows(), columns)] for name, one in measured]
            tables[measured[0][1].title] = "|".join(["", *columns.values()]), rows
    if summary.seconds_by_rule:
        rows = [[rule, f"{s:,.1f}"] for rule, s in summary.seconds_by_rule.items()]
        tables["Wall time by rule, all jobs together"] = "rule|seconds", rows
    return tables


def _score_table(stages: list[tuple[str, ComparedStage]]) -> tuple[str, list[list[str]]]:
    """Return the scores of stages on one text, of their compressed models, and of the baselines."""
    columns = score_columns((stage.results for _, stage in stages), leading(stage for _, stage in stages))
    dagger = stages[0][1].dagger
    rows = []
    for name, stage in stages:
        cost = [stage.context, f"{stage.steps:,}", f"{stage.bytes / 1e6:,.2f}", f"{stage.seconds:,.1f}"]
        rows.append([name, *_cells(scores(stage.results), columns, dagger), *cost])
    for name, stage in stages:
        if one := stage.compressed:
            cells = _cells(scores(one.results), columns, dagger)
            rows.append([_title(name, one), *cells, stage.context, "", "", ""])
    for label, row in _rivals(stages):
        cells = baseline_cells(row, columns, dagger)
        rows.append([label, *cells, "all before", "", "", ""])
    return "|".join(["", *columns.values(), "context", "steps", "MB trained", "seconds"]), rows


def score_columns(results: Iterable[Results], first: str) -> dict[str, str]:
    """Return the columns of the model's scores, label by name; the score that ranks is the first."""
    rows = [row for one in results for row in scores(one)]
    rows.sort(key=lambda row: row.name != first)
    return {row.name: row.label for row in rows}


def baseline_cells(row: Row, columns: dict[str, str], dagger: str) -> list[str]:
    """Return a baseline's values below the columns of scores: its rate is in that of all of the text."""
    values = {BITS: row, **row.columns}
    return [str(values[label]) + dagger if label in values else "" for label in columns.values()]


def _title(name: str, one: CompressedStage) -> str:
    return f"{name}, compressed into {one.total_bytes:,} bytes"


def _cells(rows: Iterable[Row], columns: Iterable[str], dagger: str = "") -> list[str]:
    """Return the values of rows below the columns of these names."""
    values = {row.name: f"{row}{dagger}" for row in rows if row.value is not None}
    return [values.get(name, "") for name in columns]


def _rivals(stages: list[tuple[str, ComparedStage]]) -> list[tuple[str, Row]]:
    """Return label and row of each baseline on the text of these stages, of the last stage of each run.

    A baseline whose rate is not the same for all runs has a row for each rate, which names its runs.
    """
    last = {name.partition(" / ")[0]: stage for name, stage in stages}
    runs: dict[str, list[str]] = defaultdict(list)
    found: dict[str, Row] = {}
    for run, stage in last.items():
        for row in baselines(stage.results):
            key = row.model_dump_json()
            runs[key].append(run)
            found[key] = row
    named = [
        (
            (row.note or row.label)
            + ("" if len(runs[key]) == len(last) else f", for {', '.join(runs[key])}"),
            row,
        )
        for key, row in found.items()
    ]
    return sorted(named, key=lambda one: one[1].value or 0.0)
