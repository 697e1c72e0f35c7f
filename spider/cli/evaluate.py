"""Verbs that measure what was trained and show what was measured."""

from __future__ import annotations

from pathlib import Path

import click

from spider import tracking
from spider.cli.session import FILE, Session, log, prepare_torch


@click.command()
@click.argument("run")
@click.argument("stage")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads (default: all).")
@click.pass_obj
def evaluate(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Score a stage's last checkpoint in bits per byte, against compressors, and write a sample."""
    from spider.evaluation.evaluate import OUTPUTS, evaluate

    results, spec = session.results, session.config.stage(run, stage)
    folder = results.stage(run, stage).path
    scored = spec.evaluation.data or spec.data
    data = results.shards(scored)
    receipt = results.stage(run, stage).receipt
    inputs = [receipt, data / "metadata.json"]
    outputs = [folder / name for name in OUTPUTS]
    with session.tracked("evaluate", f"{run}/{stage}", spec.evaluation.changed(), inputs, outputs) as job:
        prepare_torch(threads)
        found = evaluate(receipt, spec, data, folder)
        card = session.dataset_card(scored, found["data_digest"])
        job.dataset(*card, context="validation")
        curves = {"bpb_at_loops": list(enumerate(found["loops"]["bpb"], start=1))} if found["loops"] else {}
        tracking.log_evaluation(results.root, run, stage, found, outputs, dataset=card, curves=curves)
        job.metric("bpb", found["bpb"])
    best = min(found["compressors"], key=found["compressors"].get)
    log.info("%.3f bits per byte (%s: %.3f)", found["bpb"], best, found["compressors"][best])


@click.command()
@click.option("--output", type=FILE, required=True, help="summary.json to write.")
@click.pass_obj
def compare(session: Session, output: Path) -> None:
    """Set all evaluations side by side: table, figures, summary.json."""
    from spider.report.compare import compare

    results = session.results
    stages = [(run, s.name) for run, spec in session.config.runs.items() for s in spec.stages]
    evaluations = [results.stage(run, stage).evaluation for run, stage in stages]
    with session.tracked("compare", "report", {}, evaluations, [output]) as job:
        compare(evaluations, benchmarks=results.root / "benchmarks", output=output.parent)
        for name in ("summary.json", "table.md", "bpb.png", "loss.png"):
            job.artifact(output.parent / name)


@click.command()
@click.argument("run")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Page to write (default: in the results).",
)
@click.pass_obj
def report(session: Session, run: str, output: Path | None) -> None:
    """Put everything about RUN on one page, finished or not: scores, curves, provenance, costs.

    RUN is one of the configuration's, or a folder in results/runs of a training by hand.
    """
    from spider.report.page import write_report

    results = session.results
    page = output or results.page(run)
    found = [s.evaluation for s in results.stages(run) if s.evaluation.exists()]
    with session.tracked("report", run, {}, found, [page]) as job:
        write_report(session.config, results, run, page)
        job.artifact(page)
    log.info("%s", page)


@click.command()
@click.option("--output", type=FILE, help="scaling.json to write (default: in the results).")
@click.pass_obj
def scaling(session: Session, output: Path | None) -> None:
    """Fit a scaling law to the sweep that the configuration names under scaling."""
    from spider.evaluation.scaling import write_scaling

    config, results = session.config, session.results
    path = output or results.report / "scaling.json"
    runs = config.sweeps.get(config.scaling or "", [])
    evaluations = [
        results.stage(run, stage.name).evaluation for run in runs for stage in config.runs[run].stages
    ]
    with session.tracked("scaling", config.scaling or "", {}, evaluations, [path]) as job:
        found = write_scaling(config, results, path)
        for suffix in (".json", ".md", ".png"):
            job.artifact(path.with_suffix(suffix))
        for name in ("parameters", "bytes", "bpb"):
            if law := getattr(found, name):
                job.metric(f"exponent/{name}", law.exponent)
    for curve in found.curves:
        if curve.problem:
            log.warning("%.2g FLOPs: not used, %s", curve.budget, curve.problem)
    log.info("%s; %s", found.problem or "a law", path.with_suffix(".md"))
