"""The commands of the extra: `audit`, `trace`, `batch`, `seen` and `data index-text`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider.checkpoints.records import COMPRESSED, Exported
from spider.cli.inspect import ONLY, QUICK, WHICH, claimed, run_checks
from spider.cli.session import (
    COUNT,
    FILE,
    JSON,
    NEW_FILE,
    THREADS,
    Session,
    command,
    log,
    prepare_torch,
    take_gpu,
)
from spider.common.results import root_of

if TYPE_CHECKING:
    from spider_trust.documents import Copy
    from spider_trust.trace import Stretch

#: Bytes of the shortest stretch that is reported by default.
LEAST = 20
#: What documents of a split are for.
_USES = {
    "train": "in the training split",
    "validation": "held out, in the validation split",
    "ngram": "in the split of the n-gram index",
}


# ----------------------------------------------------------------------------------------- is it a real score


@command("name")
@WHICH
@QUICK
@ONLY
@click.option("--output", type=NEW_FILE, help="File to write (default: audit.json in the stage's folder).")
@click.option("--warn", is_flag=True, help="If a check fails, log a warning and leave with status 0.")
@JSON
@THREADS
def audit(
    session: Session,
    name: str,
    compressed: bool,
    quick: bool,
    only: str,
    output: Path | None,
    warn: bool,
    as_json: bool,
    threads: int | None,
) -> None:
    """Try to disprove the score of a stage, and leave with status 1 if a check fails.

    NAME is a run (its last stage), RUN/STAGE, a stage's folder, an exported folder or a compressed model.
    """
    from spider_trust.audit import Audit, checks

    exported = None
    copy = Path(name).suffix == COMPRESSED and Path(name).is_file() and root_of(Path(name)) is None
    if Exported.lies_in(Path(name)) or copy:
        from spider.checkpoints.load import Checkpoint

        exported, compressed = Path(name), compressed or copy
        manifest = Checkpoint.at(exported).manifest
        name = f"{manifest.run}/{manifest.stage}"
    claim = claimed(session, name, compressed)
    own = claim.folder.path / "audit.json"
    output = output or (None if exported else own)
    label = claim.folder.path.relative_to(claim.results.root / "runs").as_posix()
    take_gpu(claim.config, claim.run)
    prepare_torch(threads)
    chosen = checks(claim, quick, exported)  # forks before the job starts threads
    found = run_checks(chosen, only, as_json)
    if output:
        Audit.of(claim, quick, found).write(output)
    if any(one.status == "failed" for one in found):
        log.warning("%s: the audit FAILED%s", label, f"; {output} has the details" if output else "")
        if not warn:
            sys.exit(1)


# ------------------------------------------------------------------------------------ what does a text repeat


@command("dataset", "part")
@click.option("--output", type=FILE, required=True, help="Description of the index to write.")
def index_text(session: Session, dataset: str, part: str, output: Path) -> None:
    """Index the training text of one part of a dataset for `spider trace`."""
    from spider_trust.text_index import build

    session.config.dataset(dataset)
    folder = session.results.shards(dataset)
    built = build(folder, part, output)
    text = sum(piece.bytes for piece in built.pieces)
    log.info("%s: %s bytes of text, %.0f MB", output, f"{text:,}", built.size / 1e6)


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
    from spider_trust import trace as tracing

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
        found = tracing.trace(raw, sources, least, run, stage).write(output)
        log.info("%s: %.0f%% of the text stands in the training text", output, 100 * found.share)
        return
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2, ensure_ascii=False))
        return
    number = len(found.stretches)
    click.echo(f"{number:,} stretches of at least {least} bytes, {found.share:.0%} of {len(raw):,} bytes")
    for one in sorted(found.stretches, key=lambda one: one.begin - one.end)[:most]:
        click.echo(_lines(one))


def _bytes(text: str) -> bytes:
    """Return the bytes of standard input, a file, or the text itself."""
    if text == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(text).read_bytes() if Path(text).is_file() else text.encode()
    except OSError:  # a text that is too long for the name of a file
        return text.encode()


def _lines(stretch: Stretch) -> str:
    """Return lines about a stretch and its places."""
    times = f"{stretch.count:,} time{'s' * (stretch.count != 1)}"
    lines = [f"\n{stretch.end - stretch.begin} bytes, {times}: {stretch.text!r}"]
    for place in stretch.places:
        row = "" if place.row is None else f", row {place.row:,}"
        id = "" if place.id is None else f", id {place.id}"
        lines.append(f"  {place.dataset}/{place.split}/{place.part}, document {place.document:,}{id}")
        lines.append(f"    raw file {place.file}{row}, SHA-256 {place.sha256[:16]}")
        steps = [f"{read.stage} {read.global_step}" for read in place.reads]
        more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
        lines += [f"    read at step {', '.join(steps[:8])}{more}"] if steps else []
    return "\n".join(lines)


# --------------------------------------------------------------------------------------- what did a step read


@command("run")
@click.argument("step", type=int)
@click.option("--stage", help="Count the steps of this stage (default: those of the run).")
@JSON
def batch(session: Session, run: str, step: int, stage: str | None, as_json: bool) -> None:
    """Print what a step of RUN read, row by row, with the documents.

    RUN/STAGE counts the steps of a stage, as --stage does.
    """
    from spider.data.loader import batch_digest, digest_text
    from spider_trust.documents import pieces
    from spider_trust.order import Order, logged

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


@command("document")
@click.option("--run", help="Only this run (default: all trained runs).")
def seen(session: Session, document: str, run: str | None) -> None:
    """Print which steps read a document, and the last checkpoint before them.

    DOCUMENT is DATASET:ID or DATASET/PART:ROW (of the raw file).
    """
    from spider_trust.documents import copies, find, left_out

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
    from spider_trust.order import Order

    order, settings = Order(session.config, run), session.config.run(run)
    reads = [
        read for one in copies if one.split == "train" for read in order.reads(one.digest, one.begin, one.end)
    ]
    first = min((read.global_step for read in reads), default=None)
    lines, before = [], None
    for stage in order.names:
        at = sorted({read.step for read in reads if read.stage == stage})
        listed = f"read at steps: {', '.join(map(str, at))}" if at else "never read it"
        lines.append(f"{run}/{stage}: {listed}")
        for path in steps(session.results.stage(run, stage).checkpoints):
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
    unfinished = [one.name for one in settings.stages if one.name not in order.names]
    return [*lines, *(f"{run}/{stage}: not finished, so its steps are not known" for stage in unfinished)]
