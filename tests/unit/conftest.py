"""Python in a process of its own, for tests that kill it or look at what it imported; a GPU's settings."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run a piece of Python in a forked process; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [python(), "-c", code, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def gpu_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts of `benchmarks/gpu` importable, and the modules that they share."""
    for folder in ("benchmarks", "benchmarks/gpu"):
        monkeypatch.syspath_prepend(ROOT / folder)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Restore torch's switches of TF32 afterwards."""
    import torch

    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed
