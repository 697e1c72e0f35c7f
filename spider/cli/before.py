"""Commands before a run: what it costs, what would stop it, and all keys of a configuration."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import click

from spider.cli.session import FILE, JSON, Session, command

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@command("[run]")
@JSON
@click.option(
    "--memory", type=click.FloatRange(0, min_open=True), metavar="GB", help="Of the device for auto."
)
def describe(session: Session, run: str | None, as_json: bool, memory: float | None) -> None:
    """Estimate the cost of a run before training: parameters, FLOPs per byte, steps, memory.

    Several runs, those of a sweep or, without RUN, all of them, get one line each.
    """
    from spider.workflow.describe import describe, render, render_list

    config = session.config
    single = run is not None and run not in config.sweeps
    names = config.sweeps.get(run or "", [run] if run else config.runs)
    costs = [describe(config, name, None if memory is None else int(1e9 * memory)) for name in names]
    if as_json:
        click.echo(json.dumps(costs[0] if single else costs, indent=2))
    elif single:
        render(costs[0])
    else:
        render_list(costs)


@click.command()
@click.argument("config", type=FILE, required=False)
@click.option("--workflow-profile", "profile", type=FILE, help="Profile of a scheduler that runs the jobs.")
@click.option("--seconds", default=4.0, show_default=True, help="Seconds to wait for hosts and disks.")
@click.pass_obj
def doctor(session: Session, config: Path | None, profile: Path | None, seconds: float) -> None:
    """Check what would stop a run, before anything is downloaded or trained; exit with 1 if something would.

    CONFIG is the configuration (default: that of --config). Each line has ok, warning or problem, what was
    found, and what to do.
    """
    from spider.workflow.doctor import examine

    logging.disable(logging.WARNING)  # Findings have what retries of requests would log.
    failed = False
    for subject, mark, text in examine((Session(config) if config else session).config, profile, seconds):
        click.echo(f"{click.style(f'{mark:<8}', fg=_COLOURS[mark])} {subject}: {text}")
        failed = failed or mark == "problem"
    sys.exit(int(failed))


@click.group()
def config() -> None:
    """All keys of a configuration, for editors and for people."""


@config.command()
def schema() -> None:
    """Print the JSON schema of configurations, for editors."""
    from spider.config.reference import json_schema

    click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@config.command()
def reference() -> None:
    """Print all keys with type, default and meaning, as Markdown."""
    from spider.config.reference import reference

    click.echo(reference(), nl=False)
