"""`spider doctor`: check what would stop a run, before it starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from spider.cli.session import FILE, Session

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


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
    from spider.doctor import examine

    logging.disable(logging.WARNING)  # Findings have what retries of requests would log.
    failed = False
    for subject, mark, text in examine((Session(config) if config else session).config, profile, seconds):
        click.echo(f"{click.style(f'{mark:<8}', fg=_COLOURS[mark])} {subject}: {text}")
        failed = failed or mark == "problem"
    sys.exit(int(failed))
