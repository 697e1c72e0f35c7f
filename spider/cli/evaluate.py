"""Commands that measure what was trained, and show what was measured and recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from spider import tracking
from spider.checkpoints.compressed import CompressedReceipt
from spider.cli.session import FILE, NEW_FILE, THREADS, Session, command, log, prepare_torch
from spider.evaluation.result import all_rows, baselines, curves
from spider.results import CompressedFolder

ARTIFACT = click.option("--compressed", is_flag=True, help="Use the compressed file of the stage.")


@command("run", "stage")
@THREADS
@ARTIFACT
def evaluate(session: Session, run: str, stage: str, threads: int | None, compressed: bool) -> None:
    """Score a stage's last checkpoint in bits per byte, against compressors."""
    if compressed:
        return _evaluate_compressed(session, run, stage, threads)
    from spider.config.leaks import undecided
    from spider.evaluation.evaluate import evaluate
    from spider.evaluation.training_text import learned_from

    results, spec = session.results, session.config.stage(run, stage)
    folder, scored = results.stage(run, stage), spec.evaluation.data or spec.data
    data = results.shards(scored)
    for line in undecided(session.config.datasets, session.config.tokenizers, session.config.run(run)):
        log.info("%s", line)
    inputs, outputs = [folder.receipt, data / "metadata.json"], [folder.evaluation]
    with session.tracked("evaluate", f"{run}/{stage}", spec.evaluation.scoring(), inputs, outputs) as job:
        prepare_torch(threads)
        measured = evaluate(
            folder.receipt,
            spec,
            data,
            folder.path,
            learned_from=learned_from(session.config, run, stage),
            cache=results.root / "baselines",
        )
        card = session.dataset_card(scored, measured.data_digest)
        job.dataset(*card, context="validation")
        tracking.log_scores(
            results.root,
            run,
            stage,
            measured.metrics,
            outputs,
            rows=list(all_rows(measured.all_results)),
            dataset=card,
            curves=curves(measured.results),
        )
        job.metric("bpb", measured.bpb)
    of = "" if measured.lossless else " of the decoded text"
    best = "".join(f" ({row.label}: {row.value:.3f})" for row in baselines(measured.results)[:1])
    log.info("%.3f bits per byte%s%s", measured.bpb, of, best)


def _evaluate_compressed(session: Session, run: str, stage: str, threads: int | None) -> None:
    from spider.evaluation.evaluate import evaluate
    from spider.evaluation.training_text import learned_from

    results, spec = session.results, session.config.stage(run, stage)
    folder = CompressedFolder(results.stage(run, stage).compressed)
    data = results.shards(spec.evaluation.data or spec.data)
    inputs, outputs = [folder.receipt, data / "metadata.json"], [folder.evaluation]
    asked = spec.evaluation.scoring()
    with session.tracked("evaluate_compressed", f"{run}/{stage}", asked, inputs, outputs) as job:
        prepare_torch(threads)
        measured = evaluate(
            folder.receipt,
            spec,
            data,
            folder.path,
            learned_from=learned_from(session.config, run, stage),
            cache=results.root / "baselines",
        )
        rows = [row for row in all_rows(measured.all_results) if not row.baseline]
        scores = {row.name: row.value for row in rows if row.value is not None}
        size = CompressedReceipt.read(folder.receipt).compressed.total_bytes
        metrics = {f"compressed/{name}": value for name, value in {**scores, "bytes": size}.items()}
        tracking.log_scores(results.root, run, stage, metrics, rows=rows, of="compressed", folder=folder)
        # Not on the training run: there it would replace the evaluation of the checkpoint itself.
        job.artifact(folder.evaluation)
        job.metric("bpb", measured.bpb)
    log.info("%.3f bits per byte, compressed into %s bytes with code", measured.bpb, f"{size:,}")


@command("run", "stage")
@THREADS
@ARTIFACT
def sample(session: Session, run: str, stage: str, threads: int | None, compressed: bool) -> None:
    """Let a stage's last checkpoint continue the prompt of the configuration, or answer it."""
    from spider.evaluation.sample import sample

    results, spec = session.results, session.config.stage(run, stage)
    trained = results.stage(run, stage)
    folder = CompressedFolder(trained.compressed) if compressed else trained
    rule, outputs = "sample_compressed" if compressed else "sample", [folder.sample_text, folder.sample]
    asked = spec.evaluation.sampling()
    with session.tracked(rule, f"{run}/{stage}", asked, [folder.receipt], outputs) as job:
        prepare_torch(threads)
        sample(folder.receipt, spec, folder.path)
        if compressed:
            job.artifact(folder.sample_text)
        else:
            tracking.log_scores(results.root, run, stage, {}, outputs, of="sample")
    log.info("%s", folder.sample_text)


