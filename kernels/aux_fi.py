"""The load of each expert as a share of the mean: ``f_e = count_e E / (N k)``, 1 for all when balanced.

It is the factor f of the auxiliary loss ``sum_e f_e mean_n p_ne`` (Fedus et al., Switch Transformers, 2021,
equation 4). The op does not differentiate f. Counts are integers and scaled once, so every run gives the same
result. Masked choices count for none of the experts, but the divisor stays N k.

There are two launches: the first counts each block of choices, the second sums the counts.
"""

import torch
from torch import Tensor

from kernels.get_fused_mapping import STEP, block_counts, sum_blocks
from kernels.switch import check_shapes, jit, op, tl


def aux_fi_torch(chosen_NK: Tensor, experts: int, k: int) -> Tensor:
    """Compute ``aux_fi`` in torch."""
    hits = chosen_NK.flatten()[:, None] == torch.arange(experts, device=chosen_NK.device)
    return hits.sum(0).float() * _scale(chosen_NK, experts, k)


def _scale(chosen_NK: Tensor, experts: int, k: int) -> float:
    return experts / max(len(chosen_NK) * k, 1)


@jit
def _scale_counts(counts, out, scale, E, blocks, WIDE_E: tl.constexpr, STEP: tl.constexpr):
    total, _ = sum_blocks(counts, 0, blocks, WIDE_E, STEP)
    experts = tl.arange(0, WIDE_E)
    tl.store(out + experts, total.to(tl.float32) * scale, mask=experts < E)


def _launch(out_E: Tensor, chosen_NK: Tensor, experts: int, k: int) -> None:
    counts = block_counts(chosen_NK, experts)
    blocks, wide = counts.shape
    scale = _scale(chosen_NK, experts, k)
    _scale_counts[1,](counts, out_E, scale, experts, blocks, WIDE_E=wide, STEP=max(STEP // wide, 1))


@op("aux_fi", _launch, aux_fi_torch)
def aux_fi(chosen_NK: Tensor, experts: int, k: int) -> Tensor:
    """Return ``f`` (E,) in float32; zeros if N is 0.

    Args:
        chosen_NK: int32 or int64, -1 where masked.

    Raises:
        ValueError: the shape is not (N, K), or a number is not positive.
    """
    check_shapes("aux_fi", chosen_NK=chosen_NK)
    if experts < 1 or k < 1:
        raise ValueError(f"aux_fi: the number of experts {experts} and k {k} must be positive")
    return chosen_NK.new_empty(experts, dtype=torch.float32)
