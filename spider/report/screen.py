"""The last thing a run says: how good the model is, what it writes, and what to do next.

Everything shown is read from summary.json. Rich adapts it: colour on a terminal, plain text in a pipe, never
wider than 80 columns, so that it reads the same in a log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spider.report.compare import read_summary
from spider.report.formatting import duration, printable

WIDTH = 80
BAR = 28
#: Runs that have a panel each; of more, as a sweep has, the best one, below a list of the best.
PANELS, RANKED = 4, 20

#: What to do next: a word, and the command. Edited here when a command changes.
NEXT_STEPS: tuple[tuple[str, str], ...] = (
    ("Look at every run in MLflow", "make ui"),
    ("One HTML file with all figures", "make report"),
    ("Train the next size", "make run CONFIG=presets/spider-1b.yaml"),
)


def final_screen(
    summary: Path, *, console: Console | None = None, next_steps: tuple[tuple[str, str], ...] = NEXT_STEPS
) -> None:
    """Print what a finished workflow reached.

    Raises:
        ValueError: no summary there, or one of another version.
    """
    gathered = read_summary(summary)
    console = console or Console(highlight=False)
    width = min(WIDTH, console.width)
    runs = gathered["runs"]
    best_first = sorted(runs, key=lambda run: _last(runs[run])["bpb"])
    if len(runs) > PANELS:
        console.print(_ranking(best_first, runs), width=width)
    for run in best_first[:1] if len(runs) > PANELS else runs:
        console.print(_run_panel(run, runs[run], gathered), width=width)
    console.print(_closing(gathered, summary, next_steps), width=width)


def _last(one: dict[str, Any]) -> dict[str, Any]:
    return one["stages"][one["order"][-1]]


def _ranking(best_first: list[str], runs: dict[str, Any]) -> Table:
    """Many runs, a line each; those scored on other texts are told apart by the text's name."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("run", no_wrap=True, max_width=36)
    for title in ("bits/byte", "steps", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    for run in best_first[:RANKED]:
        last = _last(runs[run])
        figures = (f"{last['bpb']:.3f}", f"{last['global_step']:,}", f"{last['seconds']:,.0f}")
        table.add_row(escape(run), *figures, escape(last["text"]))
    if (more := len(best_first) - RANKED) > 0:
        table.add_row(f"and {more} more, in table.md")
    return table


def _run_panel(run: str, one: dict[str, Any], summary: dict[str, Any]) -> Panel:
    last = _last(one)
    compressors = summary["compressors_by_data"][last["text"]]
    dataset = last["text"].split(" ")[0]
    return Panel(
        Group(
            _verdict(last["bpb"], compressors),
            Text(),
            _bars(run, last["bpb"], compressors),
            Text(),
            _stages(one),
            Text(),
            Text("A sample, the prompt in bold:", style="dim"),
            Text(printable(last["prompt"]), style="bold").append(printable(last["sample"]), style="not bold"),
        ),
        title=f"[bold]{escape(run)}[/]",
        title_align="left",
        subtitle=f"bits per byte on {last['scored_bytes']:,} held-out bytes of {escape(dataset)}",
        subtitle_align="right",
    )


def _verdict(bpb: float, compressors: dict[str, float]) -> Text:
    name, bits = min(compressors.items(), key=lambda item: item[1])
    share = abs(1 - bpb / bits)
    if bpb < bits:
        text = f"{bpb:.3f} bits per byte: {share:.1%} below {name}, the best of the compressors."
        return Text(text, style="bold green")
    beaten = [n for n, b in compressors.items() if bpb < b]
    tail = f"; better than {', '.join(beaten)}" if beaten else ""
    return Text(
        f"{bpb:.3f} bits per byte: {share:.1%} above {name}, the best compressor{tail}.", style="bold yellow"
    )


def _bars(run: str, bpb: float, compressors: dict[str, float]) -> Table:
    """The model among the compressors, best first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, max_width=24)
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    rows = sorted([(bpb, f"{run} (this model)"), *((b, n) for n, b in compressors.items())])
    longest = rows[-1][0]
    for bits, name in rows:
        ours = name.endswith("(this model)")
        bar = "█" * max(1, round(BAR * bits / longest))
        table.add_row(escape(name), f"{bits:.3f}", bar, style="bold green" if ours else "dim")
    return table


def _stages(one: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("after stage", no_wrap=True, max_width=24)
    for title in ("bits/byte", "strict", "steps", "MB trained", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in one["order"]:
        stage = one["stages"][name]
        table.add_row(
            escape(name),
            f"{stage['bpb']:.3f}",
            f"{stage['bpb_strict']:.3f}",
            f"{stage['steps']:,}",
            f"{stage['bytes'] / 1e6:,.2f}",
            f"{stage['seconds']:,.0f}",
        )
    return table


def _closing(summary: dict[str, Any], path: Path, next_steps: tuple[tuple[str, str], ...]) -> Group:
    steps = Table.grid(padding=(0, 2))
    steps.add_column(no_wrap=True)
    steps.add_column(overflow="fold")
    steps.add_row("Tables and figures", Text(f"{_short(path.parent)}/", style="cyan"))
    for what, command in next_steps:
        steps.add_row(what, Text(command, style="cyan"))
    spent = [f"{rule} {duration(s)}" for rule, s in summary["seconds_by_rule"].items()]
    total = sum(summary["seconds_by_rule"].values())
    parts: list[Any] = [steps]
    if spent:
        parts.append(
            Text(f"Time by rule: {', '.join(spent)}; {duration(total)} of jobs in all.", style="dim")
        )
    return Group(*parts)


def _short(path: Path) -> Path:
    """The path as one would type it here, if it is below the current folder."""
    here = Path.cwd()
    return path.resolve().relative_to(here) if path.resolve().is_relative_to(here) else path
