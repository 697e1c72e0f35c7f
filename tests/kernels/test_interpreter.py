"""Run the tests of every kernel in Triton's interpreter, in a separate process (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter's own process")
def test_kernels_give_what_their_twins_give():
    pytest.importorskip("triton", reason="NO TRITON: no kernel was tested")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "interpreter",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            Path(__file__).parent,
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
