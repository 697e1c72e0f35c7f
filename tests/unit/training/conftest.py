"""Fixtures of `tests.unit.small_training`, and the graphs of compiled models."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from spider.training import build
from spider.training.compilation import compile_forward
from tests.unit.small_training import *  # noqa: F403 (fixtures)


@pytest.fixture
def graphs(monkeypatch) -> Callable[[], set[str]]:
    """Capture the graphs that warm-up and training compile, and run them uncompiled; return a function that
    returns those captured since its last call."""
    found: set[str] = set()

    def backend(graph, inputs):
        shapes = [(tuple(x.shape), x.stride(), x.dtype) for x in inputs if isinstance(x, torch.Tensor)]
        found.add(f"{graph.code} {shapes}")
        return graph.forward

    def captured() -> set[str]:
        torch._dynamo.reset()
        now = set(found)
        found.clear()
        return now

    monkeypatch.setattr(build, "compile_forward", partial(compile_forward, backend=backend))
    # Training sets them, so the fixture's end restores them.
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    captured()
    return captured
