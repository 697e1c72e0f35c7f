"""`spider audit`: try to disprove the score of a stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider import tracking
from spider.checkpoints.records import COMPRESSED, Exported
from spider.cli.session import (
    JSON,
    NEW_FILE,
    THREADS,
    Session,
    command,
    command_line,
    log,
    prepare_torch,
    take_gpu,
)
from spider.config import Config, load_config
from spider.results import NEWEST, root_of

if TYPE_CHECKING:
    from spider.audit.claim import Claim
    from spider.audit.record import Finding


@command()
@click.argument("name", metavar="RUN[/STAGE]|PATH")
@click.argument("stage", required=False)
@click.option("--compressed", is_flag=True, help="Audit the compressed model of the stage.")
@click.option("--quick", is_flag=True, help="Check samples instead of all, and train nothing again.")
@click.option("--only", metavar="CHECK,...", default="", help="Checks to run (default: all).")
@click.option("--output", type=NEW_FILE, help="File to write (default: audit.json in the stage's folder).")
@click.option("--warn", is_flag=True, help="If a check fails, log a warning and leave with status 0.")
@JSON
@THREADS
def audit(
    session: Session,
    name: str,
    stage: str | None,
    compressed: bool,
    quick: bool,
    only: str,
    output: Path | None,
    warn: bool,
    as_json: bool,
    threads: int | None,
) -> None:
    """Try to disprove the score of a stage, and leave with status 1 if a check fails.

    Name a run (its last stage), RUN/STAGE, a stage's folder, a receipt, an exported folder or a compressed
    model.
    """
    from spider.audit import SCORED_AGAIN, fresh
    from spider.audit.checks import audit
    from spider.evaluation.result import Result

    claim = _claim(session, f"{name}/{stage}" if stage else name, compressed)
    folder, root = claim.folder, claim.results.root
    if output is None and claim.exported is None:
        output = folder.audit
    chosen = [one for one in only.split(",") if one]
    label = folder.path.relative_to(root / "runs").as_posix()
    tracking.configure(claim.config)
    take_gpu(claim.config, claim.run)
    prepare_torch(threads)
    if (not chosen or {*SCORED_AGAIN} & {*chosen}) and folder.evaluation.is_file():
        fresh.begin(claim, quick)  # before the job starts threads
    with tracking.job(
        "audit",
        label,
        results=root,
        params={"quick": quick, "only": chosen},
        inputs=[folder.receipt, folder.evaluation, claim.results.shards(claim.held_out) / "metadata.json"],
        outputs=[output] if output else [],
        command=command_line(),
    ) as job:
        found = audit(claim, quick=quick, only=chosen, tell=lambda one: None if as_json else _print(one))
        counts: dict[str, float] = {}
        counts |= {f"audit/{status}": found.count(status) for status in ("passed", "failed", "skipped")}
        for metric, count in counts.items():
            job.metric(metric, count)
        if output:
            found.write(output)
            job.artifact(output)
        if output == folder.audit:
            result = Result(title="Audit", metrics=counts)
            tracking.log_scores(root, folder, {"audit": result}, [output], of="audit")
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2))
    if not found.passed:
        log.warning("%s: the audit FAILED%s", label, f"; {output} has the details" if output else "")
        if not warn:
            sys.exit(1)


def _print(finding: Finding) -> None:
    """Print the line of a check, and the details of a failed one below."""
    click.echo(f"{finding.status:7} {finding.check:12} {finding.seconds:6.1f} s  {finding.reason}")
    for line in finding.details if finding.status == "failed" else []:
        click.echo(f"    {line}")


def _claim(session: Session, name: str, compressed: bool) -> Claim:
    """Return the claim that a name or a path stands for."""
    from spider.audit.claim import Claim

    path = Path(name)
    root = root_of(path)
    config = session.config if root is None else _config_of(session, root)
    inside = path.resolve().relative_to(root).parts if root else ()
    if inside[:1] == ("runs",) and len(inside) > 2 and not Exported.lies_in(path):
        return Claim(config, inside[1], inside[2], compressed or "compressed" in inside[3:4])
    if Exported.lies_in(path) or (path.suffix == COMPRESSED and path.is_file()):
        from spider.checkpoints.load import Checkpoint

        exported = Checkpoint.at(path).manifest
        compressed = compressed or path.suffix == COMPRESSED
        return Claim(config, exported.run, exported.stage, compressed, exported=path)
    if root is not None:
        raise ValueError(f"{path}: names no stage; give the folder of a stage, or RUN/STAGE")
    run, stage = session.names(name)
    return Claim(config, run, stage or config.run(run).stages[-1].name, compressed)


def _config_of(session: Session, root: Path) -> Config:
    """Return the newest configuration of a results folder, or the command's own one if it lies there."""
    own = session.config_path.resolve().is_relative_to(root)
    config = session.config if own else load_config(root / NEWEST)
    return config.model_copy(update={"results": str(root)})
