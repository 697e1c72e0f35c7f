"""Run the checks of a claim one after the other, and write what they found as ``audit.json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module

from spider.audit import CHECKS, SCORED_AGAIN, fresh
from spider.audit.claim import Claim
from spider.audit.record import Audit, Finding
from spider.config import nearest
from spider.files import sha256


def audit(
    claim: Claim,
    *,
    quick: bool,
    only: Sequence[str] = (),
    tell: Callable[[Finding], None] = lambda finding: None,
) -> Audit:
    """Run the checks, or ``only`` those of these names, and return what they found.

    Args:
        quick: check samples instead of all, and train nothing again.
        tell: is called with each finding as its check ends.

    Raises:
        ValueError: the configuration has no such stage, its receipt or evaluation cannot be read by this
            version, or a name is not that of a check.
    """
    for name in only:
        if name not in CHECKS:
            raise ValueError(f"no check {name!r}{nearest(name, CHECKS)}")
    spec = claim.spec
    for path, command in ((claim.folder.receipt, "train"), (claim.folder.evaluation, "evaluate")):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; run `spider {command} {claim.run}/{claim.stage}`")
    scored = claim.evaluation.weights
    findings = []
    for name in only or CHECKS:
        findings.append(_finding(name, claim, quick))
        tell(findings[-1])
    return Audit(
        format=Audit.FORMAT,
        run=spec.run,
        stage=spec.stage,
        quick=quick,
        time=time.time(),
        weights=scored,
        evaluation=sha256(claim.folder.evaluation),
        findings=findings,
    )


def _finding(name: str, claim: Claim, quick: bool) -> Finding:
    """Run a check. If a file that it needs is missing, the reason says so."""
    began = time.monotonic()
    try:
        if name in SCORED_AGAIN:
            found = fresh.finding(name, claim, quick)
        else:
            found = import_module(f"spider.audit.{name}").check(claim, quick)
    except ValueError as error:
        first, *others = str(error).splitlines()
        found = Finding(check=name, status="skipped", reason=first, details=others)
    return found.model_copy(update={"seconds": time.monotonic() - began})
