"""Compare the fused router with plain Python and its kernels with their twins; test its gradients."""

from __future__ import annotations

import math
from functools import partial

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.get_fused_mapping import get_fused_mapping
from kernels.normalize_weight import TINY
from kernels.route import Routing, route, route_torch
from tests.kernels.maps import DTYPES, scores
from tests.kernels.twins import Pair

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor(
    [[NAN, 1, 2], [INF, 1, 2], [-INF] * 3, [-INF, 1, 2], [100.0, -100, 20], [NAN, INF, 2], [INF, 1, NAN]]
)


@st.composite
def cases(draw) -> tuple[Tensor, Tensor | None, int, Tensor | None]:
    """Draw logits on a coarse grid, where ties are exact and no other scores are close; with or without
    bias and mask."""
    N, E = draw(st.integers(0, 9)), draw(st.integers(1, 19))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits_NE = torch.randint(-6, 7, (N, E), generator=generator) / 2
    bias_E = torch.randint(-3, 4, (E,), generator=generator) / 3 if draw(st.booleans()) else None
    valid_N = torch.rand(N, generator=generator) < 0.7 if draw(st.booleans()) else None
    return logits_NE, bias_E, draw(st.integers(1, min(E, 8))), valid_N


def by_hand(logits_NE, bias_E, k, valid_N) -> list[list]:
    """Compute gates, choices, counts and scores by lists."""
    E = logits_NE.shape[1]
    gates, chosen, count, all_scores = [], [], [0] * E, []
    for n, row in enumerate(logits_NE.tolist()):
        total = math.fsum(math.exp(x) for x in row)
        s = [math.exp(x) / total for x in row]
        # Rounding makes the scores of equal logits and biases equal.
        key = [round(s[e] + (0 if bias_E is None else float(bias_E[e])), 6) for e in range(E)]
        best = sorted(range(E), key=lambda e, key=key: (-key[e], e))[:k]
        valid = valid_N is None or bool(valid_N[n])
        chosen.append(best if valid else [-1] * k)
        gates.append([s[e] / (TINY + sum(s[e] for e in best)) if valid else 0.0 for e in best])
        all_scores.append(s)
        for e in best if valid else ():
            count[e] += 1
    return [gates, chosen, count, all_scores]


@settings(max_examples=50)
@given(cases())
def test_routing_is_what_lists_give(case):
    got = route(*case)
    gates, chosen, count, all_scores = by_hand(*case)
    assert got.chosen_NK.tolist() == chosen and got.count_E.tolist() == count
    for tensor, rows in ((got.gates_NK, gates), (got.scores_NE, all_scores)):
        torch.testing.assert_close(tensor, torch.tensor(rows).view(tensor.shape), rtol=1e-5, atol=1e-6)
    assert got.chosen_NK.dtype == torch.int64 and got.count_E.dtype == torch.int32


@settings(max_examples=50)
@given(scores())
@example(SPECIAL)
def test_choices_are_different_experts_whatever_the_logits(logits_NE):
    k = min(3, logits_NE.shape[1])
    chosen_NK = route(logits_NE, None, k).chosen_NK
    assert ((chosen_NK >= 0) & (chosen_NK < logits_NE.shape[1])).all()
    assert all(len(set(row)) == k for row in chosen_NK.tolist())


@settings(max_examples=50)
@given(cases(), st.sampled_from([1, 3, 16]))
def test_maps_are_those_of_the_choices(case, alignment):
    routing = route(*case, alignment=alignment)
    mapping = get_fused_mapping(routing.chosen_NK, case[0].shape[1], alignment)
    for name, tensor in routing.maps._asdict().items():
        assert torch.equal(tensor, getattr(mapping, name)) and tensor.dtype == torch.int32
    assert torch.equal(routing.count_E, mapping.count_E)
    assert route_torch(*case).maps is None


def in_some_dtype(case: tuple, dtype: torch.dtype) -> tuple:
    """The coarse grid of the logits is exact in bfloat16 as well."""
    return case[0].to(dtype), *case[1:]


def gradient(router, used: set[int], logits_NE: Tensor, *case) -> Tensor:
    """Return the gradient of a loss over the outputs ``used``."""
    logits_NE = logits_NE.detach().requires_grad_()
    out = router(logits_NE, *case)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(out[i].shape, generator=generator).to(logits_NE.device) for i in sorted(used)]
    loss = sum((out[i] * weight).sum() for i, weight in zip(sorted(used), weights, strict=True))
    return torch.autograd.grad(loss, logits_NE)[0]


CASES = st.builds(in_some_dtype, cases(), DTYPES)
USED = st.sets(st.sampled_from([0, 3, 4]), min_size=1)
LARGE = torch.arange(70.0 * 33).view(70, 33) % 11, None, 8, torch.arange(70) % 3 > 0
# Several programs: with a tile of maps that is no whole number of programs' entries, and with few experts.
MANY = (torch.arange(700.0 * 33).view(700, 33) % 11, None, 3, torch.arange(700) % 3 > 0, 16)
FEW = (torch.arange(2 * 2500.0).view(2500, 2) % 7, torch.tensor([0.1, 0.0]), 1, None, 8)


def flat(router, *case) -> list[Tensor]:
    out: Routing = router(*case)
    return [*out[:5], *out.maps]


ROUTE = Pair(
    partial(flat, route),
    partial(flat, route_torch),
    st.builds(lambda case, alignment: (*case, alignment), CASES, st.sampled_from([1, 3, 16])),
    [(SPECIAL, None, 2, None, 16), (*LARGE, 16), MANY, FEW],
    rtol=1e-5,
    atol=1e-6,
)
ROUTE_BACKWARD = Pair(
    partial(gradient, route),
    partial(gradient, route_torch),
    st.builds(lambda used, case: (used, *case), USED, CASES),
    [({0, 3, 4}, *LARGE), ({0}, *in_some_dtype(LARGE, torch.bfloat16))],
    rtol=1e-4,
    atol=1e-5,
)


@settings(max_examples=25)
@given(cases())
def test_gradients_of_op_and_twin(case):
    logits_NE, _, k, valid_N = case
    # The bias alone decides, so a small step of a logit changes no choice.
    bias_E = 2.0 * torch.randperm(logits_NE.shape[1])
    for router in (route, route_torch):

        def differentiable(x_NE, router=router):
            out = router(x_NE, bias_E, k, valid_N)
            return out.gates_NK, out.scores_NE, out.logsumexp_N

        assert torch.autograd.gradcheck(differentiable, logits_NE.double().requires_grad_())
