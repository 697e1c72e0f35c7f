"""The page of a run, from what its jobs have left.

Size and price of the model are what the newest evaluation wrote down. A part without data is left out of the
page, and named at its head; a run nobody has begun still has a page.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from spider import files
from spider.checkpoints.pressed import ArtifactReceipt
from spider.config import Config, TokensSource
from spider.evaluation.artifact import Evaluation, fairest, quarters
from spider.evaluation.harness_result import HarnessResult
from spider.report import figures
from spider.report.compare import LIKE_AND_UNLIKE
from spider.report.costs import RULES, costs
from spider.report.formatting import DAGGER, LOSSY, printable
from spider.report.provenance import chain, read_datasets
from spider.report.render import html
from spider.report.stages import StageRecord, read_stages
from spider.results import ArtifactFolder, Results
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
    jobs = [job for job in records if job["tags"].get("spider.name", "").partition("/")[0] in (run, *names)]
    measured = {stage.name: stage.evaluation for stage in stages if stage.evaluation}
    last = [*measured.values()][-1] if measured else None
    loops = figures.loops({name: one.loops for name, one in measured.items()})
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
        sized=next((one for one in reversed(measured.values()) if one.parameters), None),
        flops=sum((s.evaluation.flops_per_token or 0) * s.log.span.tokens for s in stages if s.evaluation),
        manifests=[stage.manifest for stage in stages if stage.manifest],
        unlike=LIKE_AND_UNLIKE,
        dagger="" if last is None or last.lossless else DAGGER,
        lossy=LOSSY,
        quarters=quarters(last.by_document or ()) if last else [],
        ranking=_ranking(run, last) if last else [],
        others=_others(config, results, last) if last else [],
        pressed=_pressed(results, run, [stage.name for stage in stages], measured),
        standard=_standard(results, run, [stage.name for stage in stages]),
        curves=figures.training(stages),
        inside=[loops, *figures.inside(last.figures)] if last else [],
        samples={stage.name: stage.sample for stage in stages if stage.sample and stage.sample.text},
        datasets=datasets,
        links=chain(stages, datasets),
        costs=costs(results, run, [stage.name for stage in stages], names, jobs),
        commits=_commits(jobs),
        versions=_versions(results, run, stages),
        config=settings_of(config, run, names) if run in config.runs else None,
        commands=_commands(config, run) if run in config.runs else [],
    )


def _ranking(run: str, last: Evaluation) -> list[dict[str, Any]]:
    """The run among the compressors, on the text that its last evaluated stage was scored on."""
    rows = sorted([*fairest(last.compressors).items(), (run, last.bpb)], key=lambda row: row[1])
    share = 100 / rows[-1][1]
    return [{"name": name, "bits": bits, "own": name == run, "share": bits * share} for name, bits in rows]


def _others(config: Config, results: Results, last: Evaluation) -> list[Evaluation]:
    """The configuration's runs whose last stage was scored on the same text, best first."""
    paths = [results.stage(name, run.stages[-1].name).evaluation for name, run in config.runs.items()]
    scored = [
        one for one in map(Evaluation.read, filter(Path.exists, paths)) if one.text_sha256 == last.text_sha256
    ]
    return sorted(scored, key=lambda one: one.bpb) if len(scored) > 1 else []


def _pressed(
    results: Results, run: str, stages: list[str], measured: Mapping[str, Evaluation]
) -> dict[str, Any] | None:
    """What the last stage that is pressed became, and its scores."""
    folders = {stage: ArtifactFolder(results.stage(run, stage).artifact) for stage in stages}
    made = [one for one in stages if folders[one].receipt.exists() and folders[one].evaluation.exists()]
    if not made:
        return None
    stage, folder = made[-1], folders[made[-1]]
    scored, record = Evaluation.read(folder.evaluation), ArtifactReceipt.read(folder.receipt).artifact
    ratios = sorted(
        (one.error / one.error_nearest, name)
        for name, one in record.matrices.items()
        if one.error is not None and one.error_nearest
    )
    return {
        "stage": stage,
        "scored": scored,
        "lost": scored.bpb - measured[stage].bpb if stage in measured else None,
        "record": record,
        "ratios": ratios,
    }


def _standard(results: Results, run: str, stages: list[str]) -> HarnessResult | None:
    """Standard tasks, of the last stage that was asked any."""
    asked = [path for stage in stages if (path := results.stage(run, stage).harness).exists()]
    return HarnessResult.read(asked[-1]) if asked else None


# -------------------------------------------------------------------------------- costs and doing it again


def _commits(jobs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Which rules ran at each commit."""
    commits: dict[str, list[str]] = {}
    for rule in RULES:
        for job in jobs:
            commit = job["tags"].get("git.commit", "not in a git checkout")
            if job["tags"]["spider.rule"] == rule and rule not in commits.setdefault(commit, []):
                commits[commit].append(rule)
    return commits


def _versions(results: Results, run: str, stages: list[StageRecord]) -> dict[str, str]:
    versions = {"Python": platform.python_version(), "Spider": version("spider")}
    for path in results.warmups(run):
        measured = files.read_json(path)["versions"]
        versions |= {{"python": "Python"}.get(name, name): value for name, value in measured.items()}
    trained = [stage.manifest.torch for stage in stages if stage.manifest]
    return versions | ({"torch": trained[-1]} if trained else {})


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


def _commands(config: Config, run: str) -> list[str]:
    """The workflow's jobs as one would type them, the parts of a dataset by example."""
    spec, stages = config.runs[run], [config.stage(run, one.name) for one in config.runs[run].stages]
    lines = []
    for name in sorted({stage.data for stage in stages} | {spec.evaluation.data or spec.data}):
        if parts := config.datasets[name].source.parts():
            each = f"   # and so on, to {parts[-1]}" if len(parts) > 1 else ""
            source, raw = config.datasets[name].source, f"results/raw/{name}/{parts[0]}.parquet"
            if isinstance(source, TokensSource):  # read where it lies
                raw = source.item(parts[0])
            else:
                lines += [f"download {name} {parts[0]} --output {raw}{each}"]
            lines += [
                f"encode {name} {parts[0]} {raw}{each}",
                f"index {name} --output results/shards/{name}/metadata.json",
            ]
    if memory := spec.model.memory:
        parts, folder = (
            config.datasets[spec.data].source.parts(),
            f"results/memory/{spec.data}/{memory.counted}",
        )
        counts = [f"{folder}/counts/{part}" for part in parts]
        each = f"   # and so on, to {parts[-1]}" if len(parts) > 1 else ""
        merge = f"memory {run} {' '.join(counts)} --output {folder}"
        lines += [f"count {run} {parts[0]} --output {counts[0]}{each}"]
        lines += [f"{merge}/memory/memory.json", f"{merge}/folded/memory.json --folded"]
    shapes: set[str] = set()
    for stage in stages:
        lines += [f"warmup {run} {stage.stage}"] if stage.shape not in shapes else []
        shapes.add(stage.shape)
        processes = f" --processes {stage.processes}" if stage.processes > 1 else ""
        lines += [f"train {run} {stage.stage}{processes}", f"evaluate {run} {stage.stage}"]
    return [f"spider --config run.yaml {line}" for line in lines]
