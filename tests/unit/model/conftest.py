"""Fixtures for tests of the model: one thread, a very small model, a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from small import build

from spider.model.spider.model import Spider
from spider.tokens import BYTES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make() -> Callable[..., Spider]:
    """Return a function that builds the small model with changes."""
    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    """Return two windows of 40 ids; in the first a document starts in the middle."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(97, 123, (2, 40), generator=generator)
    tokens_BT[torch.rand(2, 40, generator=generator) < 0.2] = 32
    tokens_BT[0, 19], tokens_BT[0, 20] = BYTES.eos, BYTES.bos
    tokens_BT[1, 0] = BYTES.bos
    return tokens_BT
