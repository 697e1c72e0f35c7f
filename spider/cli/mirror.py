"""Commands for the copy of the results at the address ``mirror:`` of the configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from spider.cli.session import Session

if TYPE_CHECKING:
    from spider.workflow.mirror import Mirror


@click.group()
def mirror() -> None:
    """The copy of the results at another place (docs/cluster.md)."""


@mirror.command()
@click.option("--follow", is_flag=True, hidden=True, help="Repeat it until standard input has a byte.")
@click.pass_obj
def push(session: Session, follow: bool) -> None:
    """Copy what is new in the results folder, as a workflow does while it runs."""
    from spider.workflow import mirror

    if follow:
        sys.exit(mirror.follow(_mirror(session)))
    with _acquired(session) as one:
        one.push(last=True)
    click.echo(f"{one}: has all of {one.root}")


@mirror.command()
@click.pass_obj
def pull(session: Session) -> None:
    """Restore what the results folder lacks, as a workflow does on an empty machine."""
    with _acquired(session, pull=True) as one:
        click.echo(f"{one.root}: has all of {one}")


@mirror.command()
@click.pass_obj
def take(session: Session) -> None:
    """Take the lease of another machine. A workflow there stops, and mirrors nothing more."""
    one = _mirror(session)
    with one.remote.explained():
        one.lease.acquire([], take=True)
        one.lease.release()
    click.echo(f"{one}: no machine has the lease")


@mirror.command()
@click.pass_obj
def status(session: Session) -> None:
    """Print who has the lease, and what is mirrored."""
    for line in _mirror(session).describe():
        click.echo(line)


def _mirror(session: Session) -> Mirror:
    from spider.workflow.mirror import Mirror

    config = session.config
    if config.mirror is None:
        raise ValueError(f"{session.config_path}: has no mirror; set `mirror: s3://BUCKET/FOLDER`")
    return Mirror(config.mirror, session.results.root, list(config.runs))


@contextmanager
def _acquired(session: Session, *, pull: bool = False) -> Iterator[Mirror]:
    one = _mirror(session)
    if not one.acquire(pull=pull):
        raise ValueError(f"{one.root}: a workflow mirrors this folder; wait for its end, or stop it")
    try:
        yield one
    finally:
        one.release()
