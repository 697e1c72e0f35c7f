"""`spider diff` and `spider why`: answers from the records of all jobs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from spider.cli.session import FILE, JSON, Session
from spider.common.results import root_of
from spider.provenance.lineage import Lineage, Made, result_of


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
