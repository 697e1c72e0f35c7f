"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state.

A stage warms up linearly over ``warmup_steps`` and then follows its schedule over the steps that are left,
from ``lr`` down to ``min_lr_ratio * lr``, which it reaches as the stage ends, after its last step. No step
trains at rate 0: step 0 has ``lr / warmup_steps``, and the last step of a fall to 0 is still a little above
it. Every stage starts its own schedule; a stage that should go on at full rate sets ``warmup_steps: 0``.
"""

from __future__ import annotations

import math

from spider.config import StageSettings


def lr_factor(step: int, steps: int, settings: StageSettings) -> float:
    """Share of the peak learning rate to train step ``step`` of ``steps`` (counted from 0) with.

    Raises:
        ValueError: the step is not one of the stage's.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is not one of the stage's steps 0..{steps - 1}")
    warmup = min(settings.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = (step - warmup) / (steps - warmup)
    fall = done if settings.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * done))
    return 1.0 - (1.0 - settings.min_lr_ratio) * fall
