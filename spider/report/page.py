"""Write the page of a run, finished or not, from the files that its jobs left, and pages of any results.

Size and cost of the model are those of the newest evaluation. A part without data is left out, and the head
of the page names it. A page is one file that loads no other: it contains its styles and figures, and its
content security policy forbids the rest. So it can be mailed, archived or printed.

The records of jobs say which jobs made a run (`spider.provenance.lineage`), so a new rule needs no entry
here. A job costs what Snakemake's benchmark file says of its last attempt. One that made a dataset counts in
full for each run that uses the dataset.
"""

from __future__ import annotations

import platform
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spider.common import VERSION, files
from spider.common.formatting import duration, number, printable, quantity, redact
from spider.common.results import Results, StageFolder
from spider.config import Config
from spider.config.spec import sources_of
from spider.data.shards import Metadata
from spider.evaluation.records import Evaluation
from spider.evaluation.result import (
    SECONDS,
    SIZE,
    Figure,
    Note,
    Number,
    Result,
    Row,
    Table,
    baselines,
    legends,
)
from spider.provenance.lineage import Lineage, Links
from spider.provenance.made import Job, usage
from spider.report import figures
from spider.report.stages import StageRecord, read_log, read_stages
from spider.report.summary import ComparedRun, Summary, by_text, join, leading, marked, models, verdicts

_HERE = Path(__file__).parent
#: Files that `draw_stage` writes into a stage's folder.
FIGURES = ("loss.svg", "inside.svg", "boundaries.html")


def write_report(config: Config, results: Results, run: str, output: Path) -> None:
    """Write the page of ``run`` to ``output``; `ValueError` for an unknown run or a damaged file."""
    files.write_text(output, render(config, results, run))


def results_page(title: str, results: Sequence[Result]) -> str:
    """Return a page of results as HTML."""
    return _html("results.html.j2", title=title, results=results)


def draw_stage(folder: StageFolder) -> list[Path]:
    """Draw `FIGURES` into a stage's folder, from its evaluation.json, train.json and metrics.jsonl.

    Raises:
        ValueError: One of the files is missing or damaged.
    """
    measured = Evaluation.read(folder.evaluation)
    where = f"{measured.run}, stage {measured.stage}"
    loss, inside, text = [folder.path / name for name in FIGURES]
    log = read_log(folder, 0, measured)
    figures.save([figures.loss([log], where)], loss, size=(8, 4.4))
    shown = [one for found in measured.results.values() for one in found.figures]
    drawn = [one for one in shown if one.kind in figures.DRAWN]
    figures.save(drawn or [Note(title=where, text="nothing was measured inside the model")], inside)
    cut: list[Figure] = [one for one in shown if one.kind == "cut_text"]
    about = [] if cut else ["This model family does not show how it cuts a text."]
    page = results_page(f"{where}: held-out text", [Result(title="", figures=cut, notes=about)])
    files.write_text(text, page)
    return [loss, inside, text]


def render(config: Config, results: Results, run: str) -> str:
    """Return the page of a run as HTML."""
    stages = read_stages(config, results, run)
    summary = _summary(config, results, stages)
    own = summary.runs.get(run) if summary else None
    found = _shown_results(stages)
    evaluated = [stage.evaluation for stage in stages if stage.evaluation]
    last = evaluated[-1] if evaluated else None
    levels = {}
    if last and stages[-1].receipt:
        best = baselines(found)[:1]
        levels = {row.note or row.label: row.value for row in best if row.value is not None}
    logs = [stage.log for stage in stages if stage.log.rows]
    return _html(
        "page.html.j2",
        title=f"{run}: report",
        run=run,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        stages=stages,
        finished=all(stage.state == "evaluated" for stage in stages),
        notes=[note for stage in stages for note in stage.notes],
        last=last,
        verdicts=verdicts(last, found) if last else [],
        badges={name: line.badges for name, line in own.lines.items()} if own else {},
        flops=sum(s.evaluation.flops_per_token * s.log.span.tokens for s in stages if s.evaluation),
        manifests=[stage.manifest for stage in stages if stage.manifest],
        scores=_tables(summary, run, own) if summary and own else [],
        legends=legends(one.results for one in own.lines.values()) if own else [],
        found=found,
        curves=figures.training(logs, levels)
        + (figures.over_bytes(summary, run)[1:] if summary and own else []),
        samples={stage.name: stage.sample for stage in stages if stage.sample and stage.sample.text},
        **_made(config, results, run, stages),
    )


