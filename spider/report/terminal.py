"""The last thing a run says: how good the model is, what it writes, and what to do next.

Everything shown is read from summary.json. Rich adapts it: colour on a terminal, plain text in a pipe, never
wider than 80 columns, so that it reads the same in a log.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spider.evaluation.result import BITS, Row, baselines, shortened
from spider.report.compare import ComparedRun, ComparedStage, Summary, leading
from spider.report.formatting import LOSSY, bits, duration, printable

WIDTH = 80
BAR = 28
#: Runs that have a panel each; of more, as a sweep has, the best one, below a list of the best.
PANELS, RANKED = 4, 20

#: Presets for a GPU and their parameters, the smallest first.
PRESETS = {
    "presets/spider-150m.yaml": 150e6,
    "presets/spider-400m.yaml": 400e6,
    "presets/spider-1b.yaml": 1e9,
}


@dataclass(frozen=True)
class Invocation:
    """How a workflow was started, so that the last lines name commands for the same configuration."""

    config: Path | None = None
    """The file with the whole configuration; None: config.yaml of the current folder."""
    snakefile: Path | None = None
    """The Snakefile; None: that of the current folder, which is a checkout with a Makefile."""
    tracked: bool = True
    """Whether a store holds the runs."""

    def commands(self, summary: Summary, folder: Path) -> dict[str, str]:
        """Return the next steps and their commands; ``folder`` holds the summary."""
        if self.snakefile is None:
            chosen = f" CONFIG={self._quoted(self.config)}" if self.config else ""
            ui, report = f"make ui{chosen}", f"make report{chosen}"
        else:
            config = self._quoted(self.config or Path("config.yaml"))
            places = f"--snakefile {self._quoted(self.snakefile)} --configfile {config}"
            ui = f"spider --config {config} track ui"
            report = f"snakemake {places} --report {self._quoted(folder.parent / 'report.html')}"
        steps = {"Look at every run in MLflow": ui} if self.tracked else {}
        steps["One HTML file with all figures"] = report
        if self.snakefile is None and (preset := next_size(summary)):
            steps["Train the next size"] = f"make run CONFIG={preset}"
        return steps

    @staticmethod
    def _quoted(path: Path) -> str:
        """Return a path as a shell reads it, from the current folder if it lies below."""
        here = Path.cwd()
        return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def next_size(summary: Summary) -> str | None:
    """Return the smallest preset that is larger than all models of a summary; None without a GPU."""
    scored = [one.last for one in summary.runs.values()]
    if not any(one.device.startswith("cuda") for one in scored):
        return None
    largest = max(one.parameters for one in scored)
    return next((preset for preset, size in PRESETS.items() if size > 1.2 * largest), None)


def terminal_summary(
    path: Path, *, started: Invocation | None = None, console: Console | None = None
) -> None:
    """Print what a finished workflow reached, by the summary at ``path``; raises as `Summary.read`."""
    summary = Summary.read(path)
    started = started or Invocation()
    console = console or Console(highlight=False)
    width = min(WIDTH, console.width)
    runs = summary.runs
    score = leading(one.last for one in runs.values())
    best_first = sorted(runs, key=lambda run: float(getattr(runs[run].last, score)))
    if len(runs) > PANELS:
        console.print(_ranking(best_first, runs), width=width)
    for run in best_first[:1] if len(runs) > PANELS else runs:
        console.print(_panel(run, runs[run]), width=width)
    console.print(_closing(summary, path, started), width=width)


def _ranking(best_first: list[str], runs: dict[str, ComparedRun]) -> Table:
    """Return many runs, a line each, with the name of the text that each was scored on."""
    table = _table("run", 36, "bits/byte", "steps", "seconds")
    table.add_column("text", no_wrap=True)
    for run in best_first[:RANKED]:
        last = runs[run].last
        cells = (bits(last.bpb) + last.dagger, f"{last.global_step:,}", f"{last.seconds:,.0f}")
        table.add_row(escape(run), *cells, escape(last.text))
    if (more := len(best_first) - RANKED) > 0:
        table.add_row(f"and {more} more, in table.md")
    return table


def _panel(run: str, one: ComparedRun) -> Panel:
    """Return a run: its verdict, its place among the baselines, its stages and its sample."""
    last = one.last
    table = _table("after stage", 24, "bits/byte", "strict", "steps", "MB trained", "seconds")
    for name in one.order:
        stage = one.stages[name]
        table.add_row(
            escape(name),
            bits(stage.bpb) + stage.dagger,
            bits(stage.bpb_strict) + stage.dagger,
            f"{stage.steps:,}",
            f"{stage.bytes / 1e6:,.2f}",
            f"{stage.seconds:,.0f}",
        )
    rivals = baselines(last.results)
    parts: list[RenderableType] = [
        _verdict(one, rivals),
        Text(),
        _bars(run, last, shortened(rivals)),
        *_further(last),
        Text(),
        table,
        Text(),
        *([] if last.lossless else [Text(LOSSY, style="dim"), Text()]),
        *_sample(last),
    ]
    return Panel(
        Group(*parts),
        title=f"[bold]{escape(run)}[/]",
        title_align="left",
        subtitle=f"{last.scored_bytes:,} held-out bytes of {escape(last.data)}, context {last.context}",
        subtitle_align="right",
    )


def _sample(last: ComparedStage) -> list[Text]:
    """Return the sample of a stage with its prompt in bold; nothing if the stage has none."""
    if last.sample is None:
        return []
    title = Text("A sample, the prompt in bold:", style="dim")
    text = Text(printable(last.prompt or ""), style="bold").append(printable(last.sample), style="not bold")
    return [title, text]


def _verdict(one: ComparedRun, rivals: list[Row]) -> Text:
    """Compare the last stage with the baselines, or with an earlier stage where it learned answers."""
    last, before = one.last, one.like_last[:-1]
    if one.leading == "bpb_assistant":
        score = last.bpb_assistant or 0.0
        said = f"{bits(score)}{last.dagger} bits per byte of the answers"
        share = score / (one.stages[before[-1]].bpb_assistant or score) - 1 if before else 0.0
        if before:
            said += f", {abs(share):.1%} {'below' if share < 0 else 'above'} stage {before[-1]}"
        text = Text(f"{said}.", style="bold green" if not before or share < 0 else "bold yellow")
        whole = f" {bits(last.bpb)}{last.dagger} of the whole text, which the baselines read."
        return text.append(whole, style="not bold dim")
    said = f"{bits(last.bpb)}{last.dagger} bits per byte"
    if not rivals:
        return Text(f"{said}.", style="bold")
    best, rate = rivals[0].label, rivals[0].value or 0.0
    said += f": {abs(1 - last.bpb / rate):.1%}"
    if last.bpb < rate:
        return Text(f"{said} below {best}, the best baseline.", style="bold green")
    beaten = [row.label for row in rivals if last.bpb < (row.value or 0.0)]
    tail = f"; better than {', '.join(beaten)}" if beaten else ""
    return Text(f"{said} above {best}, the best baseline{tail}.", style="bold yellow")


def _further(last: ComparedStage) -> list[Text]:
    """Return a line for each further result with numbers of the model."""
    lines = []
    for name, result in last.results.items():
        rows = [row for row in result.rows if not row.baseline and row.value is not None]
        if rows and name != "score":
            said = ", ".join(f"{row.label} {row}{last.dagger if row.unit == BITS else ''}" for row in rows)
            lines.append(Text(f"{result.title}: {said}", style="dim"))
    return lines


def _bars(run: str, last: ComparedStage, rivals: list[Row]) -> Table:
    """Return the model among the baselines, best first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, max_width=24)
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    own = f"{run} (this model)"
    rows = sorted([(last.bpb, own), *((row.value or 0.0, row.label) for row in rivals)])
    for rate, name in rows:
        bar = "█" * max(1, round(BAR * rate / rows[-1][0]))
        table.add_row(
            escape(name), bits(rate) + last.dagger, bar, style="bold green" if name == own else "dim"
        )
    return table


def _table(first: str, widest: int, *numbers: str) -> Table:
    """A column of names, at most so wide, and columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, max_width=widest)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _closing(summary: Summary, path: Path, started: Invocation) -> Group:
    steps = Table.grid(padding=(0, 2))
    steps.add_column(no_wrap=True)
    steps.add_column(overflow="fold")
    folder = path.parent.resolve()
    short = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else path.parent
    for what, command in {"Tables and figures": f"{short}/", **started.commands(summary, folder)}.items():
        steps.add_row(what, Text(command, style="cyan"))
    spent = [f"{rule} {duration(s)}" for rule, s in summary.seconds_by_rule.items()]
    total = duration(sum(summary.seconds_by_rule.values()))
    times = Text(f"Time by rule: {', '.join(spent)}; {total} of jobs in all.", style="dim")
    return Group(steps, times) if spent else Group(steps)
