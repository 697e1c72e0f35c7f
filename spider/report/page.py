"""Write the page of a run, finished or not, from the files that its jobs left.

Size and cost of the model are those of the newest evaluation. A part without data is left out, and the head
of the page names it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from spider import files
from spider.config import Config
from spider.evaluation.records import Evaluation
from spider.evaluation.result import CONTEXTS, Result, legends, scores
from spider.report import figures
from spider.report.costs import Needed, commands, costs
from spider.report.formatting import LOSSY, printable
from spider.report.provenance import chain, read_datasets
from spider.report.render import html
from spider.report.scores import (
    best_stages_first,
    dagger,
    leading,
    model_cells,
    ranking,
    score_columns,
    verdicts,
)
from spider.report.stages import StageRecord, read_stages
from spider.report.traced_text import STEPS, is_traced, traced_text
from spider.results import Results
from spider.tracking import spool
from spider.tracking.records import Run
from spider.version import VERSION


def write_report(config: Config, results: Results, run: str, output: Path) -> None:
    """Write the page of ``run`` to ``output``; `ValueError` for an unknown run or a damaged file."""
    files.write_text(output, render(config, results, run))


def render(config: Config, results: Results, run: str) -> str:
    """Return the page of a run as HTML."""
    stages = read_stages(config, results, run)
    datasets = read_datasets(results, stages)
    names = [data.name for data in datasets]
    needed = Needed.of(config, run, [(stage.name, stage.spec) for stage in stages], names)
    jobs = needed.jobs(spool.jobs(results.root))
    evaluations = {stage.name: stage.evaluation for stage in stages if stage.evaluation}
    last = [*evaluations.values()][-1] if evaluations else None
    found = _shown_results(stages)
    others = _others(config, results, last) if last else []
    columns = score_columns(
        [
            *(found for stage in stages for found in (stage.results, stage.compressed)),
            *(other.all_results for other in others),
        ],
        leading(others or ([last] if last else [])),
    )
    mark = dagger(last)
    return html(
        "page.html.j2",
        script="page.js",
        run=run,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=VERSION,
        finished=all(stage.state == "evaluated" for stage in stages),
        notes=[note for stage in stages for note in stage.notes],
        stages=stages,
        badges={name: badge for stage in stages for name, badge in stage.badges.items()},
        last=last,
        flops=sum(s.evaluation.flops_per_token * s.log.span.tokens for s in stages if s.evaluation),
        manifests=[stage.manifest for stage in stages if stage.manifest],
        dagger=mark,
        lossy=LOSSY,
        found=found,
        legends=legends([found]),
        columns=columns,
        score_cells=lambda results: model_cells(scores(results), columns, mark),
        verdicts=verdicts(last, found) if last else [],
        rankings=_rankings(run, last, found) if last else {},
        others=others,
        curves=figures.training(stages),
        inside=figures.inside(
            figures.figures_of(found),
            {stage.name: figures.figures_of(stage.results) for stage in stages if stage.evaluation},
        ),
        samples={stage.name: stage.sample for stage in stages if stage.sample and stage.sample.text},
        traced={stage.name: traced_text(stage) for stage in stages if is_traced(stage)},
        STEPS=STEPS,
        datasets=datasets,
        links=chain(stages, datasets),
        costs=costs(results, needed, jobs),
        commits=_commits(jobs),
        versions=_versions(results, run, stages),
        config=_configuration(config, run, names) if run in config.runs else None,
        commands=commands(jobs, run),
    )


def _shown_results(stages: Sequence[StageRecord]) -> dict[str, Result]:
    """Return each result of the last stage that has it, by name, and the size of a compressed model."""
    found: dict[str, Result] = {}
    for stage in stages:
        found |= stage.results
        if "compression" in stage.compressed:
            found["compression"] = stage.compressed["compression"]
    return found


def _rankings(
    run: str, last: Evaluation, found: dict[str, Result]
) -> dict[str, list[tuple[str, bool, float]]]:
    """Return names, whether it is the model, and bits per byte, best first, for each context."""
    ranks = ranking(run, last, found)
    shown = {
        context: sorted(
            [(rank.name, rank.own, rank.bits[context]) for rank in ranks if context in rank.bits],
            key=lambda rank: rank[2],
        )
        for context in CONTEXTS
    }
    return {context: rows for context, rows in shown.items() if rows}


def _others(config: Config, results: Results, last: Evaluation) -> list[Evaluation]:
    """Return the evaluations of last stages and of foreign models on the same text, best first."""
    last_stages = {name: config.runs[name].stages[-1].name for name in config.shown}
    paths = [results.stage(*names).evaluation for names in last_stages.items()]
    evaluations = [Evaluation.read(path) for path in (*paths, *results.foreign_scores) if path.exists()]
    same_text = [one for one in evaluations if one.text_sha256 == last.text_sha256]
    return best_stages_first(same_text) if len(same_text) > 1 else []


# --------------------------------------------------------------------------------------------- reproduction


def _commits(jobs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the rules that ran at each commit."""
    commits: dict[str, dict[str, None]] = {}
    for job in jobs:
        commit = job.tags.get("git.commit", "not in a git checkout")
        commits.setdefault(commit, {})[job.tags["spider.rule"]] = None
    return {commit: [*rules] for commit, rules in commits.items()}


def _versions(results: Results, run: str, stages: list[StageRecord]) -> dict[str, str]:
    """Return versions of software, as the warm-ups and checkpoints record them."""
    versions = {"Python": platform.python_version(), "Spider": VERSION}
    for path in results.warmups(run):
        for name, value in files.read_json(path)["versions"].items():
            versions["Python" if name == "python" else name] = value
    for stage in stages:
        if stage.manifest:
            versions["torch"] = stage.manifest.torch
    return versions


def _configuration(config: Config, run: str, datasets: Iterable[str]) -> str:
    """Return the configuration of a run as YAML, with the results folder that the commands name."""
    default = Config.model_fields["results"].default
    folder = "" if config.results == default else yaml.safe_dump({"results": config.results})
    return folder + settings_of(config, run, datasets)


def settings_of(config: Config, run: str, datasets: Iterable[str]) -> str:
    """Return the part of the configuration that makes a run on these datasets, as YAML without secrets."""
    written = config.written
    used = set(datasets)
    tokenizers = {config.datasets[name].tokenizer for name in used if name in config.datasets}
    learned = {name: one for name, one in written.get("tokenizers", {}).items() if name in tokenizers}
    used |= {one["data"] for one in learned.values()}
    used |= set(config.compared(used))
    settings: dict[str, Any] = {"datasets": {k: one for k, one in written["datasets"].items() if k in used}}
    if learned:
        settings["tokenizers"] = learned
    settings["runs"] = {run: written["runs"][run]}
    redacted = spool.redact(settings)
    text = yaml.safe_dump(redacted, sort_keys=False, allow_unicode=True, width=100)
    if printable(text) == text:
        return text
    return yaml.safe_dump(redacted, sort_keys=False, allow_unicode=False, width=100)
