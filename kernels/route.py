"""The whole router behind its matrix product: scores, selection, gates, counts, and maps of the fused buffer.

    s[n]      = softmax(logits[n])
    chosen[n] = the k largest of s[n] + bias, the largest first, ties to the lower index
    gates[n]  = s[n, chosen] / (1e-20 + sum of them)

The bias only selects; the gates are computed from the unbiased scores (Wang et al., Auxiliary-Loss-Free Load
Balancing, 2024). The z-loss uses ``logsumexp`` of the logits, and the auxiliary loss uses the scores.

The gradient of the logits is ``s (ds - <ds, s> + dlogsumexp)``. Here ``ds`` is the gradient of the scores,
plus ``a_k = (dgates_k - <dgates, gates>) / (1e-20 + sum)`` at the chosen experts. Counts and choices are
integers and not differentiable.

NaN or +inf among a token's logits, or -inf in all of them, makes its scores and gates NaN. The choices are k
different experts in any case.

Launches dominate the cost. Forward there are two. The first does all but the maps, and counts the choices of
its rows. The second lays out the rows, as in ``get_fused_mapping``. One cannot do both, because a row's place
depends on the choices of all tokens. Programs of one launch can wait for each other only where the device
holds all of them at once. Backward there is one launch, which recomputes the scores from the logits.

Forward moves N (8 E + 24 K + 5) + 4 P bytes for float32 logits. Backward moves N (8 E + 16 K + 8) bytes, and
4 N E more if the scores have a gradient.

Layout: a program holds the rows of a tile of scores. The k maxima are found as in ``topk_gate``. Each program
stores the counts of its rows, so nothing must be cleared before, and all sums have a fixed order. The forward
tile is the larger one, because the second launch sums the counts of all programs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.get_fused_mapping import get_fused_mapping_torch, place, static_rows
from kernels.normalize_weight import TINY
from kernels.switch import check_shapes, jit, op, tile, tl
from kernels.topk_gate import sortable, take_best, topk_gate_torch

TILE = 4096
"""Scores of one program, forward."""
TILE_BACKWARD = 1024


class Maps(NamedTuple):
    """The fields of ``FusedMapping`` that a layer of experts needs."""

    token_to_pos_NK: Tensor
    pos_to_expert_P: Tensor
    end_E: Tensor


class Routing(NamedTuple):
    gates_NK: Tensor
    """float32, sum 1; 0 for tokens that are not valid."""
    chosen_NK: Tensor
    """int64; -1 for tokens that are not valid."""
    count_E: Tensor
    """Choices of each expert, int32."""
    scores_NE: Tensor
    """float32, of all tokens."""
    logsumexp_N: Tensor
    """float32, of the logits of all tokens."""
    maps: Maps | None = None


def route_torch(
    logits_NE: Tensor,
    bias_E: Tensor | None,
    k: int,
    valid_N: Tensor | None = None,
    alignment: int | None = None,
) -> Routing:
    """Compute ``route`` in torch, which can differentiate it; without an alignment it makes no maps."""
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    scores_NE = logits_NE.softmax(1)
    biased_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
    chosen_NK = topk_gate_torch(biased_NE, k)
    picked_NK = scores_NE.gather(1, chosen_NK)
    gates_NK = picked_NK / (TINY + picked_NK.sum(1, keepdim=True))
    hits_NKE = chosen_NK[:, :, None] == torch.arange(logits_NE.shape[1], device=logits_NE.device)
    if valid_N is not None:
        gates_NK = torch.where(valid_N[:, None], gates_NK, 0)
        chosen_NK = torch.where(valid_N[:, None], chosen_NK, -1)
        hits_NKE = hits_NKE & valid_N[:, None, None]
    count_E = hits_NKE.sum((0, 1)).to(torch.int32)
    maps = None
    if alignment is not None:
        mapping = get_fused_mapping_torch(chosen_NK, logits_NE.shape[1], alignment)
        maps = Maps(mapping.token_to_pos_NK, mapping.pos_to_expert_P, mapping.end_E)
    return Routing(gates_NK, chosen_NK, count_E, scores_NE, logits_NE.logsumexp(1), maps)


def _flat_torch(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, maps = route_torch(*arguments)
    return (*fields, *(maps or ()))


def _route_backward_torch(logits_NE, gates_NK, chosen_NK, _logsumexp_N, gradients) -> Tensor:
    """Compute the gradient of the logits by torch's derivative of all steps after the choice."""

    def differentiable(logits_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = logits_NE.to(gates_NK.dtype)
        scores_NE = logits_NE.softmax(1)
        picked_NK = scores_NE.gather(1, chosen_NK.clamp(min=0))
        again_NK = (picked_NK / (TINY + picked_NK.sum(1, keepdim=True))).masked_fill(chosen_NK < 0, 0)
        return again_NK, scores_NE, logits_NE.logsumexp(1)

    results, pull = torch.func.vjp(differentiable, logits_NE)[:2]
    pairs = zip(results, gradients, strict=True)
    return pull(tuple(torch.zeros_like(result) if g is None else g for result, g in pairs))[0]


@jit
def _route(
    logits,
    bias,
    valid,
    gates,
    chosen,
    counts,
    scores,
    logsumexp,
    N,
    E,
    TINY: tl.constexpr,
    K: tl.constexpr,
    WIDE_K: tl.constexpr,
    WIDE_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    block, experts = tl.program_id(0), tl.arange(0, WIDE_E)
    n = block * ROWS + tl.arange(0, ROWS)
    e = experts[None, :]
    place, inside = n[:, None].to(tl.int64) * E + e, (n < N)[:, None] & (e < E)
    logit = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)

    # The peak of a row of -inf counts as 0, so its logsumexp is -inf.
    peak = tl.max(logit, axis=1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    power = tl.where(e < E, tl.exp(logit - peak[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    # With +inf in the row, inf - inf above is NaN but the logsumexp is inf. The maximum ignores a NaN next to
    # it, so NaN is detected separately.
    nan = tl.max((logit != logit).to(tl.int32), axis=1) > 0
    known = (peak == float("inf")) & ~nan
    tl.store(logsumexp + n, tl.where(known, peak, peak + tl.log(total)), mask=n < N)
    score = power / total[:, None]
    tl.store(scores + place, score, mask=inside)

    selection = score
    if bias is not None:
        selection += tl.load(bias + experts, mask=experts < E, other=0)[None, :]
    keys = sortable(selection, e, E, WIDE_E)
    slot = tl.arange(0, WIDE_K)[None, :]
    picked = tl.zeros((ROWS, WIDE_K), tl.float32)
    column = tl.full((ROWS, WIDE_K), -1, tl.int32)
    hits = tl.zeros((ROWS, WIDE_E), tl.int32)
    for k in tl.static_range(K):
        best, keys = take_best(keys, WIDE_E)
        hit = e == best[:, None]
        picked = tl.where(slot == k, tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None], picked)
        column = tl.where(slot == k, best[:, None], column)
        hits += hit.to(tl.int32)

    real = n < N
    if valid is not None:
        real = real & (tl.load(valid + n, mask=n < N, other=0) != 0)
    gate = tl.where(real[:, None], picked / (TINY + tl.sum(picked, axis=1))[:, None], 0.0)
    column = tl.where(real[:, None], column, -1)
    out, written = n[:, None].to(tl.int64) * K + slot, (n < N)[:, None] & (slot < K)
    tl.store(gates + out, gate, mask=written)
    tl.store(chosen + out, column.to(tl.int64), mask=written)
    count = tl.sum(tl.where(real[:, None], hits, 0), axis=0)
    tl.store(counts + block * WIDE_E + experts, count)


def _launch(
    out: tuple[Tensor, ...],
    logits_NE: Tensor,
    bias_E: Tensor | None,
    k: int,
    valid_N: Tensor | None,
    alignment: int,
) -> None:
    gates_NK, chosen_NK, count_E, scores_NE, logsumexp_N, token_to_pos_NK, pos_to_expert_P, end_E = out
    N, E = logits_NE.shape
    sizes = _sizes(logits_NE, k, TILE)
    blocks = max(-(-N // sizes["ROWS"]), 1)
    counts = count_E.new_empty(blocks, sizes["WIDE_E"])
    tensors = logits_NE, bias_E, valid_N, gates_NK, chosen_NK, counts, scores_NE, logsumexp_N
    _route[blocks,](*tensors, N, E, WIDE_K=tile(k), num_warps=8, **sizes)
    maps = pos_to_expert_P, None, None, token_to_pos_NK, None, end_E, count_E
    place(maps, chosen_NK, counts, sizes["ROWS"] * k, E, alignment)


def _sizes(logits_NE: Tensor, k: int, elements: int) -> dict[str, Any]:
    """Return the constants that both kernels are compiled for, given the elements of a tile."""
    wide = tile(logits_NE.shape[1])
    return dict(TINY=TINY, K=k, WIDE_E=wide, ROWS=max(elements // wide, 1))


@jit
def _route_backward(
    grad_gates,
    grad_scores,
    grad_logsumexp,
    logits,
    gates,
    chosen,
    logsumexp,
    out,
    N,
    E,
    TINY: tl.constexpr,
    K: tl.constexpr,
    WIDE_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDE_E)[None, :]
    place, inside = n[:, None].to(tl.int64) * E + e, (n < N)[:, None] & (e < E)
    logit = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.exp(logit - tl.load(logsumexp + n, mask=n < N, other=0)[:, None])

    ds = tl.zeros((ROWS, WIDE_E), tl.float32)
    if grad_scores is not None:
        ds += tl.load(grad_scores + place, mask=inside, other=0)
    if grad_gates is not None:
        first = n.to(tl.int64) * K
        total, inner = tl.zeros((ROWS,), tl.float32) + TINY, tl.zeros((ROWS,), tl.float32)
        for k in tl.static_range(K):
            hit = e == tl.load(chosen + first + k, mask=n < N, other=-1)[:, None]
            total += tl.sum(tl.where(hit, score, 0.0), axis=1)
            gate = tl.load(gates + first + k, mask=n < N, other=0)
            inner += gate * tl.load(grad_gates + first + k, mask=n < N, other=0)
        for k in tl.static_range(K):
            hit = e == tl.load(chosen + first + k, mask=n < N, other=-1)[:, None]
            a = (tl.load(grad_gates + first + k, mask=n < N, other=0) - inner) / total
            ds += tl.where(hit, a[:, None], 0.0)

    grad = score * (ds - tl.sum(tl.where(inside, ds * score, 0.0), axis=1)[:, None])
    if grad_logsumexp is not None:
        grad += tl.load(grad_logsumexp + n, mask=n < N, other=0)[:, None] * score
    tl.store(out + place, grad.to(out.dtype.element_ty), mask=inside)


def _launch_backward(out_NE, logits_NE, gates_NK, chosen_NK, logsumexp_N, gradients) -> None:
    N, E = logits_NE.shape
    sizes = _sizes(logits_NE, chosen_NK.shape[1], TILE_BACKWARD)
    if N:
        _route_backward[-(-N // sizes["ROWS"]),](
            *(g if g is None else g.contiguous() for g in gradients),
            logits_NE,
            gates_NK,
            chosen_NK,
            logsumexp_N,
            out_NE,
            N,
            E,
            **sizes,
        )


@op("route", _launch, _flat_torch)
def _route_op(
    logits_NE: Tensor, bias_E: Tensor | None, k: int, valid_N: Tensor | None, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``Routing`` and then those of its maps."""
    check_shapes("route", logits_NE=logits_NE, bias_E=bias_E, valid_N=valid_N)
    N, E = logits_NE.shape
    if not 1 <= k <= E:
        raise ValueError(f"route: k = {k} must be in 1..E for logits (N, E) {(N, E)}")
    if alignment < 1:
        raise ValueError(f"route: alignment {alignment} must be a positive number")
    wide = torch.promote_types(logits_NE.dtype, torch.float32)
    float_, int_ = partial(logits_NE.new_empty, dtype=wide), partial(logits_NE.new_empty, dtype=torch.int32)
    chosen_NK = logits_NE.new_empty(N, k, dtype=torch.int64)
    routed = float_((N, k)), chosen_NK, int_(E), float_((N, E)), float_(N)
    return *routed, int_((N, k)), int_(static_rows(N * k, E, alignment)), int_(E)


@op("route_backward", _launch_backward, _route_backward_torch)
def _route_backward_op(
    logits_NE: Tensor,
    gates_NK: Tensor,
    chosen_NK: Tensor,
    logsumexp_N: Tensor,
    gradients: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient of the logits from those of gates, scores and logsumexp; None stands for zeros."""
    return logits_NE.new_empty(logits_NE.shape)


def _remember(ctx, inputs, output) -> None:
    gates_NK, chosen_NK, _, _, logsumexp_N, *_ = output
    ctx.save_for_backward(inputs[0], gates_NK, chosen_NK, logsumexp_N)
    # A loss that does not use the scores costs no zeros of their size.
    ctx.set_materialize_grads(False)


def _adjoint(ctx, *gradients):
    of_gates, _, _, of_scores, of_logsumexp, *_ = gradients
    of_logits = _route_backward_op(*ctx.saved_tensors, [of_gates, of_scores, of_logsumexp])
    return of_logits, None, None, None, None


torch.library.register_autograd(_route_op, _adjoint, setup_context=_remember)


def route(
    logits_NE: Tensor, bias_E: Tensor | None, k: int, valid_N: Tensor | None = None, alignment: int = 1
) -> Routing:
    """Choose ``k`` experts for every token, compute their gates, and lay out the rows of the experts.

    It is differentiable once in the logits, through gates, scores and logsumexp.

    Args:
        bias_E: float32, added for the choice only.
        valid_N: bool; other tokens go to no expert and do not count.
        alignment: of each expert's segment, as in ``get_fused_mapping``.

    Raises:
        ValueError: k is not in 1..E, the alignment is not positive, or a shape does not fit.
    """
    out = _route_op(logits_NE, bias_E, k, valid_N, alignment)
    return Routing(out[0], out[1], out[2], out[3], out[4], Maps(*out[5:]))