def _summary(config: Config, results: Results, stages: Sequence[StageRecord]) -> Summary | None:
    """Return all evaluations that the page compares; None without any."""
    paths = [
        results.stage(name, stage.name).evaluation
        for name in config.shown
        for stage in config.runs[name].stages
    ]
    paths += [stage.folder.evaluation for stage in stages]
    there = [path for path in dict.fromkeys(paths) if path.is_file()]
    return join(there, foreign=results.foreign_scores) if there else None


def _tables(summary: Summary, run: str, own: ComparedRun) -> list[Table]:
    """Return tables of the run's stages on each text, their further scores, checkpoints, and of all runs."""
    tables = []
    for lines in by_text(own.lines).values():
        tables.append(models(lines, short=True, places=(0, 1)))
        further = models(lines, short=True, places=(2,))
        tables += [further.model_copy(update={"title": "Further scores"})] if further.rows else []
    tables += summary.checkpoints(run)
    others = {name: one.last for name, one in summary.runs.items()} | summary.others
    same = {name: line for name, line in others.items() if line.text == own.last.text}
    if len(same) > 1:
        score = leading(line for line in same.values() if line.steps)
        ranked = sorted(same, key=lambda name: float(getattr(same[name], score) or "inf"))
        noise = summary.noise.get(own.last.text_sha256)
        table = models({name: same[name] for name in ranked}, noise, short=True, places=(0, 1))
        tables.append(table.model_copy(update={"title": "All runs on the same text, best first"}))
    return tables


def _shown_results(stages: Sequence[StageRecord]) -> dict[str, Result]:
    """Return each result of the last stage that has it, by name, and others of its compressed model."""
    found: dict[str, Result] = {}
    for stage in stages:
        lossless = stage.evaluation is None or stage.evaluation.lossless
        both = stage.results | {k: one for k, one in stage.compressed.items() if k not in stage.results}
        found |= {
            name: one if lossless else one.model_copy(update={"rows": marked(one.rows)})
            for name, one in both.items()
        }
    return found


# ----------------------------------------------------------------------------------------------------- pages


def _html(name: str, **values: Any) -> str:
    return _TEMPLATES.get_template(name).render(values)


def _without_controls(value: Any) -> Any:
    """Remove control characters from any text of a template; keep markup as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_without_controls,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {
    "style": Markup((_HERE / "page.css").read_text(encoding="utf-8")),
    "version": VERSION,
    "DRAWN": figures.DRAWN,
}
_TEMPLATES.filters |= {
    "quantity": quantity,
    "duration": duration,
    "number": number,
    "count": "{:,}".format,
    "draw": lambda one: Markup(figures.inline(one)),
}


# --------------------------------------------------------------------------------------- provenance and costs


def jobs_of(lineage: Lineage, run: str, stages: Iterable[str]) -> list[Job]:
    """Return the jobs that made a run with these stages and all that it was made from, in their order."""
    folders = {
        f"runs/{run}",
        *(f"runs/{run}/{stage}{inside}" for stage in stages for inside in ("", "/compressed")),
    }
    return lineage.behind(path for path in lineage.newest if str(Path(path).parent) in folders)


def grouped(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs in their order, those for all parts of a dataset together."""
    groups = defaultdict[tuple[str, Path], list[Job]](list)
    for job in jobs:
        made = Path(job.outputs[0].path)
        groups[job.rule, made.parent if made.stem.isdecimal() else made].append(job)
    return [sorted(alike, key=lambda job: job.outputs[0].path) for alike in groups.values()]


