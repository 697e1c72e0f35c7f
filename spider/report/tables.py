"""Show tables: as Markdown in ``table.md`` and cards, and in the terminal after a workflow.

The terminal summary is read from summary.json. Rich adapts the output: colours on a terminal, plain text in a
pipe, at most 80 columns wide, so that a log has the same lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from spider.common import files
from spider.common.formatting import duration, printable
from spider.evaluation import result
from spider.evaluation.records import LOSSY, sum_of_probabilities
from spider.evaluation.result import BITS
from spider.report.summary import ComparedRun, Line, Summary, by_text, join, leading, models, verdicts

WIDTH = 80
#: Most models in the terminal.
LISTED = 20
_BAR = 8
#: Longest name of a model in the terminal.
_NAME = 22
_LEGEND = (
    "Each document alone: nothing of other held-out documents is read; a compressor is reset. "
    "With what came before: earlier documents are read; a compressor learns from them. "
    "Compare within a column. An empty cell: it cannot be reset, or was not measured."
)


def markdown(table: result.Table, clean: Callable[[str], str] = str) -> str:
    """Return a table as Markdown, with rows of a good tone in bold; ``clean`` makes text safe for a cell."""
    header, lines = table.header(), table.cells()
    for row, line in zip(table.rows, lines, strict=True):
        line[:] = map(clean, line)
        if row.tone == "good":
            line[:2] = (f"**{cell}**" for cell in line[:2])
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [[*map(clean, header)], rule, *lines])


def compare(
    evaluations: Sequence[Path], *, output: Path, foreign: Sequence[Path] = (), benchmarks: Path | None = None
) -> Summary:
    """Write summary.json and table.md into a folder; arguments and errors as `join`."""
    summary = join(evaluations, foreign=foreign, benchmarks=benchmarks)
    blocks = [f"## {table.title}\n\n{markdown(table)}" for table in summary.tables]
    below = [note for table in summary.tables for note in table.notes]
    text = "\n\n".join(["# Comparison", *blocks, *summary.notes, *below])
    files.write_text(output / "table.md", f"{text}\n")
    return summary.write(output / "summary.json")


# -------------------------------------------------------------------------------------------------- terminal


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
            chosen = f" CONFIG={_quoted(self.config)}" if self.config else ""
            ui, report = f"make ui{chosen}", f"make report{chosen}"
        else:
            config = _quoted(self.config or Path("config.yaml"))
            ui = f"spider --config {config} track ui"
            report = f"snakemake --snakefile {_quoted(self.snakefile)} --configfile {config} "
            report += f"--report {_quoted(folder.parent / 'report.html')}"
        steps = {"Look at every run in MLflow": ui} if self.tracked else {}
        return steps | {"One HTML file with all figures": report}


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
    for lines in by_text({name: run.last for name, run in summary.runs.items()}).values():
        runs = {name: summary.runs[name] for name in lines}
        console.print(Group(*_comparison(summary, runs)), Text(), width=width)
    folder = path.parent.resolve()
    steps = {"Tables and figures": f"{_quoted(folder)}/", **(started or Invocation()).commands(folder)}
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for step, command in steps.items():
        grid.add_row(step, Text(command, style="cyan"))
    console.print(grid, width=width)
    if seconds := summary.seconds_by_rule:
        longest = ", ".join(f"{rule} {duration(s)}" for rule, s in [*seconds.items()][:4])
        total = duration(sum(seconds.values()))
        console.print(Text(f"Time of all jobs: {total}; the longest: {longest}.", style="dim"), width=width)


def _comparison(summary: Summary, runs: Mapping[str, ComparedRun]) -> Iterator[RenderableType]:
    """Yield the table of the models that were scored on one text, and what belongs to it."""
    last = {name: run.last for name, run in runs.items()}
    score = leading(last.values())
    ranked = sorted(last, key=lambda name: float(getattr(last[name], score)))
    best, one = ranked[0], last[ranked[0]]
    lines: dict[str, Line] = {}
    for name in ranked:
        run = runs[name]
        lines |= {name: run.last} if len(runs) > 1 else {stage: run.stages[stage] for stage in run.like_last}
        small = run.last.compressed
        if small and small.text == one.text:
            lines[f"{name}, compressed"] = small
    lines |= {name: other for name, other in summary.foreign.items() if other.text == one.text}
    table = models(lines, summary.noise.get(one.text_sha256), short=True)
    about = f"{one.scored_bytes:,} held-out bytes of {one.text}"
    yield Text.assemble((about, "bold"), ": bits per byte, lower is better")
    yield Text()
    yield _shown(table)
    if len(lines) > LISTED:
        yield Text(f"and {len(lines) - LISTED} more, in table.md")
    yield Text()
    for note in table.notes:
        yield Text(note, style="bold yellow")
    styles = {None: "bold", True: "bold green", False: "bold yellow"}
    for verdict in verdicts(one, one.results):
        line = f"{best}, {verdict.context}: {verdict.score} {verdict.words}."
        yield Text(line, style=styles[verdict.better])
    yield from _badges({name: line for run in ranked for name, line in runs[run].named(run).items()})
    yield Text(_LEGEND, style="dim")
    intervals = [
        "{} {:.3f} to {:.3f}".format(context, *number.interval)
        for row in one.results["score"].rows[:1]
        for _, context, number in row.numbers()
        if number.interval
    ]
    if intervals:
        yield Text(f"95% intervals over documents, {best}: {', '.join(intervals)}.", style="dim")
    yield Text(sum_of_probabilities(max(line.deviation for line in last.values())), style="dim")
    if not one.lossless:
        yield Text(LOSSY, style="dim")
    if one.sample is not None:
        yield Text()
        yield Text(f"A sample of {best}, the prompt in bold:", style="dim")
        prompt = Text(printable(one.prompt or ""), style="bold")
        yield prompt.append(printable(one.sample), style="not bold")


def _badges(lines: Mapping[str, Line]) -> Iterator[Text]:
    """Yield a line for all models with the same good news, and one for each piece of bad news."""
    good: dict[str, list[str]] = {}
    for name, one in lines.items():
        for row in one.badges:
            if row.tone == "good":
                good.setdefault(f"{row.label} {row}".capitalize(), []).append(name)
            else:
                yield Text(f"{row.label.capitalize()} {str(row).upper()}, {name}: {row.note}.", "bold yellow")
    for news, names in good.items():
        yield Text(f"{news}: {', '.join(names)}.", style="green")


def _shown(table: result.Table) -> RichTable:
    """Return a table of models with a bar for each leading score, and as many columns as fit."""
    own = [row for row in table.rows if not row.baseline][:LISTED]
    rivals = [row for row in table.rows if row.baseline]
    rows = [*own, *rivals]
    most = max((row.value for row in rows if row.value), default=1.0)
    shown = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    names = min(_NAME, max(cell_len(row.label) for row in rows))
    shown.add_column("model", no_wrap=True, max_width=names)
    cells = [[escape(row.label)] for row in rows]
    free = WIDTH - names - 2
    for title in [table.value, *table.columns()]:
        numbers = [row if title == table.value else row.columns[title] for row in rows]
        texts = [number.short for number in numbers]
        if title == table.value:
            texts = [
                f"{text} {'█' * max(1, round(_BAR * (number.value or 0) / most))}" if text else ""
                for text, number in zip(texts, numbers, strict=True)
            ]
        lines = next(at for at in range(1, WIDTH) if len(wrap(title, at, break_long_words=False)) < 3)
        width = max(lines, *map(cell_len, texts), *map(len, title.split()))
        if not any(texts) or width > free:
            continue
        free -= width + 2
        left = numbers[0].unit == BITS or not numbers[0].value
        shown.add_column(title, justify="left" if left else "right", min_width=width, max_width=width)
        for cell, text in zip(cells, texts, strict=True):
            cell.append(text)
    for row, cell in zip(rows, cells, strict=True):
        if row is next(iter(rivals), None):
            shown.add_row()
        shown.add_row(*cell, style="dim" if row.baseline else "bold green" if row.tone == "good" else "")
    return shown
