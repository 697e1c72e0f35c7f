"""Show tables: as Markdown in ``table.md`` and cards, and in the terminal after a workflow.

The terminal summary is read from summary.json. Rich adapts the output: colours on a terminal, plain text in a
pipe, at most 80 columns wide, so that a log has the same lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from spider.common import files
from spider.common.formatting import printable
from spider.evaluation import result
from spider.evaluation.records import LOSSY
from spider.evaluation.result import BITS
from spider.report.summary import Line, Summary, by_text, join, leading, models, worth

WIDTH = 80
#: Most models in the terminal.
LISTED = 20
_BAR = 8
#: Longest name of a model in the terminal.
_NAME = 22
#: Most characters of the sample in the terminal.
_SAMPLE = 130
_LEGEND = (
    "Each document alone: nothing else of the held-out text is read; with what came before: all of it "
    "up to there. A compressor like a model was given its text."
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

    def commands(self, folder: Path, best: str, stage: str) -> dict[str, str]:
        """Return the next steps and their commands, for the last stage of the run ``best``.

        Args:
            folder: The folder of the summary.
        """
        config = self.config or (self.snakefile and Path("config.yaml"))
        words = f" --config {_quoted(config)}" if config else ""
        spider = f".venv/bin/spider{words}" if self.snakefile is None else f"spider{words}"
        chosen = f" CONFIG={_quoted(self.config)}" if self.config else ""
        ui = f"make ui{chosen}" if self.snakefile is None else f"{spider} track ui"
        steps = {"Compare in MLflow": ui} if self.tracked else {}
        return steps | {
            f"The page of {best}": _quoted(folder / f"runs/{best}.html"),
            "All tables": _quoted(folder / "table.md"),
            f"Text of {best}": f"{spider} generate {best}/{stage}",
        }


def _quoted(path: Path) -> str:
    """Quote a path for a shell, relative to the current folder if it lies below."""
    cwd = Path.cwd()
    return shlex.quote(str(path.relative_to(cwd) if path.is_relative_to(cwd) else path))


def terminal_summary(
    path: Path, *, started: Invocation | None = None, console: Console | None = None
) -> None:
    """Print the summary at ``path`` of a finished workflow; raise as `Summary.read`.

    That of three models on one text fits 24 lines.
    """
    summary = Summary.read(path)
    console = console or Console(highlight=False)
    width = min(WIDTH, console.width)
    texts = by_text({name: run.last for name, run in summary.runs.items()})
    ranked = [sorted(last, key=partial(_score, last)) for last in texts.values()]
    for names in ranked:
        console.print(Group(*_comparison(summary, names)), Text(), width=width)
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    best = ranked[0][0]
    steps = (started or Invocation()).commands(path.parent.resolve(), best, summary.runs[best].order[-1])
    for step, command in steps.items():
        grid.add_row(step, Text(command, style="cyan"))
    console.print(grid, width=width)


def _score(last: Mapping[str, Line], name: str) -> float:
    return float(getattr(last[name], leading(last.values())))


def _comparison(summary: Summary, ranked: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the table of runs that were scored on one text, best first, and what belongs to it."""
    runs = {name: summary.runs[name] for name in ranked}
    last = {name: run.last for name, run in runs.items()}
    one = last[ranked[0]]
    lines: dict[str, Line] = {}
    for name, run in runs.items():
        lines |= {name: run.last} if len(runs) > 1 else {stage: run.stages[stage] for stage in run.like_last}
        small = run.last.compressed
        if small and small.text == one.text:
            lines[f"{name}, compressed"] = small
    lines |= {name: other for name, other in summary.foreign.items() if other.text == one.text}
    table = models(lines, summary.noise.get(one.text_sha256), short=True)
    if sentence := worth(last):
        yield Text(sentence, style="bold")
    yield Text(f"Bits per byte of {one.scored_bytes:,} held-out bytes of {one.text}, lower is better:")
    yield _shown(table)
    if len(lines) > LISTED:
        yield Text(f"and {len(lines) - LISTED} more, in table.md")
    yield Text(_LEGEND, style="dim")
    for note in table.notes:
        yield Text(note, style="bold yellow")
    yield from _badges({name: line for run in ranked for name, line in runs[run].named(run).items()})
    if not one.lossless:
        yield Text(LOSSY, style="dim")
    if one.sample is not None and one.prompt is not None:
        prompt, text = (" ".join(printable(one.prompt + after).split()) for after in ("", one.sample))
        yield Text()
        begin = (f"{ranked[0]} writes: ", "dim"), (prompt, "bold")
        yield Text.assemble(*begin, text[len(prompt) :][:_SAMPLE])


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
