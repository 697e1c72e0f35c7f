"""Commands that evaluate checkpoints, and commands that report and track results."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

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
from spider.config import Config, StageSpec
from spider.config.scored import baselines_name, overlap_name, stage_with

COMPRESSED = click.option("--compressed", is_flag=True, help="Use the compressed model of the stage.")


def _trained(
    session: Session, stage: tuple[str, str], threads: int | None, compressed: bool = False
) -> tuple[StageSpec, StageFolder]:
    """Return a trained stage and its folder, or that of its compressed model; take its run's GPU."""
    spec, folder = session.config.stage(*stage), session.results.stage(*stage)
    folder = CompressedFolder(folder.compressed) if compressed else folder
    take_gpu(session.config, spec.run)
    check_settings(folder.receipt, spec)
    prepare_torch(threads)
    return spec, folder


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
    session: Session, stage: tuple[str, str] | None, threads: int | None, compressed: bool, model: str | None
) -> None:
    """Score the last checkpoint of a stage in bits per byte, beside compressors, and those on the way.

    With --model, score that model on the text and the tasks of the stage (default: the last one of the first
    run). It becomes a row of the comparison.
    """
    if model is not None and not compressed:
        return _evaluate_foreign(session, model, stage, threads)
    if stage is None or model is not None:
        raise ValueError("name a stage, RUN/STAGE, or a model of transformers, --model FOLDER")
    from spider.evaluation.evaluate import evaluate, evaluate_checkpoints
    from spider.evaluation.records import results_of
    from spider.evaluation.text import Overlap, learned_from
    from spider.report.summary import verdicts

    spec, folder = _trained(session, stage, threads, compressed)
    overlap = session.results.overlap(overlap_name(session.config, spec))
    measured = evaluate(
        folder.receipt,
        spec,
        _scored(session, spec),
        folder.path,
        learned_from=learned_from(session.config, *stage),
        sources={one: session.results.shards(one) for one in session.config.sources(spec.run)},
        searched=Overlap.read(overlap) if overlap.exists() else None,
    )
    text = "" if measured.lossless else " (of the decoded text)"
    for one in verdicts(measured, results_of(folder)):
        log.info("%s%s: %s %s", one.context, text, one.score, one.words)
    if not compressed:
        found = evaluate_checkpoints(folder, spec, _scored(session, spec))
        log.info("%s: %d checkpoints", folder.checkpoint_scores, len(found.scores))


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
    overlap = Overlap.read(results.overlap(overlap_name(config, spec)))
    shared = results.baselines(baselines_name(config, spec))
    output = results.stage(spec.run, spec.stage).baselines if of_stage else shared
    given = spec, _scored(session, spec), learned_from(config, spec.run, spec.stage), overlap
    if of_stage:
        stage_baselines(*given, Baselines.read(shared), output)
    else:
        text_baselines(*given, shared)
    log.info("%s", output)


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
    config = session.config
    name = model if model in config.foreign else re.sub(r"[^\w-]", "-", Path(model).resolve().name)
    folder = Path(config.foreign.get(model, model))
    spec = config.stage(*stage) if stage else config.scored_like()
    take_gpu(config, spec.run)  # before transformers is imported, which asks torch for GPUs
    from spider.training.precision import quiet_torchao

    try:
        with quiet_torchao():
            import spider.hf  # noqa: F401 (registers Spider's own models)
            from spider.evaluation.foreign import evaluate_foreign
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: in a checkout of Spider, `pip install -e '.[hf]'`") from None
    prepare_torch(threads)
    output = session.results.foreign(name).path
    measured = evaluate_foreign(name, folder, spec, _scored(session, spec), output)
    log.info("%s: %.4f bits per byte. %s", name, measured.bpb, measured.results["foreign"].notes[0])


@command()
@STAGE
@THREADS
@COMPRESSED
def sample(session: Session, stage: tuple[str, str], threads: int | None, compressed: bool) -> None:
    """Continue, or answer, the prompt of the configuration with the last checkpoint of a stage."""
    from spider.evaluation.generate import sample

    spec, folder = _trained(session, stage, threads, compressed)
    sample(folder.receipt, spec, folder.path)
    log.info("%s", folder.sample_text)


# ---------------------------------------------------------------------------------------------------- reports


@click.group(cls=Group)
def report() -> None:
    """Pages, tables and figures of results."""


@command()
@STAGE
def draw(session: Session, stage: tuple[str, str]) -> None:
    """Draw the figures of an evaluated stage, without the model."""
    from spider.report.page import draw_stage

    for path in draw_stage(session.results.stage(*stage)):
        log.info("%s", path)


@command()
@click.option("--output", type=FILE, required=True, help="summary.json to write.")
def compare(session: Session, output: Path) -> None:
    """Compare all evaluations: write summary.json, and table.md and bpb.svg beside it."""
    from spider.report import figures
    from spider.report.tables import compare

    results, runs = session.results, session.config.runs
    stages = [(run, stage.name) for run in session.config.shown for stage in runs[run].stages]
    summary = compare(
        [results.stage(*stage).evaluation for stage in stages],
        foreign=results.foreign_scores,
        benchmarks=results.root / "benchmarks",
        output=output.parent,
    )
    figures.save(figures.over_bytes(summary), output.with_name("bpb.svg"), size=(8, 5))


@command("run")
@click.option("--output", type=NEW_FILE, help="HTML file to write (default: in the results folder).")
def page(session: Session, run: str, output: Path | None) -> None:
    """Write one page about RUN, finished or not: scores, curves, provenance, costs.

    RUN is a run of the configuration, or a folder in results/runs of a training by hand.
    """
    from spider.report.page import write_report

    output = output or session.results.page(run)
    write_report(session.config, session.results, run, output)
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
    from spider.tracking.pages import serve
    from spider.tracking.sync import sync

    answer = sync(session.results, session.config, timeout=60)
    if answer.error:
        log.warning("%s", answer)
    serve(session.results, session.config.tracking, port, answer.experiments)
