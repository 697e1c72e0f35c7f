"""Commands that look at a configuration before a run, and at results after it, and change neither.

`clean` alone removes what nothing reaches, after asking.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider.cli.session import FILE, JSON, THREADS, Session, command, log, prepare_torch, take_gpu
from spider.common.results import NEWEST, StageFolder, root_of
from spider.config import load_config, nearest
from spider.provenance.lineage import Lineage, Made, result_of

if TYPE_CHECKING:
    from spider.verify.claim import Checks, Claim, Finding

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@command("[run]")
@JSON
@click.option(
    "--memory", type=click.FloatRange(0, min_open=True), metavar="GB", help="Of the device for auto."
)
def describe(session: Session, run: str | None, as_json: bool, memory: float | None) -> None:
    """Estimate the cost of a run before training: parameters, FLOPs per byte, steps, memory.

    Several runs, those of a sweep or, without RUN, all of them, get one line each.
    """
    from spider.workflow.describe import describe, render, render_list

    config = session.config
    single = run is not None and run not in config.sweeps
    names = config.sweeps.get(run or "", [run] if run else config.runs)
    costs = [describe(config, name, None if memory is None else int(1e9 * memory)) for name in names]
    if as_json:
        click.echo(json.dumps(costs[0] if single else costs, indent=2))
    elif single:
        render(costs[0])
    else:
        render_list(costs)


@click.command()
@click.argument("config", type=FILE, required=False)
@click.option("--workflow-profile", "profile", type=FILE, help="Profile of a scheduler that runs the jobs.")
@click.option("--seconds", default=4.0, show_default=True, help="Seconds to wait for hosts and disks.")
@click.pass_obj
def doctor(session: Session, config: Path | None, profile: Path | None, seconds: float) -> None:
    """Check what would stop a run, before anything is downloaded or trained; exit with 1 if something would.

    CONFIG is the configuration (default: that of --config). Each line has ok, warning or problem, what was
    found, and what to do.
    """
    from spider.workflow.doctor import examine

    logging.disable(logging.WARNING)  # Findings have what retries of requests would log.
    failed = False
    for subject, mark, text in examine((Session(config) if config else session).config, profile, seconds):
        click.echo(f"{click.style(f'{mark:<8}', fg=_COLOURS[mark])} {subject}: {text}")
        failed = failed or mark == "problem"
    sys.exit(int(failed))


@click.group()
def config() -> None:
    """All keys of a configuration, for editors and for people."""


@config.command()
def schema() -> None:
    """Print the JSON schema of configurations, for editors."""
    from spider.config.reference import json_schema

    click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@config.command()
def reference() -> None:
    """Print all keys with type, default and meaning, as Markdown."""
    from spider.config.reference import reference

    click.echo(reference(), nl=False)


# ----------------------------------------------------------------------------------------------------- verify

QUICK = click.option("--quick", is_flag=True, help="Check samples instead of all.")
ONLY = click.option("--only", metavar="CHECK,...", default="", help="Checks to run (default: all).")
WHICH = click.option("--compressed", is_flag=True, help="Check the compressed model of the stage.")


@command("[name]")
@WHICH
@QUICK
@ONLY
@JSON
@THREADS
def verify(
    session: Session,
    name: str | None,
    compressed: bool,
    quick: bool,
    only: str,
    as_json: bool,
    threads: int | None,
) -> None:
    """Verify the score of a stage from its files, and leave with status 1 if a check fails.

    NAME is a run (its last stage), RUN/STAGE, or the folder of a stage. Without it, all files of the results
    folder are compared with the records of the jobs that made them.
    """
    from spider import verify

    if name is None:
        from spider.verify.digests import check_folder

        checks: Checks = {"digests": partial(check_folder, session.results.root, quick)}
    else:
        claim = claimed(session, name, compressed)
        take_gpu(claim.config, claim.run)
        prepare_torch(threads)
        checks = verify.checks(claim, quick)
    found = run_checks(checks, only, as_json)
    if any(one.status == "failed" for one in found):
        sys.exit(1)


def run_checks(checks: Checks, only: str, as_json: bool) -> list[Finding]:
    """Run checks, or ``only`` those of these names, and print a line for each as it ends."""
    from spider.verify.claim import findings

    names = [one for one in only.split(",") if one]
    for name in names:
        if name not in checks:
            raise ValueError(f"no check {name!r}{nearest(name, list(checks))}")
    found = []
    for one in findings({name: check for name, check in checks.items() if not names or name in names}):
        found.append(one)
        if not as_json:
            click.echo(f"{one.status:7} {one.check:12} {one.seconds:6.1f} s  {one.reason}")
            for line in one.details if one.status == "failed" else []:
                click.echo(f"    {line}")
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
    return found


def claimed(session: Session, name: str, compressed: bool = False) -> Claim:
    """Return the claim that the name of a run or a stage, or the folder of a stage, stands for."""
    from spider.verify.claim import Claim

    root, config = root_of(Path(name)), session.config
    if root is None:
        return Claim(config, *session.stage_of(name), compressed)
    if not session.config_path.resolve().is_relative_to(root):
        config = load_config(root / NEWEST)
    inside = Path(name).resolve().relative_to(root).parts
    if inside[:1] != ("runs",) or len(inside) < 3:
        raise ValueError(f"{name}: names no stage; give the folder of a stage, or RUN/STAGE")
    config = config.model_copy(update={"results": str(root)})
    return Claim(config, inside[1], inside[2], compressed or "compressed" in inside[3:4])


# ---------------------------------------------------------------------------------------------------- compare


@click.command()
@click.argument("one")
@click.argument("other")
@JSON
@click.pass_obj
def compare(session: Session, one: str, other: str, as_json: bool) -> None:
    """Compare two models that were scored on the same text: ONE and OTHER are RUN or RUN/STAGE.

    The difference is OTHER minus ONE in bits per byte, each document alone. Documents are paired, which shows
    what other text might give. If seeds of both runs are there, they are paired too, which shows what other
    trainings might give. Nothing is trained.
    """
    from spider.evaluation.noise import paired, paired_by_seed
    from spider.evaluation.records import Evaluation

    first, second = (Evaluation.read(_folder(session, name).evaluation) for name in (one, other))
    both = f"{one} and {other}"
    if first.text_sha256 != second.text_sha256:
        raise ValueError(f"{both} are scored on different text; give both the same evaluation.data")
    bits = first.document_bits, second.document_bits
    if min(map(len, bits)) < 2:
        raise ValueError(f"{both} have no bits of two or more documents; evaluate both again, on more text")
    found = [paired(*bits, len(bits[0]) / first.bytes, "documents")]
    found += paired_by_seed(session.results, session.names(one)[0], session.names(other)[0])
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    for line in found:
        click.echo(line)
    if len(found) == 1:
        remedy = "train both with further seeds, such as `grid: {seed: [1, 2]}`"
        click.echo(f"Another seed moves a score too: {remedy}.")


def _folder(session: Session, name: str) -> StageFolder:
    """Return the folder of the scores of a stage (default: the last one), or of a foreign model."""
    if name in session.config.foreign:
        return session.results.foreign(name)
    return session.results.stage(*session.stage_of(name))


# ------------------------------------------------------------------------------------------------- provenance


@click.command()
@click.argument("one")
@click.argument("other")
@JSON
@click.pass_obj
def diff(session: Session, one: str, other: str, as_json: bool) -> None:
    """Print the first causes of the difference between two results.

    ONE and OTHER are RUN (its last stage), RUN/STAGE, or the folder of a stage in any results folder.
    """
    from spider.provenance.differences import Comparison

    names = (one, other)
    files = [_result(session, name) for name in names]
    lineages = [_lineage(path) for path in files]
    made = [lineage.of(path) for lineage, path in zip(lineages, files, strict=True)]
    for name, path, result in zip(names, files, made, strict=True):
        if result.job is None:
            raise ValueError(f"{name}: no job recorded {path} as it is now; it was edited, or made untracked")
    causes = Comparison(*lineages).causes(*made)
    if as_json:
        click.echo(json.dumps([asdict(cause) for cause in causes], indent=2))
        return
    for cause in causes:
        click.echo(str(cause))
    if not causes:
        click.echo(f"{one} and {other}: the same settings, code, packages and files")


@click.command()
@click.argument("file", type=FILE)
@click.pass_obj
def why(session: Session, file: Path) -> None:
    """Print what FILE of a results folder was made from, and what has changed since."""
    lineage = _lineage(file)
    made = lineage.of(file)
    if made.job is None:
        raise ValueError(f"{file}: no job recorded this file as it is now; it was edited, or made untracked")
    for line in _described(lineage, made):
        click.echo(line)


def _result(session: Session, name: str) -> Path:
    """Return the file that a stage ends with, by the names of run and stage or the path of its folder."""
    if root_of(Path(name)) is not None:
        return result_of(Path(name))
    return result_of(session.results.stage(*session.stage_of(name)).path)


def _lineage(path: Path) -> Lineage:
    root = root_of(path)
    if root is None:
        raise ValueError(f"{path}: is not in a results folder (a folder with spider.json)")
    return Lineage(root)


def _described(lineage: Lineage, made: Made) -> list[str]:
    """Return lines about the job of a file, its inputs, and what has changed since."""
    from spider.provenance.made import file_digest

    job = made.job
    assert job is not None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.ended or job.started))
    code = lineage.code(job)
    lines = [f"{made.path}", f"  made by   spider {job.command or job.name}, {at}"]
    workflow = lineage.workflows.get(job.workflow)
    changed = f" with the changes in code/{workflow.patch}.patch" if workflow and workflow.patch else ""
    lines += [f"  code      Spider {code['version']}, commit {code['commit']}{changed}"] if code else []
    lines += [f"  config    configs/{job.snapshot}.yaml"] if job.snapshot else []
    lines += [f"  settings  {json.dumps(job.params, ensure_ascii=False)}"] if job.params else []
    ancestors = list(lineage.ancestry(made))
    for one in ancestors:
        origin = f"{one.job.name}" if one.job else "not made by a job of this folder"
        lines.append(f"  from      {one.path}  ({origin})")
    edited = sorted({name for one in [made, *ancestors] if one.job for name in lineage.edited(one.job)})
    updated = [
        one.path for one in ancestors if file_digest(lineage.root / one.path) not in (one.digest, None)
    ]
    lines += [f"  since     Updated input file: {path}" for path in updated]
    lines += [f"  since     made by other code: {name}" for name in edited]
    return lines if updated or edited else [*lines, "  since     no input and no module has changed"]


# ------------------------------------------------------------------------------------------------------ clean


@command()
@click.option("--newest", is_flag=True, help="Count only the newest configuration, not all that were used.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean(session: Session, newest: bool, yes: bool) -> None:
    """List what no configuration in the results folder reaches, and remove it after asking.

    This concerns runs, stages, shards, tokenizers, n-gram indexes, baselines and compile caches. A run that
    was trained by hand with other settings is in no configuration, so it is listed too.
    """
    from spider.common.formatting import quantity
    from spider.common.results import check_root
    from spider.workflow.clean import leftovers

    root = session.results.root
    check_root(root)
    found = leftovers(root, newest=newest)
    if not found:
        click.echo(f"{root}: every result is reached by a configuration")
        return
    sizes = [one.bytes for one in found]
    for one, size in zip(found, sizes, strict=True):
        click.echo(f"{quantity(size, 'B'):>8}  {one.kind}: {one.path}")
    click.echo(f"{quantity(sum(sizes), 'B'):>8}  in all")
    if not yes:
        click.confirm("Remove all of this?", abort=True)
    for one in found:
        one.remove()
        log.info("removed %s", one.path)
