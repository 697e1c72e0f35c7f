"""Programs from Debian that tests need and pip does not have.

Where a program is missing the test skips, and a line at the end of the run names it (conftest.py). With
SPIDER_TEST_INSTALL=1, which `.ci/run` sets, root installs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

ALLOWED = "SPIDER_TEST_INSTALL"
LEFT_OUT = "NOT INSTALLED: "


def need(packages: dict[str, str]) -> None:
    """Install or require packages: ``{"munge": "/usr/sbin/munged"}``, each with a file that it brings.

    The first test that needs a package installs it. A lock keeps two test processes out of apt.
    """
    with FileLock("/tmp/spider-tests-apt.lock", mode=0o666):
        missing = [package for package, program in packages.items() if not Path(program).exists()]
        if not missing:
            return
        if os.environ.get(ALLOWED, "") in ("", "0") or os.geteuid() or not shutil.which("apt-get"):
            pytest.skip(LEFT_OUT + " ".join(missing))
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", "-q", *command], env=environment, capture_output=True, text=True, timeout=500
            )
        if done.returncode:
            pytest.skip(f"NOT RUN: apt-get cannot install {' '.join(missing)}: {done.stderr.strip()[-300:]}")


def left_out(reasons: list[str]) -> str | None:
    """Return a line about the tests that skipped without their packages, from the reasons of all skips."""
    wanted = [reason.partition(LEFT_OUT)[2].split() for reason in reasons if LEFT_OUT in reason]
    if not wanted:
        return None
    names = " ".join(sorted({name for names in wanted for name in names}))
    return (
        f"left out: {len(wanted)} tests, without {names}; to run them: `sudo apt-get install {names}`, "
        f"or as root `{ALLOWED}=1 make test`, which installs that"
    )
