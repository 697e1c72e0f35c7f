"""Test the choice of implementation, and the package without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kernels import switch
from kernels.get_fused_mapping import get_fused_mapping_torch
from kernels.route import route_torch

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kernels.expand_reduce import expand_to_fused
from kernels.switch import choose
assert choose("auto") == ("torch", "triton is not installed")
rows = expand_to_fused(torch.ones(1, 2), torch.tensor([[1]]), torch.tensor([-1, 0]))
assert rows.tolist() == [[0, 0], [1, 1]]
choose("triton")
"""


def test_without_triton_the_twins_run_and_kernels_are_refused():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert run.stderr.endswith(
        "ValueError: kernels: triton cannot run here: triton is not installed; choose auto or torch\n"
    )


@pytest.mark.interpreter
def test_float64_takes_the_twin():
    assert switch.use_triton(torch.zeros(1)) and not switch.use_triton(torch.zeros(1, dtype=torch.float64))


def test_twins_never_wait_for_the_device():
    with FakeTensorMode():  # raises if a value is read
        routing = route_torch(torch.zeros(5, 3), None, 2, valid_N=torch.ones(5, dtype=torch.bool))
        mapping = get_fused_mapping_torch(routing.chosen_NK, 3, 16)
    assert mapping.pos_to_expert_P.shape == (48,)


def test_sizes_of_a_compiler_are_checked():
    modes = FakeTensorMode(shape_env=ShapeEnv())
    w_NK = modes.from_tensor(torch.zeros(5, 3), symbolic_context=None)
    assert isinstance(w_NK.shape[0], torch.SymInt)
    switch.check_shapes("op", w_NK=w_NK, chosen_NK=w_NK)
    with pytest.raises(ValueError, match="op: w_NKE must be"):
        switch.check_shapes("op", w_NKE=w_NK)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_choice_is_made_with_its_reason_or_refused(monkeypatch):
    monkeypatch.setattr(switch, "triton", object())
    assert switch.choose("auto") == ("torch", "there is no CUDA device")
    assert switch.choose("torch") == ("torch", "configured")
    with pytest.raises(ValueError, match="there is no CUDA device"):
        switch.choose("triton")