@command("run", "[stage]")
def draw(session: Session, run: str, stage: str | None) -> None:
    """Draw the figures of a stage (default: of all evaluated stages of RUN) without the model."""
    from spider.report.figures import FIGURES, draw_stage

    results = session.results
    evaluated = [one for one in results.stages(run) if one.evaluation.exists()]
    if not (stage or evaluated):
        raise ValueError(f"{results.run(run)}: no stage is evaluated; `spider evaluate {run} STAGE` does it")
    for folder in [results.stage(run, stage)] if stage else evaluated:
        name, inputs = f"{run}/{folder.path.name}", [folder.evaluation, folder.receipt]
        outputs = [folder.path / figure for figure in FIGURES]
        with session.tracked("draw", name, {}, inputs, outputs):
            for path in draw_stage(folder):
                log.info("%s", path)
            tracking.log_scores(results.root, run, folder.path.name, {}, outputs, of="figures")


@command()
@click.option("--output", type=FILE, required=True, help="summary.json to write.")
def compare(session: Session, output: Path) -> None:
    """Set all evaluations side by side: table, figures, summary.json."""
    from spider.report.compare import compare

    evaluations, compressed = session.evaluations(session.config.runs), session.compressed()
    beside = [output.with_name(name) for name in ("table.md", "table.html", "bpb.svg", "loss.svg")]
    with session.tracked("compare", "report", {}, [*evaluations, *compressed], [output, *beside]) as job:
        benchmarks = session.results.root / "benchmarks"
        summary = compare(evaluations, compressed=compressed, benchmarks=benchmarks, output=output.parent)
        for run, compared in summary.runs.items():
            if best := compared.best:
                one = compared.stages[best]
                tracking.log_choice(
                    session.results.root,
                    run,
                    best,
                    weights=one.weights,
                    bpb=one.bpb,
                    text_sha256=one.text_sha256,
                )
        for name in ("summary.json", "table.md", "bpb.svg", "loss.svg"):
            job.artifact(output.parent / name)


@command("run")
@click.option("--output", type=NEW_FILE, help="Page to write (default: in the results).")
def report(session: Session, run: str, output: Path | None) -> None:
    """Put everything about RUN on one page, finished or not: scores, curves, provenance, costs.

    RUN is one of the configuration's, or a folder in results/runs of a training by hand.
    """
    from spider.report.page import write_report

    results, page = session.results, output or session.results.page(run)
    evaluations = [s.evaluation for s in results.stages(run) if s.evaluation.exists()]
    with session.tracked("report", run, {}, evaluations, [page]) as job:
        write_report(session.config, results, run, page)
        job.artifact(page)
    log.info("%s", page)


@command()
@click.option("--output", type=FILE, help="scaling.json to write (default: in the results).")
def scaling(session: Session, output: Path | None) -> None:
    """Fit a scaling law to the sweep that the configuration names under scaling."""
    from spider.report.scaling import write_scaling

    config, results = session.config, session.results
    path = output or results.report / "scaling.json"
    evaluations = session.evaluations(config.sweeps.get(config.scaling or "", []))
    made = [path.with_suffix(suffix) for suffix in (".json", ".md", ".svg")]
    with session.tracked("scaling", config.scaling or "", {}, evaluations, made) as job:
        fitted = write_scaling(config, results, path)
        for file in made:
            job.artifact(file)
        for name in ("parameters", "bytes", "bpb"):
            if law := getattr(fitted, name):
                job.metric(f"exponent/{name}", law.exponent)
    for curve in fitted.curves:
        if curve.problem:
            log.warning("%.2g FLOPs: not used, %s", curve.budget, curve.problem)
    log.info("%s; %s", fitted.problem or "a law", path.with_suffix(".md"))


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
    from spider.tracking.store import serve

    tracking.configure(session.config)
    report = tracking.sync(session.results.root, timeout=60)
    if report.pending:
        log.warning("%s", report)
    serve(session.results.root, port)
