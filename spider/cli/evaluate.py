"""Commands that evaluate checkpoints, and commands that report and track results."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider.checkpoints.records import Receipt
from spider.cli.session import (
    FILE,
    NEW_FILE,
    STAGE,
    THREADS,
    Group,
    Session,
    StageName,
    command,
    log,
    prepare_torch,
    take_gpu,
)
from spider.common.results import CompressedFolder, StageFolder
from spider.config import Config, ForeignConfig, StageSpec
from spider.config.scored import baselines_name, overlap_name, stage_with

if TYPE_CHECKING:
    from spider.checkpoints.records import Receipt

COMPRESSED = click.option("--compressed", is_flag=True, help="Use the compressed model of the stage.")


def _folder(session: Session, stage: tuple[str, str], compressed: bool) -> StageFolder:
    """Return the folder of a stage or of its compressed model."""
    folder = session.results.stage(*stage)
    return CompressedFolder(folder.compressed) if compressed else folder


def check_settings(path: Path, spec: StageSpec) -> None:
    """Raise `ValueError` if the stage of a receipt was trained with other settings than it has now."""
    if Receipt.of_stage(path, spec).identity not in spec.identities:
        raise ValueError(
            f"{path}: was trained with other settings than runs.{spec.run} has now; restore them, or "
            f"{Receipt.remedy(path)}"
        )


@command()
@click.argument("stage", metavar="[RUN/STAGE]", type=StageName(), required=False)
@THREADS
@COMPRESSED
@click.option("--model", help="A folder of transformers, or a name under `foreign`, to score instead.")
def evaluate(
    session: Session,
    stage: tuple[str, str] | None,
    threads: int | None,
    compressed: bool,
    model: str | None,
) -> None:
    """Score the last checkpoint of a stage in bits per byte, beside compressors.

    With --model, score that model on the text and the tasks of the stage (default: the last one of the first
    run). It becomes a row of the comparison.
    """
    if model is not None and not compressed:
        return _evaluate_foreign(session, model, stage, threads)
    if stage is None or model is not None:
        raise ValueError("name a stage, RUN/STAGE, or a model of transformers, --model FOLDER")
    from spider.evaluation.evaluate import evaluate
    from spider.evaluation.records import results_of
    from spider.evaluation.text import Overlap, learned_from
    from spider.report.summary import verdicts

    results = session.results
    spec = session.config.stage(*stage)
    folder = _folder(session, stage, compressed)
    data = _scored(session, spec)
    sources = {one: results.shards(one) for one in session.config.sources(spec.run)}
    overlap = results.overlap(overlap_name(session.config, spec))
    take_gpu(session.config, spec.run)
    check_settings(folder.receipt, spec)
    prepare_torch(threads)
    measured = evaluate(
        folder.receipt,
        spec,
        data,
        folder.path,
        learned_from=learned_from(session.config, *stage),
        sources=sources,
        searched=Overlap.read(overlap) if overlap.exists() else None,
    )
    text = "" if measured.lossless else " (of the decoded text)"
    for one in verdicts(measured, results_of(folder)):
        log.info("%s%s: %s %s", one.context, text, one.score, one.words)


@command("text")
def overlap(session: Session, text: str) -> None:
    """Search the training text for a held-out TEXT: that of RUN/STAGE, or a name in results/overlap."""
    from spider.evaluation.overlap import find_overlap
    from spider.evaluation.text import learned_from

    spec = _stage_on(session, text, overlap_name)
    output = session.results.overlap(overlap_name(session.config, spec))
    learned = learned_from(session.config, spec.run, spec.stage)
    find_overlap(spec, _scored(session, spec), learned, output)
    log.info("%s", output)


@command("text")
@click.option("--of-stage", is_flag=True, help="Also give them the text that the stage was trained on.")
def baselines(session: Session, text: str, of_stage: bool) -> None:
    """Measure compressors on a held-out TEXT: that of RUN/STAGE, or a name in results/baselines.

    They are given the training text. `spider overlap` comes first.
    """
    from spider.evaluation.baselines import Baselines, stage_baselines, text_baselines
    from spider.evaluation.text import Overlap, learned_from

    config, results = session.config, session.results
    spec = _stage_on(session, text, baselines_name)
    overlap = results.overlap(overlap_name(config, spec))
    shared = results.baselines(baselines_name(config, spec))
    folder = results.stage(spec.run, spec.stage)
    learned = learned_from(config, spec.run, spec.stage)
    given = spec, _scored(session, spec), learned, Overlap.read(overlap)
    if not of_stage:
        text_baselines(*given, shared)
        log.info("%s", shared)
        return
    stage_baselines(*given, Baselines.read(shared), folder.baselines)
    log.info("%s", folder.baselines)


def _stage_on(session: Session, text: str, name_of: Callable[[Config, StageSpec], str]) -> StageSpec:
    """Return the stage that a name or the name of a text stands for."""
    run, stage = session.names(text)
    return session.config.stage(run, stage) if stage else stage_with(session.config, text, name_of)


def _scored(session: Session, spec: StageSpec) -> Path:
    """Return the shards folder of the dataset whose held-out text is scored."""
    return session.results.shards(spec.evaluation.data or spec.data)


def _evaluate_foreign(
    session: Session, model: str, stage: tuple[str, str] | None, threads: int | None
) -> None:
    """Score a model that others trained, by its name in the configuration or by its folder."""
    results, config = session.results, session.config
    name = model if model in config.foreign else re.sub(r"[^\w-]", "-", Path(model).resolve().name)
    foreign = config.foreign.get(model, ForeignConfig(model=model))
    spec = config.stage(*stage) if stage else config.scored_like(foreign)
    take_gpu(config, spec.run)  # before transformers is imported, which asks torch for GPUs
    from spider.training.precision import quiet_torchao

    try:
        with quiet_torchao():
            import spider.hf  # noqa: F401 (registers Spider's own models)
            from spider.evaluation.foreign import evaluate_foreign
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: in a checkout of Spider, `pip install -e '.[hf]'`") from None
    data = results.shards(spec.evaluation.data or spec.data)
    folder = results.foreign(name)
    prepare_torch(threads)
    measured = evaluate_foreign(name, foreign, spec, data, folder.path)
    log.info("%s: %.4f bits per byte. %s", name, measured.bpb, measured.results["foreign"].notes[0])


@command()
@STAGE
@THREADS
def evaluate_checkpoints(session: Session, stage: tuple[str, str], threads: int | None) -> None:
    """Score the kept checkpoints before the end of a stage in bits per byte."""
    from spider.evaluation.evaluate import evaluate_checkpoints

    results = session.results
    spec = session.config.stage(*stage)
    folder = results.stage(*stage)
    data = _scored(session, spec)
    take_gpu(session.config, spec.run)
    check_settings(folder.receipt, spec)
    prepare_torch(threads)

    found = evaluate_checkpoints(folder, spec, data)
    log.info("%s: %d checkpoints", folder.checkpoint_scores, len(found.scores))


@command()
@STAGE
@THREADS
@COMPRESSED
def sample(session: Session, stage: tuple[str, str], threads: int | None, compressed: bool) -> None:
    """Continue, or answer, the prompt of the configuration with the last checkpoint of a stage."""
    from spider.evaluation.generate import sample

    spec = session.config.stage(*stage)
    folder = _folder(session, stage, compressed)
    take_gpu(session.config, spec.run)
    check_settings(folder.receipt, spec)
    prepare_torch(threads)
    sample(folder.receipt, spec, folder.path)
    log.info("%s", folder.sample_text)


# ---------------------------------------------------------------------------------------------------- reports


@click.group(cls=Group)
def report() -> None:
    """Pages, tables and figures of results."""


@command()
@click.argument("name", metavar="RUN[/STAGE]")
def draw(session: Session, name: str) -> None:
    """Draw the figures of a stage (default: of all evaluated stages of RUN) without the model."""
    from spider.report.page import draw_stage

    results = session.results
    run, stage = session.names(name)
    evaluated = [one for one in results.stages(run) if one.evaluation.exists()]
    if not (stage or evaluated):
        raise ValueError(f"{results.run(run)}: no stage is evaluated; run `spider evaluate {run}/STAGE`")
    for folder in [results.stage(run, stage)] if stage else evaluated:
        for path in draw_stage(folder):
            log.info("%s", path)


@command()
@click.option("--output", type=FILE, required=True, help="summary.json to write.")
def compare(session: Session, output: Path) -> None:
    """Compare all evaluations: write summary.json, and table.md and bpb.svg beside it."""
    from spider.report import figures
    from spider.report.tables import compare

    evaluations = session.evaluations(session.config.shown)
    foreign, benchmarks = session.results.foreign_scores, session.results.root / "benchmarks"
    summary = compare(evaluations, foreign=foreign, benchmarks=benchmarks, output=output.parent)
    figures.save([figures.by_stage(summary)], output.with_name("bpb.svg"), size=(10, 5))


@command("run")
@click.option("--output", type=NEW_FILE, help="HTML file to write (default: in the results folder).")
def page(session: Session, run: str, output: Path | None) -> None:
    """Write one page about RUN, finished or not: scores, curves, provenance, costs.

    RUN is a run of the configuration, or a folder in results/runs of a training by hand.
    """
    from spider.report.page import write_report

    results = session.results
    output = output or results.page(run)
    write_report(session.config, results, run, output)
    log.info("%s", output)


for one in (page, draw, compare):
    report.add_command(one)


# --------------------------------------------------------------------------------------------------- tracking


@click.group()
def track() -> None:
    """Records of all jobs in MLflow."""


@track.command()
@click.option("--follow", is_flag=True, hidden=True, help="Repeat it until standard input has a byte.")
@click.pass_obj
def sync(session: Session, follow: bool) -> None:
    """Send to MLflow what its store lacks of the results folder."""
    from spider.tracking import sync

    if follow:
        sys.exit(sync.follow(session.results, session.config))
    answer = sync.sync(session.results, session.config)
    click.echo(answer)
    if answer.error:
        sys.exit(1)


@track.command()
@click.option("--port", default=5000, show_default=True)
@click.pass_obj
def ui(session: Session, port: int) -> None:
    """Send what is missing, and serve MLflow, on the loopback address only."""
    from spider.tracking.store import serve
    from spider.tracking.sync import sync

    answer = sync(session.results, session.config, timeout=60)
    if answer.error:
        log.warning("%s", answer)
    serve(session.results, session.config.tracking, port, answer.experiment)
