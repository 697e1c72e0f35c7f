"""`spider diff`, `spider why` and `spider checkout`: answers from the records of all jobs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from spider.cli.session import FILE, JSON, Session
from spider.provenance.lineage import Lineage, Made, result_of
from spider.results import root_of


@click.command()
@click.argument("one")
@click.argument("other")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF SNAKEMAKE]")
@click.option(
    "--bisect",
    "metric",
    metavar="METRIC",
    is_flag=False,
    flag_value="bpb",
    help="Train runs between both, and name the setting that moves METRIC of evaluation.json (default: bpb).",
)
@click.option("--dry-run", "-n", is_flag=True, help="With --bisect: print the settings, and train nothing.")
@JSON
@click.pass_obj
def diff(
    session: Session,
    one: str,
    other: str,
    options: tuple[str, ...],
    metric: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print the first causes of the difference between two results.

    ONE and OTHER are RUN (its last stage), RUN/STAGE, or the folder of a stage in any results folder.

    With --bisect the workflow trains hybrids: ONE with half of the differing settings as in OTHER, then with
    a quarter, and so on. OPTIONS of Snakemake follow two dashes, such as `-- --profile profiles/slurm`. Give
    the same command again after an interruption.
    """
    from spider.provenance.differences import Comparison

    if metric is None and (options or dry_run):
        raise click.UsageError("options of Snakemake and --dry-run need --bisect")

    names = (one, other)
    files = [_result(session, name) for name in names]
    lineages = [_lineage(path) for path in files]
    made = [lineage.of(path) for lineage, path in zip(lineages, files, strict=True)]
    for name, path, result in zip(names, files, made, strict=True):
        if result.job is None:
            raise ValueError(f"{name}: no job recorded {path} as it is now; it was edited, or made untracked")
    if metric is not None:
        _bisect(lineages, made, metric, options, dry_run, as_json)
        return
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


@click.command()
@click.argument("name", metavar="RUN[/STAGE]")
@click.argument("folder", type=FILE)
@click.pass_obj
def checkout(session: Session, name: str, folder: Path) -> None:
    """Restore the code, the configuration and the environment that made a stage into FOLDER.

    The default of STAGE is the last stage of the run. FOLDER must not exist, or be empty. The last lines say
    how to train it again there, with the same bytes on the same machine.
    """
    from spider.provenance.checkout import checkout

    run, stage = session.names(name)
    stage = stage or session.config.run(run).stages[-1].name
    for line in checkout(_lineage(session.results.root), run, stage, folder):
        click.echo(line)


def _result(session: Session, name: str) -> Path:
    """Return the file that a stage ends with, by the names of run and stage or the path of its folder."""
    if root_of(Path(name)) is not None:
        return result_of(Path(name))
    run, stage = session.names(name)
    return result_of(session.results.stage(run, stage or session.config.run(run).stages[-1].name).path)


def _bisect(
    lineages: list[Lineage],
    made: list[Made],
    metric: str,
    options: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Name the setting that moves a metric between two results."""
    from spider.provenance.bisection import Bisection
    from spider.provenance.hybrids import named

    one, other = (lineage.root.resolve() for lineage in lineages)
    if one != other:
        raise ValueError(
            f"{one} and {other}: bisection needs two runs of one results folder; train both in one"
        )
    bisection = Bisection(lineages[0], (made[0], made[1]), metric)
    for line in bisection.warnings():
        click.echo(f"warning: {line}", err=True)
    if dry_run:
        for suspect in bisection.suspects:
            click.echo(", ".join(map(str, suspect)))
        first = bisection.first()
        click.echo(f"at most {bisection.most} trainings, the first: {bisection.name(first)} ({named(first)})")
        return
    found = bisection.find(options, lambda line: click.echo(line, err=as_json))
    lines = [json.dumps(bisection.as_json(found), indent=2)] if as_json else bisection.verdict(found)
    for line in lines:
        click.echo(line)


def _lineage(path: Path) -> Lineage:
    root = root_of(path)
    if root is None:
        raise ValueError(f"{path}: is not in a results folder (a folder with spider.json)")
    return Lineage(root)


def _described(lineage: Lineage, made: Made) -> list[str]:
    """Return lines about the job of a file, its inputs, and what has changed since."""
    from spider.tracking.records import file_digest

    job = made.job
    assert job is not None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.ended or job.started))
    code = lineage.code(job)
    lines = [f"{made.path}", f"  made by   spider {job.command or job.name}, {at}"]
    changed = "" if not code.get("patch") else f" with the changes in tracking/code/{code['patch']}.patch"
    lines += [f"  code      Spider {code['version']}, commit {code['commit']}{changed}"] if code else []
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
