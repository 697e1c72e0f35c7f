"""Log how far a long loop is, for its reader and for the terminal (`spider.workflow.progress`)."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

#: Variable of the environment: with the value `log`, a job writes all its output into its log.
OUTPUT = "SPIDER_OUTPUT"

#: Seconds between two lines. A loop that takes less logs none.
EVERY = 5.0


class Pace:
    """Log the part of a loop that is done, such as ``scored 3,000 of 10,000 ids``.

    Args:
        form: Format of the line, with ``{done}`` and ``{total}``.
    """

    def __init__(self, form: str, total: int) -> None:
        self.form = form
        self.total = total
        self.logged = time.monotonic()

    def __call__(self, done: int) -> None:
        """Log a line if the last one is `EVERY` seconds old."""
        now = time.monotonic()
        if now - self.logged >= EVERY:
            self.logged = now
            log.info(self.form.format(done=f"{done:,}", total=f"{self.total:,}"))
