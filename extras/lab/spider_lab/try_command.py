"""`spider try` and `spider verdicts`: decide whether a change helps, by pairs of trainings."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from spider.cli.session import JSON, Session

if TYPE_CHECKING:
    from spider_lab.verdicts import Verdict

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):
    """A duration such as ``30m``. It becomes seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])|0", str(value))
        if not found:
            self.fail(f"{value!r} is not a duration; write 90s, 30m or 2h", param, ctx)
        return float(found[1] or 0) * _UNITS[found[2] or "s"]


@click.command("try")
@click.argument("what", nargs=-1, required=True, metavar="KEY=VALUE...|RUN [-- OPTIONS OF SNAKEMAKE]")
@click.option("--against", "baseline", metavar="RUN", required=True, help="Run that is compared with.")
@click.option(
    "--budget",
    type=Duration(),
    help="Start no pair that would end later, such as 30m; 0 trains nothing (default: no limit).",
)
@click.option(
    "--pairs", type=click.IntRange(2, 100), default=5, show_default=True, help="Largest number of pairs."
)
@click.option("--again", is_flag=True, help="Decide again what verdicts.jsonl has an answer to.")
@JSON
@click.pass_obj
def attempt(
    session: Session,
    what: tuple[str, ...],
    baseline: str,
    budget: float | None,
    pairs: int,
    again: bool,
    as_json: bool,
) -> None:
    """Decide whether a run is better with other settings, such as `model.softcap=null`, or another run is.

    Pairs of both runs with the same seed are trained in turn, and a test stops as soon as they decide it.
    Runs that differ from these by their seed alone are used if they are there. The verdict is a row of
    verdicts.jsonl, and the same question is answered from there. OPTIONS of Snakemake follow two dashes.
    """
    from spider_lab.trial import Trial, with_change
    from spider_lab.verdicts import add_verdict, moved, read_verdicts, verdicts_of

    config, results, path = session.config, session.results, verdicts_of(session.results)
    changes = [one for one in what if not one.startswith("-")]
    options = what[len(changes) :]
    if (candidate := changes[0]) in config.runs:
        changes = []
    else:
        config, candidate = with_change(config, baseline, changes)
    trial = Trial(config, results, (baseline, candidate), changes)
    rows = read_verdicts(path)
    found = None if again else trial.recorded(rows)
    if found is None:
        say = partial(click.echo, err=as_json)
        for line in trial.warnings():
            say(line)
        found = trial.decide(most=pairs, budget=budget, options=options, say=say)
        add_verdict(path, found)
    elif not as_json:
        click.echo(f"verdict of {_date(found)}, from {path} (--again decides again)")
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        return
    for line in described(found):
        click.echo(line)
    for one in rows:
        alike = (one.baseline, one.candidate, one.change) == (found.baseline, found.candidate, found.change)
        if alike and (reason := moved(one, config, results)):
            click.echo(f"  before     {one.outcome} on {_date(one)}, which does not hold today: {reason}")


def _date(verdict: Verdict) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(verdict.time))


def described(verdict: Verdict) -> list[str]:
    """Return the lines that state a verdict."""
    what = " ".join(verdict.change) or verdict.candidate
    lines = [f"{what} against {verdict.baseline}: {verdict.outcome.upper()} ({verdict.reason})"]
    if verdict.difference is not None:
        line = f"  bits/byte  {verdict.difference:+.4f}"
        if verdict.interval:
            line += " ({:+.4f} to {:+.4f}, 95%)".format(*verdict.interval)
        lines.append(line)
    if verdict.pairs:
        lines.append(
            f"  pairs      {len(verdict.pairs)}, seeds {', '.join(str(one.seed) for one in verdict.pairs)}"
        )
    cost = f"{verdict.trainings} trainings, {verdict.seconds:,.0f} s"
    used = 2 * len(verdict.pairs) - verdict.trainings
    lines.append(f"  cost       {cost}" + (f"; {used} runs were there" if used > 0 else ""))
    if verdict.noise is not None:
        lines.append(f"  noise      {verdict.noise:.4f} a run, which seeds have shown in other runs")
    return lines


@click.command()
@JSON
@click.pass_obj
def verdicts(session: Session, as_json: bool) -> None:
    """List all verdicts of the results folder, and those that do not hold today."""
    from spider_lab.verdicts import moved, read_verdicts, verdicts_of

    for one in read_verdicts(verdicts_of(session.results)):
        if as_json:
            click.echo(one.model_dump_json())
            continue
        what = moved(one, session.config, session.results)
        line = f"{_date(one)}  {one.outcome:9}  "
        line += "" if one.difference is None else f"{one.difference:+.4f}"
        line += f"  {' '.join(one.change) or one.candidate} against {one.baseline}"
        click.echo(line + (f"  ({what})" if what else ""))
