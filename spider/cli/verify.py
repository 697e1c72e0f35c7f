"""`spider verify`: hash files again, split text again, score again."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spider.cli.session import JSON, THREADS, Session, command, prepare_torch, take_gpu
from spider.common.results import NEWEST, root_of
from spider.config import load_config, nearest

if TYPE_CHECKING:
    from spider.verify.claim import Checks, Claim, Finding

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
