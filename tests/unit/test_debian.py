"""Tests install nothing on a machine that was not offered, and say what they left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
from tests.debian import need

def test_one():
    need({"a-database": "/nowhere/a", "sh": "/bin/sh"})

def test_two():
    need({"a-browser": "/nowhere/b", "a-database": "/nowhere/a"})
"""


def run(folder, allowed):
    """What pytest says of two tests that need packages, and what they asked of apt-get."""
    (folder / "test_needs.py").write_text(TESTS)
    (folder / "apt-get").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n')
    (folder / "apt-get").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SPIDER_TEST_INSTALL": allowed}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml", folder / "test_needs.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    asked = folder / "asked"
    return done.stdout, asked.read_text() if asked.exists() else ""


def test_nothing_is_installed_unasked_and_one_line_says_what_was_left_out(tmp_path):
    said, asked = run(tmp_path, "0")
    assert asked == "" and "2 skipped" in said
    (line,) = [line for line in said.splitlines() if line.startswith("left out:")]
    assert "2 tests" in line and "`sudo apt-get install a-browser a-database`" in line
    assert "SPIDER_TEST_INSTALL=1 make test" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: apt-get installs for root only")
def test_what_is_missing_is_installed_where_that_is_allowed(tmp_path):
    said, asked = run(tmp_path, "1")
    assert "-q install -y --no-install-recommends a-database\n" in asked and "left out" not in said
