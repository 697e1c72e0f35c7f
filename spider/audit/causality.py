"""Check that no prediction depends on a byte after it.

All ids after a random position are replaced by random ones, those of later windows and of the n-gram index's
text too. The model reads the windows up to that position again, and its logits up to there must be the same.
The two batches have one shape. Rounding could still feign a difference, because a mixture of experts
multiplies matrices whose sizes depend on all rows of a batch. So the model computes in float64, or without
autocast if it has parts in float32 only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from spider.audit.scoring import Rescored, Window

#: Largest difference of a logit, in float64 and in float32.
TOLERANCE, TOLERANCE_FP32 = 1e-6, 1e-4
#: Positions, for each of the two figures, and windows that are read up to each.
_POSITIONS, _WINDOWS = 32, 4
_QUICK_POSITIONS, _QUICK_WINDOWS = 2, 2


def examine(rescored: Rescored) -> tuple[list[str], str]:
    """Return what depends on later bytes, and what was checked. The model may be in float64 afterwards."""
    most = TOLERANCE if _in_float64(rescored) else TOLERANCE_FP32
    problems, count = [], 0
    for carry_over in rescored.passes:
        windows = rescored.windows(carry_over)
        for _ in range(_QUICK_POSITIONS if rescored.quick else _POSITIONS):
            cut = int(rescored.random.integers(len(rescored.tokens_N) - 1))
            differing = _differing(rescored, cut, carry_over, windows, most)
            count += 1
            if differing:
                problems.append(
                    f"{differing:,} predictions of the ids up to position {cut + 1} change if other bytes "
                    f"come after position {cut}"
                )
    return problems, (
        f"all ids after each of {count} positions were replaced, and no prediction up to there changed by "
        f"more than {most}"
    )


def _in_float64(rescored: Rescored) -> bool:
    """Turn the model into float64, unless a part of it cannot compute so."""
    rescored.model.double()
    try:
        rescored.read(rescored.tokens_N, rescored.windows(0)[:1], 0, exact=True)
    except RuntimeError:
        rescored.model.float()
        return False
    return True


def _differing(rescored: Rescored, cut: int, carry_over: int, windows: list[Window], most: float) -> int:
    """Return how many predictions up to a position change if all ids after it do."""
    tokens = rescored.model.tokens
    at = next(i for i, one in enumerate(windows) if one.scored <= cut < one.end)
    chosen = windows[max(0, at + 1 - (_QUICK_WINDOWS if rescored.quick else _WINDOWS)) : at + 1]
    texts = np.flatnonzero(tokens.bytes_of)
    other_N = rescored.tokens_N.copy()
    other_N[cut + 1 :] = rescored.random.choice(texts, len(other_N) - cut - 1)
    # The document that holds the position does not end any more.
    last = chosen[-1]._replace(end=min(chosen[-1].start + rescored.alone.seq_len, len(other_N) - 1))
    before = rescored.read(rescored.tokens_N, chosen, carry_over, exact=True)
    after = rescored.read(other_N, [*chosen[:-1], last], carry_over, exact=True)
    changed_BT = ((before - after).abs() > most).any(-1) | ~before.isfinite().all(-1)
    return sum(
        int(changed_BT[row, : min(one.end, cut + 1) - one.start].sum()) for row, one in enumerate(chosen)
    )
