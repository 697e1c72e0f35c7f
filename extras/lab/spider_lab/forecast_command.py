"""`spider forecast` and `spider ladders`: forecast larger runs, and show what became of the forecasts."""

from __future__ import annotations

import click

from spider.cli.session import Session, log
from spider.config import nearest


@click.command()
@click.argument("ladder")
@click.option("--run", help="Copy the forecast for this run, which is about to start.")
@click.option("--check", is_flag=True, help="Only name the runs that are too short for a forecast.")
@click.pass_obj
def forecast(session: Session, ladder: str, run: str | None, check: bool) -> None:
    """Forecast larger runs from the finished runs of LADDER, before they start."""
    from spider_lab.forecast import claim, forecast, path_of, too_short
    from spider_lab.ladders import ladders_of

    config, results = session.config, session.results
    if ladder not in (known := ladders_of(config)):
        raise ValueError(f"ladders: no ladder {ladder!r}{nearest(ladder, known)}")
    if check:
        for line in too_short(config, ladder):
            click.echo(line)
        return
    if run:
        log.info("%s", claim(config, results, ladder, run))
        return
    found = forecast(config, results, ladder)
    output = path_of(results, ladder)
    output.parent.mkdir(parents=True, exist_ok=True)
    found.write(output)
    for line in found.left_out:
        log.warning("%s: left out, %s", ladder, line)
    for one in found.predictions:
        log.info("%s: %.4f (%.4f to %.4f) at %.3g FLOPs", output, one.bpb, one.low, one.high, one.flops)
    if found.problem:
        log.warning("%s: no forecast, %s", output, found.problem)


@click.command()
@click.pass_obj
def ladders(session: Session) -> None:
    """Write the page of all ladders: laws, forecasts and the results that came later."""
    from spider_lab.page import write_ladders

    output = session.results.report / "ladders.html"
    for view in write_ladders(session.config, session.results, output):
        for line in view.stale:
            log.warning("%s", line)
    log.info("%s", output)
