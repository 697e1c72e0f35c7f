"""Print the terminal summary of a finished workflow: scores, a sample of text, and the next commands.

All of it is read from summary.json. Rich adapts the output: colours on a terminal, plain text in a pipe, at
most 80 columns wide, so that a log has the same lines.
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

from spider.evaluation.result import BITS, CONTEXTS
from spider.report.compare import ComparedRun, ComparedStage, Summary
from spider.report.formatting import LOSSY, bits, duration, printable
from spider.report.scores import dagger, leading, ranking, verdicts

WIDTH = 80
BAR = 14
_LEGEND = (
    "Each document alone: nothing of other held-out documents is read; a compressor is reset. "
    "With what came before: earlier documents are read; a compressor learns from them. "
    "Compare within a column. An empty cell: it cannot be reset, or was not measured."
)
#: Most runs that have a panel each. Of more runs, as in a sweep, the best has one, below a list.
PANELS = 4
#: Most runs in the list.
LISTED = 20


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
    runs = summary.runs
    shown = list(runs)
    if len(runs) > PANELS:
        score = leading(one.last for one in runs.values())
        shown.sort(key=lambda run: float(getattr(runs[run].last, score)))
        console.print(_list(shown, runs), width=width)
        del shown[1:]
    for run in shown:
        console.print(_panel(run, runs[run]), width=width)
    console.print(_closing(summary, path, started or Invocation()), width=width)


def _list(best_first: list[str], runs: dict[str, ComparedRun]) -> Table:
    """Return a table with one line for each run, with the text that it was scored on."""
    table = _table("run", 36, "bits/byte", "steps", "seconds")
    table.add_column("text", no_wrap=True)
    for run in best_first[:LISTED]:
        last = runs[run].last
        table.add_row(
            escape(run),
            bits(last.bpb) + dagger(last),
            f"{last.global_step:,}",
            f"{last.seconds:,.0f}",
            escape(last.text),
        )
    if len(runs) > LISTED:
        table.add_row(f"and {len(runs) - LISTED} more, in table.md")
    return table


def _panel(run: str, one: ComparedRun) -> Panel:
    """Return the panel of a run: its verdict, its rank among the baselines, its stages and its sample."""
    last = one.last
    heads = [title.replace("what ", "what\n").replace("document ", "document\n") for title in CONTEXTS]
    stages = _table("after stage", 21, *heads, "steps", "MB\ntrained", "seconds")
    for name, stage in one.models.items():
        stages.add_row(
            escape(name),
            bits(stage.bpb) + dagger(stage),
            "" if stage.bpb_carried is None else bits(stage.bpb_carried) + dagger(stage),
            f"{stage.steps:,}",
            f"{stage.bytes / 1e6:,.2f}",
            f"{stage.seconds:,.0f}",
        )
    parts: list[RenderableType] = [
        _verdict(one),
        Text(),
        _bars(run, last),
        Text(_LEGEND, style="dim"),
        Text(f"Context of the model: {last.context}.", style="dim"),
        *_further(last),
        Text(),
        stages,
        Text(),
    ]
    if not last.lossless:
        parts += [Text(LOSSY, style="dim"), Text()]
    if last.sample is not None:
        parts.append(Text("A sample, the prompt in bold:", style="dim"))
        prompt = Text(printable(last.prompt or ""), style="bold")
        parts.append(prompt.append(printable(last.sample), style="not bold"))
    return Panel(
        Group(*parts),
        title=f"[bold]{escape(run)}[/]",
        title_align="left",
        subtitle=f"{last.scored_bytes:,} held-out bytes of {escape(last.data)}",
        subtitle_align="right",
    )


def _verdict(one: ComparedRun) -> Text:
    """Compare the last stage with the baselines in each context, or with an earlier stage's answers."""
    last = one.last
    mark = dagger(last)
    if one.leading == "bpb_assistant":
        score = last.bpb_assistant or 0.0
        line = f"{bits(score)}{mark} bits per byte of the answers"
        better = True
        if len(one.like_last) > 1:
            before = one.like_last[-2]
            change = score / (one.stages[before].bpb_assistant or score) - 1
            better = change < 0
            line += f", {abs(change):.1%} {'below' if better else 'above'} stage {before}"
        text = Text(f"{line}.", style="bold green" if better else "bold yellow")
        whole = f" {bits(last.bpb)}{mark} of the whole text, which the baselines read."
        return text.append(whole, style="not bold dim")
    found = verdicts(last, last.results)
    lines = [f"{one.context[0].upper()}{one.context[1:]}: {one.text}." for one in found]
    styles = {None: "bold", True: "bold green", False: "bold yellow"}
    return Text("\n").join(
        Text(line, style=styles[one.below]) for line, one in zip(lines, found, strict=True)
    )


def _further(last: ComparedStage) -> list[Text]:
    """Return a line for each further result with numbers of the model, and for each row with a note."""
    lines = list(last.results["score"].notes)
    for row in last.results["score"].rows[:1]:
        intervals = ["{}: {:.3f} to {:.3f}".format(c, *n.interval) for _, c, n in row.numbers() if n.interval]
        if intervals:
            lines.append(f"95% intervals over documents, {', '.join(intervals)}.")
    for name, result in last.results.items():
        numbers = []
        for row in result.rows:
            if row.baseline or name == "score":
                continue
            for _, context, number in row.numbers():
                of_text = row.unit == BITS
                text = f"{number}{dagger(last)}" if of_text else str(number)
                if row.note:
                    lines.append(f"{row.note}{f', {context}' if of_text else ''}: {text}")
                else:
                    numbers.append(f"{row.label} {text}")
        if numbers:
            lines.append(f"{result.title}: {', '.join(numbers)}")
    return [Text(line, style="dim") for line in lines]


def _bars(run: str, last: ComparedStage) -> Table:
    """Return the model among the baselines, with a column of bars for each context."""
    table = _table("", 24)
    for context in CONTEXTS:
        table.add_column(context, no_wrap=True)
    ranks = ranking(f"{run} (this model)", last, last.results)
    worst = {c: max((rank.bits.get(c, 0.0) for rank in ranks), default=0.0) for c in CONTEXTS}
    for rank in ranks:
        cells = []
        for context in CONTEXTS:
            value = rank.bits.get(context)
            bar = "█" * max(1, round(BAR * value / worst[context])) if value is not None else ""
            cells.append("" if value is None else f"{bits(value)}{dagger(last)} {bar}")
        table.add_row(escape(rank.name), *cells, style="bold green" if rank.own else "dim")
    return table


def _table(first: str, widest: int, *numbers: str) -> Table:
    """Return a table with a column of names, at most ``widest`` wide, and columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, max_width=widest)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


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
