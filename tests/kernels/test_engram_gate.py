"""The gate against sums in plain Python, its kernels against their twins, and its gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.engram_gate import (
    BACKWARD,
    FLOOR,
    FORWARD,
    ROWS,
    _backward,
    _forward,
    engram_gate,
    engram_gate_backward,
    engram_gate_backward_torch,
    engram_gate_torch,
    sizes,
)
from spider.config import EngramConfig
from spider.model.engram import Engram, Memory

EPS = 1e-5
SHAPES = st.tuples(st.sampled_from([0, 1, 5, ROWS, ROWS + 1]), st.sampled_from([1, 3, 64, 100, 2050]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


class Case(NamedTuple):
    h: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    eps: float = EPS


def case(
    shape: tuple[int, int], dtype: torch.dtype = torch.float32, narrow: torch.dtype | None = None
) -> Case:
    """Random rows; the third state and the fourth key are zero. ``narrow``: dtype of key and value."""
    generator = torch.Generator().manual_seed(shape[1])
    h, key, value = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    h[2:3] = 0
    key[3:4] = 0
    weight = torch.rand(shape[1], generator=generator, dtype=torch.float64) + 0.5
    return Case(h.to(dtype), key.to(narrow or dtype), value.to(narrow or dtype), weight.to(dtype))


def by_hand(made: Case) -> list[list[float]]:
    out, weight = [], made.weight.tolist()
    for h, key, value in zip(*(x.tolist() for x in made[:3]), strict=True):
        rms = math.sqrt(math.fsum(x * x for x in h) / len(h) + made.eps)
        s = math.fsum(k * x / rms * w for k, x, w in zip(key, h, weight, strict=True)) / math.sqrt(len(h))
        signed = math.copysign(math.sqrt(max(abs(s), FLOOR)), s) if s else 0.0
        out.append([v / (1 + math.exp(-signed)) for v in value])
    return out


@settings(max_examples=25, deadline=None)
@given(SHAPES)
def test_values_are_gated(shape):
    made = case(shape, torch.float64)
    want = torch.tensor(by_hand(made), dtype=torch.float64).view(shape)
    torch.testing.assert_close(engram_gate(*made), want)


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of roundings; the interpreter cuts bfloat16 off where torch rounds."""
    assert got.dtype == want.dtype
    rtol = 2**-6 if got.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-4, equal_nan=True)


@pytest.mark.interpreter
@settings(max_examples=25, deadline=None)
@given(SHAPES, DTYPES, DTYPES)
@example((ROWS + 1, 2050), torch.float32, torch.bfloat16)
def test_kernel_gates_as_the_twin_does(shape, dtype, narrow):
    made = case(shape, dtype, narrow)
    # The twin as if in float32: in bfloat16 its own roundings are the larger.
    exact = engram_gate_torch(*(x.float() for x in made[:4]), EPS)
    close(engram_gate(*made), exact.to(torch.promote_types(dtype, narrow)))


@pytest.mark.interpreter
@settings(max_examples=25, deadline=None)
@given(SHAPES, DTYPES, DTYPES)
@example((ROWS + 1, 2050), torch.float32, torch.bfloat16)
def test_kernel_of_the_backward_gives_what_the_twin_gives(shape, dtype, narrow):
    made = case(shape, dtype, narrow)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(
        torch.promote_types(dtype, narrow)
    )
    got, want = engram_gate_backward(grad, *made), engram_gate_backward_torch(grad, *made)
    for one, other in zip(got, want, strict=True):
        close(one, other)


@pytest.mark.interpreter
def test_kernels_spread_nan_and_inf_as_the_twins_do():
    made = case((6, 20))
    made.h[0, 1], made.key[1, 2], made.key[4, 3], made.value[5, 4] = math.nan, math.inf, -math.inf, math.nan
    grad = torch.randn(6, 20)
    close(engram_gate(*made), engram_gate_torch(*made))
    got, want = engram_gate_backward(grad, *made), engram_gate_backward_torch(grad, *made)
    for one, other in zip(got, want, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twin_is_the_models_gate(dtype):
    """With a convolution of zero, which is where it starts, the model adds the gated value alone."""
    made = case((6, 20), torch.float32, dtype)
    engram = Engram(20, EngramConfig(head_dim=4), [5, 7, 11, 13], EPS)
    torch.nn.init.zeros_(engram.conv)
    torch.nn.init.ones_(engram.value_norm.weight)
    engram.query_norm.weight = torch.nn.Parameter(made.weight)
    added = engram(made.h[None], Memory(made.key[None], made.value[None]))[0]
    assert torch.equal(engram_gate_torch(*made), added)
    assert torch.equal(engram_gate(*made), added)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 4)])
def test_gradients_of_op_and_twin(shape):
    made = case(shape, torch.float64)
    # The gate is constant below the floor but for a step at zero, where there is no derivative.
    made.h[2:3], made.key[3:4] = 0.5, 0.25
    arguments = [x.requires_grad_() for x in made[:4]]
    for op in (engram_gate, engram_gate_torch):
        assert torch.autograd.gradcheck(lambda *x, op=op: op(*x, EPS), arguments)


def test_no_gradient_below_the_floor():
    made = case((6, 20))
    dh, dkey, dvalue, _ = engram_gate_backward(torch.ones(6, 20), *made)
    assert (dh[2:4] == 0).all() and (dkey[2:4] == 0).all() and (dvalue[2:4] == 0.5).all()


def test_torch_library_finds_nothing_wrong():
    made = case((3, 4), torch.float32, torch.bfloat16)
    torch.library.opcheck(engram_gate, (*(x.requires_grad_() for x in made[:4]), EPS))


@pytest.mark.parametrize("place, shape", [(0, (6,)), (1, (5, 20)), (2, (6, 19)), (3, (6, 20))])
def test_other_shapes_are_refused(place, shape):
    made = list(case((6, 20)))
    made[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match="engram_gate"):
        engram_gate(*made)


@pytest.mark.parametrize("D", [2048, 4096])
@pytest.mark.parametrize("rows", ["fp32 fp32 fp32", "fp32 fp32 bf16", "bf16 bf16 bf16"])
def test_compiles(compiles, rows, D):
    """The second are the dtypes of h, key and value in the model under autocast."""
    names = "h", "key", "value", "weight"
    inputs = {name: f"*{dtype}" for name, dtype in zip(names, [*rows.split(), "fp32"], strict=True)}
    fixed = dict(D="i32", scale="fp32", eps="fp32", FLOOR=FLOOR)
    compiles(_forward, **inputs, out="*fp32", **fixed, **sizes(D, FORWARD))
    gradients = {f"d{name}": kind for name, kind in inputs.items()}
    compiles(
        _backward, grad="*fp32", **inputs, **gradients, N="i32", **fixed, ROWS=ROWS, **sizes(D, BACKWARD)
    )
