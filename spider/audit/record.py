"""Define ``audit.json``: what each check of a score found."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from spider.record import Record


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


class Audit(Record):
    """``audit.json``."""

    WHAT: ClassVar[str] = "an audit"
    REMEDY: ClassVar[str] = "audit the stage again (`spider audit`)"

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
