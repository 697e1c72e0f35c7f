"""Show on the terminal what a workflow does. This is Snakemake's logger plugin ``spider`` (profiles/default).

On a terminal, the last lines show the jobs that run, how far each is, and the time that is left. In a pipe, a
line is printed when a job starts, when it ends, and every 30 seconds while it runs. Warnings and errors of
jobs are printed once. ``--dry-run``, ``--verbose``, ``--printshellcmds`` and ``--quiet`` leave the output to
Snakemake.

The display reads the logs of the jobs, which therefore run at the same speed as without it. The newest line
of a log says what the job does. The time that is left of a training comes from lines such as
``step 120/340``, and the longest of these times is a lower bound for all jobs.

Snakemake passes its messages on in a thread, and another thread reads the logs. Each holds the lock of the
handler.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from spider.common.formatting import OUTPUT, duration, printable

#: Seconds between two looks at the logs, and between two lines of a running job in a pipe.
LOOK = 0.5
REPEAT = 30.0

#: Most lines of a failed job's log that are shown.
REASON = 20

_LINE = re.compile(r"^\d\d:\d\d:\d\d [a-z -]+: (?P<warning>warning: )?(?P<text>.*)")
_STEP = re.compile(r"step (\d+)/(\d+)")
_ERROR = re.compile(r"(?<!\w)(error|warning):|^Traceback")
#: Messages of Snakemake that are shown although they are neither a warning nor about a job.
_KEPT = ("Nothing to be done", "Trying to restart", "Terminating processes", "Will exit after")
#: Messages about a failure that the plugin reports itself.
_REPEATED = ("CalledProcessError", "a job execution failed", "At least one job did not complete")

#: The handler that prints, which is the last one.
_active: list[LogHandler] = []


def close() -> None:
    """End the display, after it has shown all that was logged before."""
    if not _active:
        return
    for handler in logging.getLogger("snakemake.logging").handlers:
        if isinstance(handler, QueueHandler) and isinstance(handler.queue, Queue):
            handler.queue.join()
    _active[-1].close()


@dataclass
class _Job:
    """A job that runs, and what its log says."""

    label: str
    log: Path | None
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    printed: float = field(default_factory=time.monotonic)
    doing: str = ""
    """The newest line of the log."""
    newest: tuple[float, int, int] | None = None
    """The time of the newest line with a step, the step, and the last one."""
    first: tuple[float, int, int] | None = None
    """The same of the first such line."""
    _read: int = 0

    @classmethod
    def of(cls, record: logging.LogRecord) -> _Job:
        """Return the job of a message of Snakemake: its rule, and its wildcards except digests."""
        said = vars(record)
        names = [str(value).strip("/") for value in (said["wildcards"] or {}).values()]
        names = [name for name in names if name and not re.fullmatch("[0-9a-f]{16}", name)]
        logs = said["log"] or []
        return cls(
            label=" ".join([said["rule_name"], *["/".join(names)] * bool(names)]),
            log=Path(logs[0]) if logs else None,
        )

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def follow(self) -> list[str]:
        """Read what the log has got since the last call; return the warnings in it."""
        warnings = []
        for line in self._new_lines():
            if match := _LINE.match(line):
                if match["warning"]:
                    warnings.append(match["text"])
                else:
                    self._note(match["text"])
        return warnings

    def _new_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            # Until the job begins, this is the log of an earlier attempt.
            if self.log is None or self.log.stat().st_mtime < self.began_at - 1:
                return []
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self._read if self._read <= size else 0)
                whole, _, rest = file.read().rpartition(b"\n")
                self._read = file.tell() - len(rest)
                return whole.decode(errors="replace").splitlines()
        return []

    def _note(self, text: str) -> None:
        """Take what is done from a line of the log."""
        if text.startswith("checkpoint saved"):  # beside the steps
            return
        head, *groups = printable(text).split(" | ")
        bits = next((group.split("  ")[0] for group in groups if group.startswith("bpb")), None)
        self.doing = f"{head}, {bits}" if bits else head
        if match := _STEP.match(head):
            self.newest = (time.monotonic(), int(match[1]), int(match[2]))
            self.first = self.first or self.newest

    def left(self) -> float:
        """Return the seconds that are left of the steps; 0 while their speed is not known."""
        if self.newest is None or self.first is None or self.newest[1] <= self.first[1]:
            return 0.0
        (began, before, _), (now, done, total) = self.first, self.newest
        return max(0.0, (total - done) * (now - began) / (done - before) - (time.monotonic() - now))

    def remaining(self) -> str:
        """Return the time that is left, or nothing while it is not known."""
        left = self.left()
        return f"{duration(left)} left" if left >= 1 else ""


class LogHandler(LogHandlerBase):  # type: ignore[misc]
    """Receive the messages of Snakemake, and print the jobs."""

    writes_to_file = False
    has_filter = True
    has_formatter = False
    needs_rulegraph = False

    @property
    def writes_to_stream(self) -> bool:
        """Whether this handler prints. Snakemake prints its own messages where it does not."""
        asked = self.common_settings
        own = asked.dryrun or asked.verbose or asked.debug_dag or asked.printshellcmds
        return not own and not {"ALL", "PROGRESS", "HOST"} & {one.name for one in asked.quiet or ()}

    def __post_init__(self) -> None:
        self.jobs: dict[int, _Job] = {}
        self.done = self.total = self.failed = 0
        self.began = time.monotonic()
        self.live: Live | None = None
        self.started = False
        self.closed = threading.Event()
        if self.writes_to_stream:
            os.environ[OUTPUT] = "log"
            self.console = Console(stderr=True, no_color=self.common_settings.nocolor or None)
            _active.append(self)
            atexit.register(self.close)

    # ------------------------------------------------------------------------------ messages of Snakemake

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message. A bug of this display must not stop the workflow."""
        if not self.writes_to_stream:
            return
        try:
            self._take(record, getattr(record, "event", None))
        except Exception:
            self.handleError(record)

    def _take(self, record: logging.LogRecord, event: LogEvent | None) -> None:
        said = vars(record)
        if event == LogEvent.WORKFLOW_STARTED:
            self.started = True
        elif event == LogEvent.RUN_INFO:
            self._begin(said["stats"]["total"])
        elif event == LogEvent.JOB_INFO:
            self._start(record)
        elif event == LogEvent.JOB_FINISHED:
            self._end(said["job_id"])
        elif event == LogEvent.JOB_ERROR:
            self._fail(said["jobid"], said["log"], said["shellcmd"])
        elif event == LogEvent.PROGRESS:
            self.done, self.total = said["done"], said["total"]
        elif event in (None, LogEvent.ERROR):
            self._pass_on(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        """Print a message of Snakemake that is about no job, unless it is of no use to a reader."""
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            shown = not (self.total and any(part in text for part in _REPEATED))
        else:
            shown = text.startswith(_KEPT) or (not self.started and "shared filesystem" not in text)
        if shown and text:
            self._print(text, "red" if record.levelno >= logging.ERROR else "")

    def _begin(self, total: int) -> None:
        self.total = total
        self.began = time.monotonic()
        if self.console.is_terminal and sys.stderr.isatty() and not self.console.is_dumb_terminal:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
            self.console.show_cursor()  # A killed Snakemake could not show a hidden one again.
        else:
            self._print(f"{total} job{'s' * (total != 1)}")
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def _start(self, record: logging.LogRecord) -> None:
        said = vars(record)
        if said["output"]:  # A target has none.
            self.jobs[said["jobid"]] = job = _Job.of(record)
            self._line("start", job)

    def _end(self, number: int) -> None:
        self.done += 1
        if job := self.jobs.pop(number, None):
            self._show_warnings(job)
            self._line("done", job, duration(job.seconds()))

    def _fail(self, number: int, logs: list[str], command: str) -> None:
        """Print why a job failed: the end of its log, and where the rest is."""
        self.failed += 1
        job = self.jobs.pop(number, None)
        if job is None:
            return
        self._print(f"{job.label} failed after {duration(job.seconds())}:", "bold red")
        lines = list(_reason(job.log)) if job.log else []
        for line in lines or [f"It wrote no log. Its command: {command}"]:
            self._print(f"  {printable(line)}")
        if lines:
            self._print(f"  The whole log: {job.log}")

    # ------------------------------------------------------------------------------------------- display

    def _watch(self) -> None:
        """Read the logs again and again, and show what is new."""
        while not self.closed.wait(LOOK):
            with self.lock:  # type: ignore[union-attr]
                if self.closed.is_set():
                    return
                self._look()

    def _look(self) -> None:
        for job in list(self.jobs.values()):
            self._show_warnings(job)
            if not self.live and time.monotonic() - job.printed >= REPEAT:
                job.printed = time.monotonic()
                self._line("runs", job, duration(job.seconds()), job.doing, job.remaining())
        if self.live:
            self.live.update(self._region(), refresh=True)

    def _show_warnings(self, job: _Job) -> None:
        for warning in job.follow():
            self._print(f"{job.label}: {printable(warning)}", "yellow")

    def _region(self) -> Table:
        """Return the last lines of the terminal."""
        bar = ProgressBar(total=max(1, self.total), completed=self.done, width=20)
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_column(no_wrap=True)
        head.add_column(no_wrap=True, overflow="ellipsis")
        passed = f"{self.done} of {self.total} jobs done, {duration(time.monotonic() - self.began)}"
        left = max((job.left() for job in self.jobs.values()), default=0.0)
        passed += f", at least {duration(left)} left" if left >= 1 else ""
        head.add_row(bar, Text(passed, style="bold"))
        rows = Table.grid(padding=(0, 2, 0, 0), expand=True)
        rows.add_column(no_wrap=True, overflow="ellipsis", min_width=20, max_width=34)
        rows.add_column(no_wrap=True, justify="right", min_width=10)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        rows.add_column(no_wrap=True, justify="right")
        for job in self.jobs.values():
            seconds = Text(duration(job.seconds()), style="dim")
            rows.add_row(Text(job.label), seconds, Text(job.doing), Text(job.remaining()))
        region = Table.grid()
        region.add_row(head)
        region.add_row(rows)
        return region

    def _line(self, what: str, job: _Job, *more: str) -> None:
        """Print a line about a job in a pipe."""
        if not self.live:
            words = ", ".join(filter(None, [job.label, *more]))
            self._print(f"{time.strftime('%H:%M:%S')} [{self.done}/{self.total}] {what} {words}")

    def _print(self, text: str, style: str = "") -> None:
        """Print a text above the region of the jobs."""
        if self.console.is_terminal:
            self.console.print(Text(text, style=style), soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the region, and print how many jobs were done."""
        with self.lock:  # type: ignore[union-attr]
            if self.closed.is_set():
                return
            self.closed.set()
            if self.live:
                self.live.stop()
                self.live = None
            if self.total:
                failed = f", {self.failed} failed" if self.failed else ""
                passed = duration(time.monotonic() - self.began)
                self._print(f"{self.done} of {self.total} jobs done in {passed}{failed}")
        super().close()


def _reason(log: Path) -> Iterator[str]:
    """Yield the end of a failed job's log, from its last error on."""
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", errors="replace").splitlines()
        errors = [i for i, line in enumerate(lines) if _ERROR.search(line)]
        yield from lines[errors[-1] if errors else -REASON // 2 :][-REASON:]
