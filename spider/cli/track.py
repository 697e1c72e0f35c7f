"""Verbs of the record in MLflow."""

from __future__ import annotations

import sys

import click

from spider import tracking
from spider.cli.session import Session, log


@click.group()
def track() -> None:
    """The record of what happened, in MLflow."""


@track.command()
@click.pass_obj
def sync(session: Session) -> None:
    """Send whatever the MLflow store does not have yet."""
    tracking.configure(session.config)
    report = tracking.sync(session.results.root)
    click.echo(report)
    if report.pending:
        sys.exit(1)


@track.command()
@click.option("--port", default=5000, show_default=True)
@click.pass_obj
def ui(session: Session, port: int) -> None:
    """Show all runs in MLflow, on loopback only."""
    from spider.tracking.ui import serve

    tracking.configure(session.config)
    report = tracking.sync(session.results.root, timeout=60)
    if report.pending:
        log.warning("%s", report)
    serve(session.results.root, port)
