"""Define ``audit.json``: what each check of a score found."""

from __future__ import annotations

import time
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, computed_field

from spider.audit import SCORED_AGAIN
from spider.evaluation.result import SECONDS, Number, Result, Row, Table
from spider.record import Record

#: Most details of a check that views show. The file has all.
_SHOWN = 40


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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def results(self) -> dict[str, Result]:
        """Return the badge of the score, and the checks as a table."""
        state = "passed" if self.passed else "failed"
        if self.passed and not self.count("passed"):
            state = "skipped"
        names = {
            status: ", ".join(one.check for one in self.findings if one.status == status)
            for status in ("failed", "passed", "skipped")
        }
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
        counts: dict[str, float] = {f"audit/{status}": self.count(status) for status in names}
        table = Table(title="Checks of the audit", head="check", value="outcome", rows=rows)
        return {"audit": Result(title="Audit", rows=[badge], metrics=counts, figures=[table])}
