"""Programs that tests run for real and that pip does not have: they are taken from Debian.

A test that needs one asks here. Where it is missing and cannot be installed, the test skips and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock


def need(packages: dict[str, str]) -> None:
    """Have each package's program there: ``{"munge": "/usr/sbin/munged"}``, package to a file that it brings.

    Packages are installed once, whichever test comes first; the lock keeps two test processes out of apt.
    """
    with FileLock("/tmp/spider-tests-apt.lock", mode=0o666):
        missing = [package for package, program in packages.items() if not Path(program).exists()]
        if not missing:
            return
        names = " ".join(missing)
        if os.geteuid() or not shutil.which("apt-get"):
            pytest.skip(f"NOT RUN: {names} is not installed; as root: apt-get install {names}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", "-q", *command], env=environment, capture_output=True, text=True, timeout=500
            )
        if done.returncode:
            pytest.skip(f"NOT RUN: apt-get cannot install {names}: {done.stderr.strip()[-300:]}")
