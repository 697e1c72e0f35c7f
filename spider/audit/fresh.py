"""Run the checks that score again (score, distribution, causality) in one process of their own.

The process is forked before this one reads the text, and it opens the checkpoint and the text itself. So it
shares only the imported modules, and other checks run beside it. Before it reads the text it forks a second
process, which only ever gets prefixes of the text (`spider.audit.scoring.Predictor`).
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from spider.audit.claim import Claim
from spider.audit.record import Finding, alike

if TYPE_CHECKING:
    from spider.evaluation.records import Evaluation


def begin(claim: Claim, quick: bool) -> None:
    """Begin to score a claim again in its process, if that has not begun yet."""
    if quick in claim.scored_again:
        return
    try:
        lacking = missing(claim, claim.evaluation)
    except ValueError as error:
        found = alike("failed", f"the evaluation cannot be read: {error}")
    else:
        if not lacking:
            claim.scored_again[quick] = _forked(claim, quick)
            return
        found = alike("skipped", f"the score cannot be computed again, because {lacking[0]} is missing")
    claim.scored_again[quick] = lambda: found


def finding(check: str, claim: Claim, quick: bool) -> Finding:
    """Return the finding of one of the `SCORED_AGAIN`; the process runs once for a claim."""
    begin(claim, quick)
    return claim.scored_again[quick]()[check]


def _forked(claim: Claim, quick: bool) -> Callable[[], Mapping[str, Finding]]:
    """Fork the process; return a function that waits for its findings."""
    from spider.audit import again  # imported before the fork, so that the process need not import torch

    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=again.send, args=(claim, quick, sending, receiving))
    process.start()
    sending.close()

    @functools.cache
    def findings() -> Mapping[str, Finding]:
        try:
            found: Mapping[str, Finding] = receiving.recv()
        except EOFError:
            process.join()
            return alike("skipped", f"the process that scores again ended with {process.exitcode}")
        return found

    return findings


def missing(claim: Claim, evaluation: Evaluation) -> list[Path]:
    """Return the files that scoring again needs and that are not there."""
    needed = [claim.folder.path / evaluation.checkpoint, claim.results.shards(claim.held_out)]
    return [path for path in needed if not path.exists()]
