"""The kernels on a GPU: each beside its torch version, their layer, and compute-sanitizer's findings.

Arguments and tolerances are those of ``tests/kernels``, where the same pairs run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import switch
from kernels.expand_reduce import expand_to_fused, reduce_fused
from kernels.get_fused_mapping import get_fused_mapping
from spider.model.spider.config import MoEConfig
from spider.model.spider.moe import MoE
from tests.kernels.twins import pairs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU: no kernel ran on a device, nothing of this file was tested"
)

DEVICE = "cuda"
PAIRS = pairs()


@pytest.fixture(autouse=True)
def kernels():
    assert switch.choose("triton").implementation == "triton"
    yield
    switch.choose("auto")


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=25)
@given(data=st.data())
def test_kernel_equals_its_torch_version(name, data):
    PAIRS[name].check(data.draw(PAIRS[name].cases), DEVICE)


@pytest.mark.parametrize("name", PAIRS)
def test_kernel_equals_its_torch_version_at_the_edges(name):
    for arguments in PAIRS[name].examples:
        PAIRS[name].check(arguments, DEVICE)


def test_kernel_reaches_rows_beyond_two_to_the_31_elements():
    """Doubling a row is exact in bfloat16, so all of it can be compared."""
    N, D, K = 540_000, 2048, 2
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("NOT TESTED: offsets beyond 2^31 elements take 20 GB of GPU memory")
    x_ND = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16)
    chosen_NK = torch.stack([torch.arange(N, device=DEVICE) % 3, torch.full((N,), 3, device=DEVICE)], dim=1)
    mapping = get_fused_mapping(chosen_NK, 4, 16)
    places = mapping.token_to_pos_NK, mapping.pos_to_expert_P
    x_PD = expand_to_fused(x_ND, *places)
    assert x_PD.numel() > 2**31
    assert torch.equal(reduce_fused(x_PD, None, *places), K * x_ND)


class Layer(NamedTuple):
    """The model's layer of experts with one batch."""

    moe: MoE
    x_BLD: Tensor
    valid_BL: Tensor

    def results(self, run: Callable | None = None) -> list[Tensor]:
        """Return the output, and the gradients of input and weights for a loss that uses every output."""
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.x_BLD.dtype != torch.float64):
            y_BLD, stats = (self.moe if run is None else run)(self.x_BLD, self.valid_BL)
        ramp_D = torch.linspace(-1, 1, y_BLD.shape[-1], device=DEVICE, dtype=y_BLD.dtype)
        loss = (y_BLD * ramp_D).sum() + stats.aux + stats.z
        return [y_BLD.detach(), *torch.autograd.grad(loss, [self.x_BLD, *self.moe.parameters()])]

    def refill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.x_BLD.copy_(torch.randn(self.x_BLD.shape, generator=generator))
            self.valid_BL.copy_(torch.rand(self.valid_BL.shape, generator=generator) < 0.9)


def layer(way: str = "grouped") -> Layer:
    """Return a layer of twelve experts, one without tokens; every tenth token is not valid.

    ``way`` is grouped, loop or fp8.
    """
    B, L, D, E = 3, 683, 512, 12
    moe = MoE(D, MoEConfig(experts=E, expert_hidden=160, shared_hidden=64)).to(DEVICE)
    moe.init_weights()
    moe.experts.grouped = way != "loop"
    moe.experts.fp8 = way == "fp8"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moe.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        moe.balance_bias[5] = -2
    case = Layer(
        moe,
        torch.zeros(B, L, D, device=DEVICE, requires_grad=True),
        torch.zeros(B, L, device=DEVICE, dtype=torch.bool),
    )
    case.refill(seed=1)
    return case


def fill_free_memory_with_nan() -> None:
    """Fill free blocks of two sizes, so that the next allocation starts with NaN."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), torch.nan, device=DEVICE) for size in [2**28, *[2**17] * 256]]
    torch.cuda.synchronize()
    del blocks


def agree(got: list[Tensor], want: list[Tensor], most: float) -> None:
    """Assert that each tensor differs by less than a share of its norm."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        distance = ((a.double() - b.double()).norm() / b.double().norm()).item()
        assert distance < most, f"tensor {i} is off by {distance:.2%} of its norm"


@pytest.mark.parametrize("way, most", [("grouped", 0.02), ("loop", 0.02), ("fp8", 0.15)])
def test_layer_of_kernels_equals_all_experts_on_all_tokens_in_float64(way, most):
    case = layer(way)
    exact = Layer(
        copy.deepcopy(case.moe).double(), case.x_BLD.detach().double().requires_grad_(), case.valid_BL
    )
    exact.moe.experts.fp8 = False
    fill_free_memory_with_nan()
    agree(case.results(), exact.results(), most)


#: Largest difference of two ways in one arithmetic. fp8 may round a difference in the last bit up.
SAME_ARITHMETIC = pytest.mark.parametrize("way, most", [("grouped", 0.01), ("fp8", 0.05)])


@SAME_ARITHMETIC
def test_layer_compiles_into_one_graph(way, most):
    torch.compiler.reset()
    case = layer(way)
    compiled = torch.compile(case.moe, fullgraph=True)
    for seed in range(2):
        case.refill(seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = case.results(compiled)
        agree(got, case.results(), most)


def test_layer_never_waits_for_the_device():
    grouped, fp8, loop = layer(), layer("fp8"), layer("loop")
    for case in (grouped, fp8, loop):
        case.results()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped.results()
        fp8.results()
        with pytest.raises(RuntimeError, match="synchronizing"):
            loop.results()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@SAME_ARITHMETIC
def test_layer_runs_inside_a_cuda_graph(way, most, compiled):
    torch.compiler.reset()
    case = layer(way)
    run = torch.compile(case.moe, fullgraph=True) if compiled else case.moe
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case.results(run)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.results(run)
    for seed in (2, 3):
        case.refill(seed)
        for tensor in results:
            tensor.fill_(torch.nan)
        graph.replay()
        agree(results, case.results(), most)


EXAMPLES = """
import torch
from kernels.switch import choose
from tests.kernels.twins import run_examples
choose("triton")
print(run_examples("cuda"), "calls")
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("NOT CHECKED: there is no compute-sanitizer on the PATH (it comes with CUDA's toolkit)")
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "77", sys.executable, "-c", EXAMPLES],
        # Each tensor has its own allocation; otherwise an access beyond one would hit its neighbour.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if "Device not supported" in run.stdout:
        pytest.skip("NOT CHECKED: compute-sanitizer does not support this machine's device")
    clean = re.search(r"SUMMARY: 0 (errors|hazards)", run.stdout)
    assert run.returncode == 0 and clean and " calls" in run.stdout, run.stdout[-6000:]
