"""Start the process that keeps MLflow up to date while a workflow runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REMEDY = "`spider track sync` sends what is missing"


class Follower:
    """A process that repeats ``spider track sync`` until `stop`.

    Args:
        words: Options of `spider` that name the configuration.
    """

    def __init__(self, root: Path, words: Sequence[object]) -> None:
        self.log = root / "tracking" / "sync.log"
        self._words = [*map(str, words), "track", "sync", "--follow"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab") as output:
                # In its own session Ctrl-C does not end it before the records of the jobs are complete.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "spider.cli", *self._words],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            print(f"Warning: cannot send to MLflow ({error}); {REMEDY}", file=sys.stderr)

    def stop(self, timeout: float = 20.0) -> None:
        """Make the process send the rest and end.

        If that takes too long, it continues alone for up to a minute, and a line names the remedy.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.communicate(b"x", timeout)
        except subprocess.TimeoutExpired:
            reason = "the tracking store is slow or cannot be reached, still sending; if that fails,"
            print(f"Warning: {reason} {REMEDY}", file=sys.stderr)
            return
        if process.returncode:
            lines = self.log.read_text(errors="replace").splitlines() or [f"exit code {process.returncode}"]
            print(f"Warning: the tracking store did not get all records: {lines[-1]}", file=sys.stderr)
