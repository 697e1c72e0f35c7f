"""`spider batch` and `spider seen`: what a step read, and which steps read a document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from spider.cli.session import JSON, Session

if TYPE_CHECKING:
    from spider.provenance.documents import Copy

#: What documents of a split are for.
_USES = {
    "train": "in the training split",
    "validation": "held out, in the validation split",
    "ngram": "in the split of the n-gram index",
}


@click.command()
@click.argument("run")
@click.argument("step", type=int)
@click.option("--stage", help="Count the steps of this stage (default: those of the run).")
@JSON
@click.pass_obj
def batch(session: Session, run: str, step: int, stage: str | None, as_json: bool) -> None:
    """Print what a step of RUN read, row by row, with the documents.

    RUN/STAGE counts the steps of a stage, as --stage does.
    """
    from spider.data.loader import batch_digest, digest_text
    from spider.provenance.documents import pieces
    from spider.provenance.order import Order, logged

    run, named = session.names(run)
    stage = stage or named
    order = Order(session.config, run, stage)
    chosen, step = order.at(step) if stage is None else (order.stage(stage), step)
    ids_BT1, rows = chosen.batch(step)
    digest = digest_text(batch_digest(ids_BT1))
    names, of_run = f"{run}/{chosen.receipt.stage}", chosen.global_step(step)
    written = logged(session.results.stage(run, chosen.receipt.stage).metrics).get(of_run)
    parts = [list(pieces(session.config, session.results, row)) for row in rows]
    if as_json:
        plain = {"stage": names, "step": step, "global_step": of_run, "digest": digest, "logged": written}
        plain["rows"] = [[piece._asdict() for piece in row] for row in parts]
        click.echo(json.dumps(plain, ensure_ascii=False, indent=2))
        return
    same = {None: "no digest was logged", digest: "as logged"}.get(written, f"but {written} was logged")
    click.echo(f"{names}, step {step} (step {of_run} of the run): {len(rows)} rows, digest {digest}, {same}")
    for number, row in enumerate(parts):
        click.echo(f"row {number}")
        for one in row:
            of = f"{one.dataset}/{one.part}:{one.raw_row}" + (f" ({one.id})" if one.id else "")
            click.echo(f"  {of}, tokens {one.begin:,} to {one.begin + len(one.ids) - 1:,}")
            click.echo(f"    {json.dumps(one.text, ensure_ascii=False)}")


@click.command()
@click.argument("document")
@click.option("--run", help="Only this run (default: all trained runs).")
@click.pass_obj
def seen(session: Session, document: str, run: str | None) -> None:
    """Print which steps read a document, and the last checkpoint before them.

    DOCUMENT is DATASET:ID or DATASET/PART:ROW (of the raw file).
    """
    from spider.provenance.documents import copies, find, left_out

    config, results = session.config, session.results
    raw, part, row = find(config, results, document)
    click.echo(f"{document}: part {part}, row {row} of the raw files of {raw}")
    found = list(copies(config, results, raw, part, row))
    for copy in found:
        use = _USES.get(copy.split, copy.split)
        click.echo(f"{copy.dataset}: {use}, tokens {copy.begin:,} to {copy.end - 1:,}")
    absent = list(left_out(config, results, raw, part, row))
    for line in absent:
        click.echo(line)
    if not found and not absent:
        click.echo("in no encoded dataset: it is empty, a filter left it out, or there is no such row")
    problems = []
    for name in [run] if run else config.runs:
        if run is None and not any(results.run(name).glob("*/train.json")):
            continue
        try:
            for line in _of_run(session, name, found):
                click.echo(line)
        except ValueError as error:
            problems.append(f"{name}: not known: {error}")
    if problems:
        raise ValueError("\n".join(problems))


def _of_run(session: Session, run: str, copies: list[Copy]) -> list[str]:
    """Return lines about the steps of a run that read a document, and the last checkpoint before them."""
    from spider.checkpoints.records import MANIFEST, Manifest, steps
    from spider.provenance.order import Order

    order, settings = Order(session.config, run), session.config.run(run)
    reads = [
        read for one in copies if one.split == "train" for read in order.reads(one.digest, one.begin, one.end)
    ]
    lines = []
    for stage in order.stages():
        at = sorted({read.step for read in reads if read.stage == stage})
        listed = f"read at steps: {', '.join(map(str, at))}" if at else "never read it"
        lines.append(f"{run}/{stage}: {listed}")
    first = min((read.global_step for read in reads), default=None)
    folders = [(stage, session.results.stage(run, stage)) for stage in order.stages()]
    before = None
    for stage, folder in folders:
        for path in steps(folder.checkpoints):
            manifest = Manifest.read(path / MANIFEST)
            if manifest.resumed:
                raise ValueError(f"{run}/{stage} went on from another training, which may have read it")
            if first is None or manifest.global_step < first:
                before = path
    indexed = settings.model.ngram and [one for one in copies if one.dataset == settings.dataset]
    if indexed and any(one.split in ("ngram", "train") for one in indexed):
        lines.append(f"{run}: its n-gram index counts the document, so every checkpoint looks it up")
    elif before is None:
        lines.append(f"{run}: every kept checkpoint has seen it")
    else:
        lines.append(f"{run}: the last checkpoint that never saw it is {before}")
    unfinished = [one.name for one in settings.stages if one.name not in order.stages()]
    return [*lines, *(f"{run}/{stage}: not finished, so its steps are not known" for stage in unfinished)]