def commands(jobs: Sequence[Job], run: str) -> list[str]:
    """Return the commands of a run's jobs, one command for all parts of a dataset.

    Runs share n-gram indexes, so a job may name another run with the same settings. The name of this run
    replaces that one.
    """
    lines = []
    for alike in grouped(job for job in jobs if job.command):
        first, last = alike[0], alike[-1]
        words = shlex.split(first.command)
        if first.rule in ("count_ngrams", "build_ngrams"):
            words[words.index(first.rule.replace("_", "-")) + 1] = run
        more = f"   # and so on, to {Path(last.outputs[0].path).stem}" if last is not first else ""
        lines.append(f"spider --config run.yaml {shlex.join(words)}{more}")
    return list(dict.fromkeys(lines))


def costs(root: Path, jobs: Iterable[Job]) -> Table:
    """Return the table of what the jobs of each rule cost, in the order of the jobs, and of all together."""
    by_rule = defaultdict[str, list[dict[str, float]]](list)
    for job in jobs:
        if "s" in (took := usage(root, job)):
            by_rule[job.rule].append(took)
    rows, seconds = [], 0.0
    for rule, each in by_rule.items():
        cpu = [one["cpu_time"] for one in each if "cpu_time" in one]
        peak = max((one["max_rss"] for one in each if "max_rss" in one), default=None)
        seconds += (own := sum(one["s"] for one in each))
        columns = {
            "time": Number(value=own, unit=SECONDS),
            "processor time": Number(value=sum(cpu) if cpu else None, unit=SECONDS, text="?"),
            "peak memory": Number(value=peak and peak * 2**20, unit=SIZE, text="?"),
        }
        rows.append(Row(name=rule, label=rule, value=len(each), columns=columns))
    if rows:
        count = sum(map(len, by_rule.values()))
        time = {"time": Number(value=seconds, unit=SECONDS)}
        rows.append(Row(name="all", label="all", value=count, columns=time))
    note = (
        "Wall time of the last attempt of each job, summed over jobs. The times of stages above count all "
        "attempts. Comparing the runs and writing this page are not counted."
    )
    return Table(title="", head="rule", value="jobs", rows=rows, notes=[note])


def _made(config: Config, results: Results, run: str, stages: list[StageRecord]) -> dict[str, Any]:
    """Return what the page shows of the jobs that made the run."""
    lineage = Lineage(results.root)
    jobs = jobs_of(lineage, run, [stage.name for stage in stages])
    links = Links(results.root, quick=True)
    links.compare(jobs)
    commits = defaultdict[str, dict[str, None]](dict)
    for job in jobs:
        commits[job.commit or "not in a git checkout"][job.rule] = None
    names = [name for stage in stages for name in sources_of(stage.spec)]
    names += [stage.evaluation.data for stage in stages if stage.evaluation]
    described = {name: results.shards(name) / "metadata.json" for name in names}
    found = {name: Metadata.read(path) for name, path in described.items() if path.exists()}
    return {
        "left_out": {name: one.without for name, one in found.items() if one.without},
        "chain": [_link(lineage, alike) for alike in grouped(jobs)],
        "problems": links.problems,
        "unbroken": links.unbroken,
        "costs": costs(results.root, jobs),
        "commits": commits,
        "versions": _versions(results, run, stages),
        "config": _configuration(config, run, names) if run in config.runs else None,
        "commands": commands(jobs, run),
    }


def _link(lineage: Lineage, alike: Sequence[Job]) -> dict[str, Any]:
    """Return a link of the chain: jobs for all parts of a dataset, or one job, with the files.

    ``own`` are the files that no job wrote. ``digests`` are those of datasets and weights, by the file that
    names them.
    """
    read = {file.path: file for job in alike for file in job.inputs}
    wrote = [file for job in alike for file in job.outputs]
    content = {file.path: lineage.content(lineage.made(file)) for file in wrote}
    return {
        "jobs": alike,
        "read": [*read],
        "own": [file for file in read.values() if file.digest and file.path not in lineage.newest],
        "wrote": wrote,
        "digests": {
            file.path: content[file.path]
            for file in wrote
            if isinstance(content[file.path], str) and content[file.path] != file.digest
        },
    }


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
    redacted = redact(settings)
    text = yaml.safe_dump(redacted, sort_keys=False, allow_unicode=True, width=100)
    if printable(text) == text:
        return text
    return yaml.safe_dump(redacted, sort_keys=False, allow_unicode=False, width=100)
