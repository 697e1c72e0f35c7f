"""A very small Spider with every part on, and ways to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small import small_config

from spider.model import Spider, build_model
from spider.vocab import BOS, EOS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make() -> Callable[..., Spider]:
    """Build the small model with changes; ``busy`` (default) moves every weight off its neutral start."""

    def build(*, busy: bool = True, seed: int = 0, **changes: Any) -> Spider:
        torch.manual_seed(seed)
        model = build_model(small_config(**changes))
        if busy:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.2 * torch.randn_like(parameter)
        return model

    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two windows of 40 ids; the first has a document start in its middle."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(97, 123, (2, 40), generator=generator)
    tokens_BT[torch.rand(2, 40, generator=generator) < 0.2] = 32
    tokens_BT[0, 19], tokens_BT[0, 20] = EOS, BOS
    tokens_BT[1, 0] = BOS
    return tokens_BT
