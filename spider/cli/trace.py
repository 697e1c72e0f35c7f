"""`spider trace`: the stretches of a text that stand in the training text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider.cli.session import COUNT, JSON, NEW_FILE, Session, command, log

if TYPE_CHECKING:
    from spider.provenance.traces import Place, Stretch

#: Bytes of the shortest stretch that is reported by default.
LEAST = 20


@command("text")
@click.option("--run", "name", metavar="RUN[/STAGE]", help="Search only what this run has learned from.")
@click.option("--least", type=COUNT, default=LEAST, show_default=True, help="Bytes of the shortest stretch.")
@click.option("--most", type=COUNT, default=10, show_default=True, help="Stretches to print.")
@click.option("--output", type=NEW_FILE, help="JSON file to write.")
@JSON
def trace(
    session: Session,
    text: str,
    name: str | None,
    least: int,
    most: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the stretches of TEXT that stand in the training text, the longest first.

    TEXT is RUN/STAGE for the sample of a stage, a file, `-` for standard input, or the text itself.
    """
    from spider.evaluation.records import Sample
    from spider.provenance import trace as tracing

    sampled = re.fullmatch(r"([\w-]+)/([\w-]+)", text)
    sample = None
    if sampled and sampled[1] in session.config.runs:
        sample = session.results.stage(*sampled.groups()).sample
        name = name or text
    run, stage = session.names(name) if name else (None, None)
    sources = tracing.corpora(session.config, session.results, run, stage)
    raw = Sample.read(sample).text.encode() if sample else _bytes(text)
    if output is None:
        found = tracing.trace(raw, sources, least, run, stage)
    else:
        parts = [session.results.text(one.dataset, part) for one in sources for part in one.parts]
        inputs = [sample, *parts] if sample else parts
        with session.tracked("trace", name or "text", {"least": least}, inputs, [output]) as job:
            found = tracing.trace(raw, sources, least, run, stage).write(output)
            job.metric("share", found.share)
            job.artifact(output)
        log.info("%s: %.0f%% of the text stands in the training text", output, 100 * found.share)
        return
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2, ensure_ascii=False))
        return
    number = len(found.stretches)
    click.echo(f"{number:,} stretches of at least {least} bytes, {found.share:.0%} of {len(raw):,} bytes")
    for one in sorted(found.stretches, key=lambda one: one.begin - one.end)[:most]:
        for line in _described(one):
            click.echo(line)


def _bytes(text: str) -> bytes:
    """Return the bytes of standard input, a file, or the text itself."""
    if text == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(text).read_bytes() if Path(text).is_file() else text.encode()
    except OSError:  # a text that is too long for the name of a file
        return text.encode()


def _described(stretch: Stretch) -> list[str]:
    """Return lines about a stretch."""
    from spider.report.formatting import times

    lines = [f"\n{stretch.end - stretch.begin} bytes, {times(stretch.count)}: {stretch.text!r}"]
    return lines + [line for place in stretch.places for line in _place(place)]


def _place(place: Place) -> list[str]:
    """Return lines about a place of a stretch."""
    row = "" if place.row is None else f", row {place.row:,}"
    id = "" if place.id is None else f", id {place.id}"
    lines = [
        f"  {place.dataset}/{place.split}/{place.part}, document {place.document:,}{id}",
        f"    raw file {place.file}{row}, SHA-256 {place.sha256[:16]}",
    ]
    steps = [f"{read.stage} {read.global_step}" for read in place.reads]
    more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
    return lines + ([f"    read at step {', '.join(steps[:8])}{more}"] if steps else [])
