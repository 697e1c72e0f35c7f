"""Start a process beside a workflow, such as the one that keeps MLflow up to date."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REMEDY = "`spider track sync` sends what is missing"


class Follower:
    """A process that repeats a command until `stop`.

    Args:
        log: File for its output.
        words: Words of `spider`, such as ``track sync``. The option ``--follow`` is added.
        lacking: What a warning says if the process has failed.
        remedy: What a warning recommends.
        timeout: Seconds to wait for the end of the process, which then continues alone. None: any time.
    """

    def __init__(
        self, log: Path, words: Sequence[object], lacking: str, remedy: str, timeout: float | None
    ) -> None:
        self.log, self.lacking, self.remedy, self.timeout = log, lacking, remedy, timeout
        self._words = [*map(str, words), "--follow"]
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
            print(f"Warning: {self.lacking}: {error}; {self.remedy}", file=sys.stderr)

    def stop(self) -> None:
        """Make the process send the rest and end.

        If that takes too long, it continues alone, and a line names the remedy.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.communicate(b"x", self.timeout)
        except subprocess.TimeoutExpired:
            print(
                f"Warning: {self.lacking} yet, and it is still sent; if that fails, {self.remedy}",
                file=sys.stderr,
            )
            return
        if process.returncode:
            lines = self.log.read_text(errors="replace").splitlines() or [f"exit code {process.returncode}"]
            print(f"Warning: {self.lacking}: {lines[-1]}; {self.remedy}", file=sys.stderr)
