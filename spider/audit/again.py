"""The process that `spider.audit.fresh` starts: read a claim, examine it, and print the findings as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

from spider.audit import causality, distribution, score
from spider.audit.claim import Claim
from spider.audit.fresh import CHECKS, alike
from spider.audit.record import Finding
from spider.audit.scoring import Predictor, Rescored, reason_not_here
from spider.config.schema import load_config


def _main() -> dict[str, Finding]:
    began = time.perf_counter()
    given = json.load(sys.stdin)
    quick = given.pop("quick")
    claim = Claim(load_config(given.pop("config")), **given)
    if reason := reason_not_here(claim):
        return alike("skipped", reason)
    predictor = Predictor(claim)
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
    for check in CHECKS:
        problems, passed = examined[check]()
        reason = problems[0] if problems else passed
        status = "failed" if problems else "passed"
        seconds = time.perf_counter() - began
        found[check] = Finding.model_validate(
            {"check": check, "status": status, "reason": reason, "details": problems, "seconds": seconds}
        )
        began = time.perf_counter()
    return found


if __name__ == "__main__":
    printed = {check: one.model_dump() for check, one in _main().items()}
    print(json.dumps(printed), flush=True)
    os._exit(0)  # neither the forked process nor torch's threads need to end in order
