"""Try to disprove the score of a stage: all checks, and ``audit.json``, which has what they found.

digests       `spider.verify.digests`, and records that contradict each other
splits        held-out documents, or copies of them, in the training text
distribution  probabilities sum to one; the bytes counted are those of the text
score         bits per byte, computed again by another path
causality     no prediction depends on a byte after it
replay        a stretch of the training gives the same bytes again
code          what differs between the code that made the files and the code that stands here
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from spider.audit.record import Audit
from spider.files import sha256
from spider.verify.claim import Checks, Claim, Finding


def checks(claim: Claim, quick: bool, exported: Path | None = None) -> Checks:
    """Return the checks by name, in their order. Those that score again fork a process now.

    Args:
        quick: check samples instead of all, and train nothing again.
        exported: a copy of the model outside of its stage.

    Raises:
        ValueError: the stage was not trained or not evaluated.
    """
    from spider_trust import again, code, records, replay, splits

    for path, command in ((claim.folder.receipt, "train"), (claim.folder.evaluation, "evaluate")):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; run `spider {command} {claim.run}/{claim.stage}`")
    return {
        "digests": partial(records.check, claim, quick, exported),
        "splits": partial(splits.check, claim, quick),
        **again.checks(claim, quick),
        "replay": partial(replay.check, claim, quick),
        "code": partial(code.check, claim, quick),
    }


def record(claim: Claim, quick: bool, findings: list[Finding]) -> Audit:
    """Return the record of an audit that ends now."""
    return Audit(
        format=Audit.FORMAT,
        run=claim.run,
        stage=claim.stage,
        quick=quick,
        time=time.time(),
        weights=claim.evaluation.weights,
        evaluation=sha256(claim.folder.evaluation),
        findings=[asdict(one) for one in findings],  # type: ignore[misc]
    )
