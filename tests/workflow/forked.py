"""Run Snakemake in a process that is forked after its imports, which take most of the time of a plan.

The standard library's fork server imports Snakemake and Spider's configuration once. Each run is a process of
its own, with its own folder, environment and output. Tests that kill Snakemake, or that look at how it
starts, use `subprocess` instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

PRELOADED = ["snakemake.cli", "spider.config", "spider.tracking", "spider.requests", "spider.report.terminal"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


def _run(command: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    """Be the process that ``command`` would start."""
    os.setsid()
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = command
    status: object = 1
    try:
        from snakemake.cli import main

        main()
        status = 0
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status or 0))  # type: ignore[call-overload]


def run_snakemake(
    command: list[str], folder: Path, environment: dict[str, str], patience: float
) -> tuple[str, int]:
    """Return what a Snakemake command printed, and its exit status.

    Raises:
        TimeoutError: it did not end in ``patience`` seconds, and was killed with all that it started.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        process = _CONTEXT.Process(target=_run, args=(command, str(folder), environment, output.name))
        process.start()
        process.join(patience)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            raise TimeoutError(f"{command}: still running after {patience:.0f} s:\n{output.read()}")
        return output.read(), process.exitcode
