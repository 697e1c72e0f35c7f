"""Examine a claim in the process that `spider.audit.fresh` forks."""

from __future__ import annotations

import logging
import os
import time
from multiprocessing.connection import Connection

import torch

from spider.audit import SCORED_AGAIN, causality, distribution, score
from spider.audit.claim import Claim
from spider.audit.record import Finding, alike
from spider.audit.scoring import Predictor, Rescored, reason_not_here


def send(claim: Claim, quick: bool, sending: Connection, receiving: Connection) -> None:
    """Send the findings, and end the process."""
    receiving.close()
    logging.getLogger("spider").setLevel(logging.ERROR)  # the lines about kernels would come twice
    try:
        found = _examined(claim, quick)
    except Exception as error:  # the message must reach the user, whatever it is
        reason = f"the process that scores again ended with {type(error).__name__}: {error}"
        found = alike("skipped", reason.splitlines()[0])
    sending.send(found)
    os._exit(0)  # neither the forked process nor torch's threads need to end in order


def _examined(claim: Claim, quick: bool) -> dict[str, Finding]:
    began = time.perf_counter()
    torch.set_num_threads(claim.config.run(claim.run).resources.threads)
    predictor = Predictor(claim)
    if reason := reason_not_here(claim):
        return alike("skipped", reason)
    try:
        rescored = Rescored(claim, quick)
    except ValueError as error:
        return alike("failed", f"the score cannot be computed again: {error}")
    found = {}
    examined = {
        "score": lambda: score.examine(rescored, predictor),
        "distribution": lambda: distribution.examine(rescored),
        "causality": lambda: causality.examine(rescored),
    }
    for check in SCORED_AGAIN:
        problems, passed = examined[check]()
        reason = problems[0] if problems else passed
        status = "failed" if problems else "passed"
        seconds = time.perf_counter() - began
        found[check] = Finding.model_validate(
            {"check": check, "status": status, "reason": reason, "details": problems, "seconds": seconds}
        )
        began = time.perf_counter()
    return found
