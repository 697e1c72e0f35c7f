"""How long a stage is, and its learning rate as a pure function of the step.

A stage ends with the first limit it reaches; with the model's size known, each but ``max_hours`` is a number
of steps (`horizon`). The rate then needs no state: a stage warms up linearly over ``warmup_steps`` and
follows its schedule over the steps that are left,

    cosine, linear   down from the warm-up's end on
    wsd              constant, then down linearly in the last ``decay_fraction`` of the steps
    constant         not at all

from ``lr`` to ``min_lr_ratio * lr``, which it reaches as the stage ends, after its last step. No step trains
at rate 0: step 0 has ``lr / warmup_steps``. Every stage starts its own schedule; one that should go on at
full rate sets ``warmup_steps: 0``.

``max_hours`` is the one limit that is no number of steps. When the share ``1 - decay_fraction`` of the hours
is spent after n steps, `end_in_time` fixes the end at ``n / (1 - decay_fraction)`` steps: the decay then
takes its share of the steps, and of the time if they stay as fast as they were. The end is kept in the
checkpoint, so a resumed run anneals as it began to; another run may end after another number of steps.

What else of the optimizer moves (`scheduled`) is a function of the step too. Weight decay goes to
``weight_decay_end`` over the stage, as the rate does reaching it after the last step; where ``max_hours`` is
given nobody knows in time how far the stage has come, and it goes there in the steps in which the rate falls.
Muon's momentum rises once in a run, not in each stage, for stages hand it on: by the steps of the run.
"""

from __future__ import annotations

import math
from itertools import count

from spider.config import OptimizerConfig, StageSettings, StageSpec
from spider.model.interface import Model


def horizon(spec: StageSpec, model: Model) -> int | None:
    """Optimizer steps of a stage: the least that its limits come to, at least 1; None if only a clock tells.
    The model may be on the meta device. `ValueError`: the average of the weights would start too late."""
    s = spec.settings
    tokens: list[float] = [] if s.tokens is None else [s.tokens]
    if s.target_flops is not None:
        tokens.append(s.target_flops / model.flops_per_token(s.seq_len, s.n_loops))
    if s.tokens_per_parameter is not None:
        tokens.append(s.tokens_per_parameter * model.scaling_parameters())
    limits = [max(1, int(n // spec.tokens_per_step)) for n in tokens]
    if s.max_steps is not None:
        limits.append(s.max_steps)
    steps = min(limits, default=None)
    if s.ema is not None and steps is not None and s.ema.start_step >= steps:
        raise ValueError(
            f"{spec.run}/{spec.stage}: ema.start_step: {s.ema.start_step} is not before the stage's end, it "
            f"has {steps} steps"
        )
    return steps


def lr_factor(step: int, steps: int | None, settings: StageSettings) -> float:
    """Share of the peak learning rate to train step ``step`` of ``steps`` (counted from 0) with; ``steps`` is
    None while ``max_hours`` has not yet fixed the end."""
    assert step >= 0 and (steps is None or step < steps), f"step {step} is not one of the stage's"
    warmup = settings.warmup_steps if steps is None else min(settings.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if steps is None or step <= (start := _decay_start(steps, settings)):
        return 1.0
    done = (step - start) / (steps - start)
    fall = 0.5 * (1 - math.cos(math.pi * done)) if settings.schedule == "cosine" else done
    return 1.0 - (1.0 - settings.min_lr_ratio) * fall


def scheduled(
    step: int, run_step: int, steps: int | None, settings: StageSettings, optimizer: OptimizerConfig
) -> dict[str, float]:
    """What of ``weight_decay`` and ``muon_momentum`` moves, with its value in train step ``step`` of a stage
    of ``steps``, which is ``run_step`` of the run (counted from 0)."""
    moving = {}
    if (last := optimizer.weight_decay_end) is not None:
        first = optimizer.weight_decay
        moving["weight_decay"] = first + (last - first) * _decay_gone(step, steps, settings)
    if (start := optimizer.muon_momentum_start) is not None:
        risen = min(1.0, run_step / optimizer.muon_momentum_steps)
        moving["muon_momentum"] = start + (optimizer.muon_momentum - start) * risen
    return moving


def _decay_gone(step: int, steps: int | None, settings: StageSettings) -> float:
    """Share of its way that weight decay has gone."""
    if steps is None:
        return 0.0
    start = 0 if settings.max_hours is None else _decay_start(steps, settings)
    return 0.0 if step <= start else (step - start) / (steps - start)


def end_in_time(step: int, seconds: float, steps: int | None, settings: StageSettings) -> int | None:
    """The stage's number of steps, if ``max_hours`` fixes it now, when ``step`` steps have taken ``seconds``;
    None: not now. Never before the warm-up is over, nor where a stage of ``steps`` steps, by its other
    limits, has begun its decay already."""
    if settings.max_hours is None or step < settings.warmup_steps:
        return None
    share = 1 - (settings.decay_fraction if settings.schedule == "wsd" else 0.0)
    decays = steps is not None and step >= _decay_start(steps, settings)
    if decays or seconds < share * settings.max_hours * 3600:
        return None
    return next(n for n in count(int(step / share)) if _decay_start(n + 1, settings) > step)


def _decay_start(steps: int, settings: StageSettings) -> int:
    """The step up to which the rate stays at its peak."""
    warmup = min(settings.warmup_steps, steps)
    if settings.schedule == "constant":
        return steps
    if settings.schedule == "wsd":
        return max(warmup, steps - int(steps * settings.decay_fraction))
    return warmup
