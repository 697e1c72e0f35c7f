"""The page of a run, from what its jobs have left.

Size and price of the model are what the newest evaluation wrote down. A part without data is left out of the
page, and named at its head; a run nobody has begun still has a page.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from spider import files
from spider.checkpoints.compressed import CompressedReceipt
from spider.config import Config
from spider.evaluation.records import Evaluation
from spider.evaluation.result import Result, baselines, legends, shortened
from spider.report import figures
from spider.report.compare import best_first, leading, score_columns
from spider.report.costs import Job, Needed, commands, costs
from spider.report.formatting import DAGGER, LOSSY, printable
from spider.report.provenance import chain, read_datasets
from spider.report.render import html
from spider.report.stages import StageRecord, read_stages
from spider.results import CompressedFolder, Results
from spider.tracking import spool


def write_report(config: Config, results: Results, run: str, output: Path) -> None:
    """Write the page of ``run`` to ``output``; `ValueError` where there is none, or a file is damaged."""
    files.write_text(output, render(config, results, run))


def render(config: Config, results: Results, run: str) -> str:
    """The page of a run, finished or not, as HTML."""
    stages = read_stages(config, results, run)
    datasets = read_datasets(results, stages)
    names = [data.name for data in datasets]
    records = [files.read_json(path) for _, path in spool.records(results.root, ["jobs"])]
    needed = Needed.of(config, run, [(stage.name, stage.spec) for stage in stages], names)
    jobs = needed.jobs(records)
    measured = {stage.name: stage for stage in stages if stage.evaluation}
    newest = [*measured.values()][-1] if measured else None
    last = newest.evaluation if newest else None
    found = _shown_results(stages)
    dagger = "" if last is None or last.lossless else DAGGER
    others = _others(config, results, last) if last else []
    compressed = _compressed_model(results, run, [stage.name for stage in stages], measured)
    columns = score_columns(
        [*(stage.results for stage in measured.values()), *(other.all_results for other in others)],
        leading(others or ([last] if last else [])),
    )
    return html(
        "page.html.j2",
        script="page.js",
        run=run,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=version("spider"),
        finished=all(stage.state == "evaluated" for stage in stages),
        notes=[note for stage in stages for note in stage.notes],
        stages=stages,
        last=last,
        flops=sum((s.evaluation.flops_per_token or 0) * s.log.span.tokens for s in stages if s.evaluation),
        manifests=[stage.manifest for stage in stages if stage.manifest],
        dagger=dagger,
        lossy=LOSSY,
        found=found,
        legends=legends([found]),
        columns=columns,
        rivals=baselines(found),
        ranking=_ranking(run, last) if last else [],
        others=others,
        compressed=compressed,
        curves=figures.training(stages),
        inside=figures.inside(
            figures.figures_of(found),
            {name: figures.figures_of(stage.results) for name, stage in measured.items()},
        ),
        samples={stage.name: stage.sample for stage in stages if stage.sample and stage.sample.text},
        datasets=datasets,
        links=chain(stages, datasets),
        costs=costs(results, needed, jobs),
        commits=_commits(jobs),
        versions=_versions(results, run, stages),
        config=_configuration(config, run, names) if run in config.runs else None,
        commands=commands(jobs, run),
    )


def _shown_results(stages: Sequence[StageRecord]) -> dict[str, Result]:
    """Return each result of the last stage that has it, by name."""
    found: dict[str, Result] = {}
    for stage in stages:
        found |= stage.results
    last = next((stage.results for stage in reversed(stages) if stage.evaluation), {})
    return last | {name: one for name, one in found.items() if name not in last}


def _ranking(run: str, last: Evaluation) -> list[dict[str, Any]]:
    """Return the run among the baselines, on the text that its last evaluated stage was scored on."""
    rivals = [(row.label, row.value or 0.0) for row in shortened(baselines(last.results))]
    rows = sorted([*rivals, (run, last.bpb)], key=lambda row: row[1])
    share = 100 / rows[-1][1]
    return [{"name": name, "bits": bits, "own": name == run, "share": bits * share} for name, bits in rows]


def _others(config: Config, results: Results, last: Evaluation) -> list[Evaluation]:
    """Return the evaluations of runs whose last stage was scored on the same text, best first."""
    paths = [results.stage(name, run.stages[-1].name).evaluation for name, run in config.runs.items()]
    scored = [
        one for one in map(Evaluation.read, filter(Path.exists, paths)) if one.text_sha256 == last.text_sha256
    ]
    return best_first(scored) if len(scored) > 1 else []


def _compressed_model(
    results: Results, run: str, stages: list[str], measured: Mapping[str, StageRecord]
) -> dict[str, Any] | None:
    """What the last stage that is compressed became, and its scores."""
    folders = {stage: CompressedFolder(results.stage(run, stage).compressed) for stage in stages}
    made = [one for one in stages if folders[one].receipt.exists() and folders[one].evaluation.exists()]
    if not made:
        return None
    stage, folder = made[-1], folders[made[-1]]
    scored, record = Evaluation.read(folder.evaluation), CompressedReceipt.read(folder.receipt).compressed
    whole = measured[stage].evaluation if stage in measured else None
    ratios = sorted(
        (one.error / one.error_nearest, name)
        for name, one in record.matrices.items()
        if one.error is not None and one.error_nearest
    )
    return {
        "stage": stage,
        "scored": scored,
        "lost": scored.bpb - whole.bpb if whole else None,
        "record": record,
        "ratios": ratios,
    }


# -------------------------------------------------------------------------------- costs and doing it again


def _commits(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Which rules ran at each commit."""
    commits: dict[str, list[str]] = {}
    for job in jobs:
        rules = commits.setdefault(job.commit or "not in a git checkout", [])
        if job.rule not in rules:
            rules.append(job.rule)
    return commits


def _versions(results: Results, run: str, stages: list[StageRecord]) -> dict[str, str]:
    versions = {"Python": platform.python_version(), "Spider": version("spider")}
    for path in results.warmups(run):
        measured = files.read_json(path)["versions"]
        versions |= {{"python": "Python"}.get(name, name): value for name, value in measured.items()}
    trained = [stage.manifest.torch for stage in stages if stage.manifest]
    return versions | ({"torch": trained[-1]} if trained else {})


def _configuration(config: Config, run: str, datasets: Iterable[str]) -> str:
    """Return what `settings_of` does, and the results folder that the commands name."""
    default = Config.model_fields["results"].default
    folder = "" if config.results == default else yaml.safe_dump({"results": config.results})
    return folder + settings_of(config, run, datasets)


def settings_of(config: Config, run: str, datasets: Iterable[str]) -> str:
    """The part of the configuration that made a run on these datasets, as YAML; secrets removed."""
    written, used = config.written, dict.fromkeys(datasets)
    tokenizers = {config.datasets[name].tokenizer for name in used if name in config.datasets} - {None}
    learned = {name: one for name, one in written.get("tokenizers", {}).items() if name in tokenizers}
    used |= dict.fromkeys(one["data"] for one in learned.values())
    likes = [config.datasets[name].like for name in used if name in config.datasets]
    used |= dict.fromkeys(like for like in likes if like)
    plain: dict[str, Any] = {"datasets": {k: one for k, one in written["datasets"].items() if k in used}}
    plain |= {"tokenizers": learned} if learned else {}
    kept = spool.redact({**plain, "runs": {run: written["runs"][run]}})
    text, escaped = (yaml.safe_dump(kept, sort_keys=False, allow_unicode=plainly, width=100)
                     for plainly in (True, False))  # fmt: skip
    return text if printable(text) == text else escaped
