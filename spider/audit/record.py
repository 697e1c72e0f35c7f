"""Define ``audit.json``: what each check of a score found."""

from __future__ import annotations

import time
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from spider.audit import SCORED_AGAIN
from spider.files import sha256
from spider.record import Record
from spider.results import StageFolder


class Finding(BaseModel):
    """The result of one check."""

    model_config = ConfigDict(frozen=True)

    check: str
    """Name of the check (`spider.audit.CHECKS`)."""
    status: Literal["passed", "failed", "skipped"]
    """``skipped``: it cannot be done here, and the reason says what is missing."""
    reason: str
    """One sentence: what was checked, what is wrong, or what is missing."""
    details: list[str] = []
    """Documents, files or positions that are concerned."""
    seconds: float = 0.0


def alike(status: Literal["passed", "failed", "skipped"], reason: str) -> dict[str, Finding]:
    """Return the same finding for each check of `SCORED_AGAIN`."""
    return {check: Finding(check=check, status=status, reason=reason) for check in SCORED_AGAIN}


class Audit(Record):
    """``audit.json``."""

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

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
        return all(one.status != "failed" for one in self.findings)

    def count(self, status: str) -> int:
        """Return how many checks ended in this way."""
        return sum(one.status == status for one in self.findings)


class Badge(BaseModel):
    """The part of an audit that tables and pages show."""

    model_config = ConfigDict(frozen=True)

    state: Literal["passed", "failed", "skipped", "stale"]
    """``stale``: the audit is of another evaluation than the one that is there now."""
    text: str
    """It names the checks, the time, and the digests of what was audited."""
    findings: list[Finding]

    @classmethod
    def of(cls, folder: StageFolder) -> Badge | None:
        """Return the badge of a stage or of its compressed model; None if it was not audited."""
        if not folder.audit.is_file():
            return None
        audited = Audit.read(folder.audit)
        state: Literal["passed", "failed", "skipped", "stale"] = "passed" if audited.passed else "failed"
        if not audited.count("passed") and audited.passed:
            state = "skipped"
        if not folder.evaluation.is_file() or sha256(folder.evaluation) != audited.evaluation:
            state = "stale"
        names = {
            status: ", ".join(one.check for one in audited.findings if one.status == status)
            for status in ("failed", "passed", "skipped")
        }
        checks = "; ".join(
            own if status == state else f"{status} {own}" for status, own in names.items() if own
        )
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(audited.time))
        of = f"weights {audited.weights}, evaluation {audited.evaluation[:16]}"
        text = f"{checks} ({'quick, ' if audited.quick else ''}{when}, of {of})"
        if state == "stale":
            text += "; the score is of another evaluation now: audit it again"
        return cls(state=state, text=text, findings=audited.findings)
