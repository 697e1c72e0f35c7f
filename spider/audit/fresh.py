"""Run the checks that score again (score, distribution, causality) in one process of their own.

The process opens the checkpoint and the text itself, and torch is imported once for the three checks. Before
it reads the text it forks a second process, which only ever gets prefixes of the text
(`spider.audit.scoring.Predictor`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spider.audit.claim import Claim
from spider.audit.record import Finding

if TYPE_CHECKING:
    from spider.evaluation.records import Evaluation

#: The checks that run in the process. The causality comes last, because it makes the model float64.
CHECKS = ("score", "distribution", "causality")


def finding(check: str, claim: Claim, quick: bool) -> Finding:
    """Return the finding of one of the `CHECKS`; the process runs once for a claim."""
    if quick not in claim.found:
        claim.found[quick] = _findings(claim, quick)
    return claim.found[quick][check]


def missing(claim: Claim, evaluation: Evaluation) -> list[Path]:
    """Return the files that scoring again needs and that are not there."""
    needed = [claim.folder.path / evaluation.checkpoint, claim.results.shards(claim.held_out)]
    return [path for path in needed if not path.exists()]


def _findings(claim: Claim, quick: bool) -> dict[str, Finding]:
    try:
        if lacking := missing(claim, claim.evaluation):
            return alike("skipped", f"the score cannot be computed again, because {lacking[0]} is missing")
    except ValueError as error:
        return alike("failed", f"the evaluation cannot be read: {error}")
    given = {
        "config": claim.config.written,
        "run": claim.run,
        "stage": claim.stage,
        "compressed": claim.compressed,
        "quick": quick,
    }
    done = subprocess.run(
        [sys.executable, "-m", "spider.audit.again"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return alike("skipped", f"the process that scores again ended with {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {check: Finding.model_validate(plain) for check, plain in found.items()}


def alike(status: str, reason: str) -> dict[str, Finding]:
    return {
        check: Finding.model_validate({"check": check, "status": status, "reason": reason})
        for check in CHECKS
    }
