"""Print the terminal summary of a finished workflow: a table of the models, a sample, and the next commands.

All of it is read from summary.json. Rich adapts the output: colours on a terminal, plain text in a pipe, at
most 80 columns wide, so that a log has the same lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spider.audit.record import Badge
from spider.evaluation.noise import Noise, undecided
from spider.evaluation.records import sum_of_probabilities
from spider.evaluation.result import CONTEXTS, GIVEN, Row, baselines, best_first
from spider.report.compare import ComparedRun, ComparedStage, Summary
from spider.report.formatting import LOSSY, bits, duration, printable, quantity
from spider.report.scores import best_stages_first, bits_of, dagger, leading, verdicts

WIDTH = 80
#: Longest bar. Bars are shorter beside long names.
BAR = 14
_LEGEND = (
    "Each document alone: nothing of other held-out documents is read; a compressor is reset. "
    "With what came before: earlier documents are read; a compressor learns from them. "
    "Compare within a column. An empty cell: it cannot be reset, or was not measured."
)
#: Most models in a table.
LISTED = 20
_RIVALS = "baselines"
#: Most models beside each other in the table of sources.
_BESIDE = 4


@dataclass(frozen=True)
class Invocation:
    """The options of a workflow that the next commands repeat."""

    config: Path | None = None
    """File of the whole configuration; None: config.yaml of the current folder."""
    snakefile: Path | None = None
    """The Snakefile; None: that of the current folder, which is a checkout with a Makefile."""
    tracked: bool = True
    """Whether runs are recorded in an MLflow store."""

    def commands(self, folder: Path) -> dict[str, str]:
        """Return the next steps and their commands; ``folder`` holds the summary."""
        if self.snakefile is None:
            chosen = f" CONFIG={self._quoted(self.config)}" if self.config else ""
            ui = f"make ui{chosen}"
            report = f"make report{chosen}"
        else:
            config = self._quoted(self.config or Path("config.yaml"))
            ui = f"spider --config {config} track ui"
            report = f"snakemake --snakefile {self._quoted(self.snakefile)} --configfile {config} "
            report += f"--report {self._quoted(folder.parent / 'report.html')}"
        steps = {"Look at every run in MLflow": ui} if self.tracked else {}
        steps["One HTML file with all figures"] = report
        return steps

    @staticmethod
    def _quoted(path: Path) -> str:
        """Quote a path for a shell, relative to the current folder if it lies below."""
        cwd = Path.cwd()
        return shlex.quote(str(path.relative_to(cwd) if path.is_relative_to(cwd) else path))


def terminal_summary(
    path: Path, *, started: Invocation | None = None, console: Console | None = None
) -> None:
    """Print the summary at ``path`` of a finished workflow; raise as `Summary.read`."""
    summary = Summary.read(path)
    console = console or Console(highlight=False)
    width = min(WIDTH, console.width)
    for text in dict.fromkeys(run.last.text for run in summary.runs.values()):
        runs = {name: run for name, run in summary.runs.items() if run.last.text == text}
        foreign = {name: model for name, model in summary.foreign.items() if model.text == text}
        noise = summary.noise.get(next(iter(runs.values())).last.text_sha256)
        console.print(Group(*_comparison(runs, foreign, noise)), Text(), width=width)
    console.print(_closing(summary, path, started or Invocation()), width=width)


@dataclass(frozen=True)
class _Line:
    """A model or a baseline in the table."""

    name: str
    bits: tuple[float | None, ...]
    """Bits per byte by column."""
    trained: float | None
    """Bytes that the model was trained on, or that the baseline was given."""
    parameters: int | None = None
    seconds: float | None = None


def _comparison(
    runs: dict[str, ComparedRun], foreign: dict[str, ComparedStage], noise: Noise | None
) -> Iterator[RenderableType]:
    """Yield the table of the models that were scored on one text, the best first, and what belongs to it."""
    last = [run.last for run in runs.values()]
    score = leading(last)
    best = best_stages_first(last)
    ordered = sorted(runs, key=lambda name: best.index(runs[name].last))
    one = runs[ordered[0]]
    models = [line for name in ordered for line in _models(name, runs[name], score, alone=len(runs) == 1)]
    rivals = [_foreign(name, foreign[name], score) for name in foreign]
    rivals += [_rival(row, score) for row in _best_baselines(last)]
    title = f"{one.last.scored_bytes:,} held-out bytes of {one.last.text}"
    yield Text.assemble((title, "bold"), ": bits per byte, lower is better")
    yield Text()
    unclear = undecided(((line.name, line.bits[0], True) for line in models if line.bits[0]), noise)
    title = "model" if len(runs) > 1 else ordered[0]
    yield _table(title, models, rivals, score, dagger(one.last), mark_best=unclear is None)
    if len(models) > LISTED:
        yield Text(f"and {len(models) - LISTED} more, in table.md")
    yield Text()
    if unclear:
        yield Text(unclear, style="bold yellow")
    yield _verdict(ordered[0], one)
    yield from _audits(
        {f"{run} {name}": row.audit for run in ordered for name, row in runs[run].rows.items()}
    )
    for note in _notes(ordered[0], one, runs):
        yield Text(note, style="dim")
    best_last = {name: runs[name].last for name in ordered[:_BESIDE]}
    yield from _by_source(best_last if len(runs) > 1 else dict([*one.stages.items()][-_BESIDE:]))
    if one.last.sample is not None:
        yield Text()
        yield Text(f"A sample of {ordered[0]}, the prompt in bold:", style="dim")
        prompt = Text(printable(one.last.prompt or ""), style="bold")
        yield prompt.append(printable(one.last.sample), style="not bold")


def _models(name: str, run: ComparedRun, score: str, *, alone: bool) -> Iterator[_Line]:
    """Yield a line for the last stage of a run, and for its compressed model; of a run ``alone`` for all."""
    trained, seconds = 0, 0.0
    for stage_name in run.order:
        stage = run.stages[stage_name]
        trained += stage.bytes
        seconds += stage.seconds
        if not alone and stage is not run.last:
            continue
        label = stage_name if alone else name
        for model, text in ((stage, label), (stage.compressed, f"{label}, compressed")):
            if model is not None:
                answers = _answers(model.bpb_assistant, score)
                yield _Line(
                    name=text,
                    bits=(*answers, *(bits_of(model, context) for context in CONTEXTS)),
                    trained=trained,
                    parameters=model.parameters,
                    seconds=seconds,
                )


def _best_baselines(last: Iterable[ComparedStage]) -> list[Row]:
    """Return the best baseline in each context, of those that were given the same text; the best first."""
    given: dict[tuple[str, float | None], list[Row]] = {}
    for stage in last:
        for row in baselines(stage.results):
            same = given.setdefault((row.group, _bytes_given(row)), [])
            if row not in same:
                same.append(row)
    kept = [best_first(rows, context)[0] for rows in given.values() for context in CONTEXTS]
    return best_first({row.model_dump_json(): row for row in kept}.values())


def _bytes_given(row: Row) -> float | None:
    """Return the bytes that a baseline has read before the held-out text; None if it is unknown."""
    number = row.columns.get(GIVEN)
    return None if number is None else number.value


def _rival(row: Row, score: str) -> _Line:
    """Return the line of a baseline."""
    values = (row.number(context) for context in CONTEXTS)
    return _Line(
        name=row.label.removesuffix(f" {row.group}"),
        bits=(*_answers(None, score), *(None if number is None else number.value for number in values)),
        trained=_bytes_given(row),
    )


def _foreign(name: str, model: ComparedStage, score: str) -> _Line:
    """Return the line of a model that others trained."""
    bits = (*_answers(None, score), *(bits_of(model, context) for context in CONTEXTS))
    return _Line(name=name, bits=bits, trained=None, parameters=model.parameters)


def _answers(value: float | None, score: str) -> tuple[float | None, ...]:
    """Return the first column of a table of models that learned the answers of conversations, or nothing."""
    return (value,) if score == "bpb_assistant" else ()


def _table(
    title: str, models: list[_Line], rivals: list[_Line], score: str, mark: str, *, mark_best: bool
) -> Table:
    """Return the models below their title, and the baselines below them, with a bar for each score."""
    heads = ["each document\nalone", "with what\ncame before"]
    if score == "bpb_assistant":
        heads.insert(0, "of the\nanswers")
    widest = 22 if len(heads) == 2 else 16
    names = min(widest, max(cell_len(name) for name in (*(one.name for one in models + rivals), _RIVALS)))
    # Beside a bar stand a number, its mark and spaces (9 cells); the other columns take 28.
    bar = min(BAR, (WIDTH - 30 - names) // len(heads) - 9)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(title, no_wrap=True, max_width=widest)
    for head in heads:
        table.add_column(head, no_wrap=True)
    for head in ("parameters", "trained\non, MB", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    worst = [
        max((v for v in column if v), default=1.0)
        for column in zip(*(x.bits for x in models + rivals), strict=True)
    ]

    def add(line: _Line, style: str) -> None:
        scores = [
            "" if value is None else f"{bits(value)}{mark} {'█' * max(1, round(bar * value / most))}"
            for value, most in zip(line.bits, worst, strict=True)
        ]
        table.add_row(
            escape(line.name),
            *scores,
            "" if line.parameters is None else quantity(line.parameters, ""),
            "" if line.trained is None else f"{line.trained / 1e6:,.2f}",
            "" if line.seconds is None else f"{line.seconds:,.0f}",
            style=style,
        )

    best = min(models, key=lambda line: line.bits[0] or 0.0)
    for line in models[:LISTED]:
        add(line, "bold green" if line is best and mark_best else "")
    if rivals:
        table.add_row()
        table.add_row(_RIVALS, style="dim")
    for line in rivals:
        add(line, "dim")
    return table


def _by_source(models: dict[str, ComparedStage]) -> Iterator[RenderableType]:
    """Yield the scores of each source of a mixture, for the models that have them."""
    found = {
        name: model.results["sources"].rows for name, model in models.items() if "sources" in model.results
    }
    if not found:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("each document alone", *found):
        table.add_column(title, no_wrap=True)
    values = [{row.label: row.value for row in rows} for rows in found.values()]
    for label in dict.fromkeys(label for one in values for label in one):
        numbers = (one.get(label) for one in values)
        table.add_row(escape(label), *("" if value is None else bits(value) for value in numbers))
    yield Text()
    yield Text("By source:", style="dim")
    yield table


def _verdict(name: str, one: ComparedRun) -> Text:
    """Compare the best run with the best baselines, or its answers with those of an earlier stage."""
    last = one.last
    mark = dagger(last)
    if one.leading == "bpb_assistant":
        score = last.bpb_assistant or 0.0
        line = f"{name}: {bits(score)}{mark} bits per byte of the answers"
        better = True
        if len(one.like_last) > 1:
            before = one.like_last[-2]
            change = score / (one.stages[before].bpb_assistant or score) - 1
            better = change < 0
            line += f", {abs(change):.1%} {'below' if better else 'above'} stage {before}"
        text = Text(f"{line}.", style="bold green" if better else "bold yellow")
        whole = f" {bits(last.bpb)}{mark} of the whole text, which the baselines read."
        return text.append(whole, style="not bold dim")
    styles = {None: "bold", True: "bold green", False: "bold yellow"}
    found = verdicts(last, last.results)
    return Text("\n").join(
        Text(f"{name}, {one.context}: {one.text}.", style=styles[one.below]) for one in found
    )


def _audits(badges: dict[str, Badge | None]) -> Iterator[Text]:
    """Yield a line for each audit: a short one if it passed, and else all that is known of it."""
    passed = [name for name, badge in badges.items() if badge and badge.state == "passed"]
    if passed:
        yield Text(f"Audit passed: {', '.join(passed)}.", style="green")
    for name, badge in badges.items():
        if badge and badge.state != "passed":
            yield Text(f"Audit {badge.state.upper()}, {name}: {badge.text}.", style="bold yellow")


def _notes(name: str, best: ComparedRun, runs: dict[str, ComparedRun]) -> Iterator[str]:
    """Yield what a reader needs to trust the table: contexts, sums of probabilities, intervals."""
    yield _LEGEND
    last = {name: run.last for name, run in runs.items()}
    counted = [
        f"{other} also looks up counts of {stage.counted / 1e6:,.1f} MB."
        for other, stage in last.items()
        if stage.counted
    ]
    if counted:
        yield " ".join(counted[:3])
    intervals = [
        "{} {:.3f} to {:.3f}".format(context, *number.interval)
        for row in best.last.results["score"].rows[:1]
        for _, context, number in row.numbers()
        if number.interval
    ]
    if intervals:
        yield f"95% intervals over documents, {name}: {', '.join(intervals)}."
    yield sum_of_probabilities(max(stage.deviation for stage in last.values()))
    if not best.last.lossless:
        yield LOSSY


def _closing(summary: Summary, path: Path, started: Invocation) -> Group:
    """Return the next commands, and the time by rule."""
    steps = Table.grid(padding=(0, 2))
    steps.add_column(no_wrap=True)
    steps.add_column(overflow="fold")
    folder = path.parent.resolve()
    cwd = Path.cwd()
    short = folder.relative_to(cwd) if folder.is_relative_to(cwd) else path.parent
    for step, command in {"Tables and figures": f"{short}/", **started.commands(folder)}.items():
        steps.add_row(step, Text(command, style="cyan"))
    seconds = summary.seconds_by_rule
    if not seconds:
        return Group(steps)
    by_rule = ", ".join(f"{rule} {duration(s)}" for rule, s in seconds.items())
    total = duration(sum(seconds.values()))
    return Group(steps, Text(f"Time by rule: {by_rule}; {total} of jobs in all.", style="dim"))
