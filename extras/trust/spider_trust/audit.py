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
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import computed_field

from spider.common.files import sha256
from spider.common.record import Record
from spider.evaluation.result import SECONDS, Number, Result, Row, Table
from spider.verify.claim import Checks, Claim, Finding

#: Details of a check that views show. The file has all.
_SHOWN = 40


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


class Audit(Record):
    """``audit.json``."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "an audit"

    run: str
    stage: str
    quick: bool
    """Whether samples were checked instead of all, without a replay."""
    time: float
    """When the audit ended, in seconds since 1970."""
    weights: str
    """Digest of the weights whose score was checked."""
    evaluation: str
    """SHA-256 of the evaluation that was checked."""
    findings: list[Finding]

    @classmethod
    def of(cls, claim: Claim, quick: bool, findings: list[Finding]) -> Audit:
        """Return the record of an audit that ends now."""
        return cls(
            format=cls.FORMAT,
            run=claim.run,
            stage=claim.stage,
            quick=quick,
            time=time.time(),
            weights=claim.evaluation.weights,
            evaluation=sha256(claim.folder.evaluation),
            findings=findings,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def results(self) -> dict[str, Result]:
        """Return the badge of the score, and the checks as a table."""
        names = {
            status: ", ".join(one.check for one in self.findings if one.status == status)
            for status in ("failed", "passed", "skipped")
        }
        state = next((status for status, own in names.items() if own), "skipped")
        checks = "; ".join(
            own if status == state else f"{status} {own}" for status, own in names.items() if own
        )
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.time))
        of = f"weights {self.weights}, evaluation {self.evaluation[:16]}"
        badge = Row(
            name="audit",
            label="audit",
            value=None,
            text=state,
            column=True,
            tone="good" if state == "passed" else "bad",
            note=f"{checks} ({'quick, ' if self.quick else ''}{when}, of {of})",
        )
        rows = [
            Row(
                name=one.check,
                label=one.check,
                value=None,
                text=one.status,
                tone="bad" if one.status == "failed" else "",
                columns={
                    "reason": Number(value=None, text="; ".join([one.reason, *one.details[:_SHOWN]])),
                    "time": Number(value=one.seconds, unit=SECONDS),
                },
            )
            for one in self.findings
        ]
        counts: dict[str, float] = {
            f"audit/{status}": sum(one.status == status for one in self.findings) for status in names
        }
        table = Table(title="Checks of the audit", head="check", value="outcome", rows=rows)
        return {"audit": Result(title="Audit", rows=[badge], metrics=counts, figures=[table])}
