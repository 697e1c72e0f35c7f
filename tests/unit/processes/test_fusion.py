"""Test that the compiler uses the order of fusions chosen here, also after it compiled, and that keys of its
cache tell. What it fuses shows on a GPU alone (tests/gpu/test_kernels.py)."""

from __future__ import annotations

import subprocess

import pytest

from tests.forkserver import python

CODE = """
import torch
from torch._inductor import config
from torch._inductor.virtualized import V
from spider.processes.fusion import Choices, fuse_mixed_orders_first

double = torch.compile(lambda x: 2 * x.sin())
double(torch.ones(3))
assert type(V.choices) is not Choices
before = config.save_config_portable()
fuse_mixed_orders_first()
assert type(V.choices) is Choices
assert config.save_config_portable() != before
torch.compiler.reset()
x = torch.randn(5, 7, requires_grad=True)
rms = lambda x: torch.nn.functional.rms_norm(x, (7,)).square().sum()
got, want = (torch.autograd.grad(f(x), x)[0] for f in (torch.compile(rms), rms))
torch.testing.assert_close(got, want)
"""


@pytest.mark.inductor
def test_choices_hold_after_a_compilation_and_are_part_of_the_key():
    subprocess.run([python(), "-c", CODE], check=True)
