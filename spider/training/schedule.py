"""The length of a stage, and its learning rate as a pure function of the step.

A stage ends at the first limit it reaches. Once the model's size is known, each limit but ``max_hours`` is a
number of steps (`horizon`), so the rate needs no state. A stage warms up linearly over ``warmup_steps``,
a number or a share of its steps, and follows its schedule over the remaining steps:

    cosine, linear   decays from the end of the warm-up
    wsd              stays constant, then decays linearly in the last ``decay_fraction`` of the steps
    constant         does not decay

The rate decays from ``lr`` to ``min_lr_ratio * lr``, which it reaches after the last step. No step trains at
rate 0: step 0 has ``lr / warmup_steps``. Every stage starts its own schedule; a stage that continues at full
rate sets ``warmup_steps: 0``.

``max_hours`` is the one limit that is not a number of steps. When the share ``1 - decay_fraction`` of the
hours is spent after n steps, `end_in_time` fixes the end at ``n / (1 - decay_fraction)`` steps. The decay
then takes its share of the steps, and of the time if the pace stays the same. The checkpoint stores the end,
so a resumed run anneals as it began to; another run may end after another number of steps.

Weight decay and Muon's momentum are functions of the step too (`scheduled`). Weight decay moves linearly to
``weight_decay_end`` over the stage and reaches it after the last step. With ``max_hours`` the length is not
known in time, so it moves while the rate decays. Muon's momentum rises once in a run, by the
steps of the run, because each stage inherits it from the stage before.
"""

from __future__ import annotations

import math

from spider.config import OptimizerConfig, StageSettings, StageSpec
from spider.model.interface import Model


def horizon(spec: StageSpec, model: Model) -> int | None:
    """Return the optimizer steps of a stage by its tightest limit, at least 1; None with only ``max_hours``.

    The model may be on the meta device.

    Raises:
        ValueError: the average of the weights would start after the stage's end.
    """
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
    """Return the learning rate of a step (counted from 0) as a fraction of its peak.

    ``steps`` is None while ``max_hours`` has not yet fixed the end.
    """
    assert step >= 0 and (steps is None or step < steps), f"step {step} is not one of the stage's"
    warmup = _warmup(steps, settings)
    if step < warmup:
        return (step + 1) / warmup
    if steps is None:
        return 1.0
    progress = _progress(step, _decay_start(steps, settings), steps)
    decay = 0.5 * (1 - math.cos(math.pi * progress)) if settings.schedule == "cosine" else progress
    return 1.0 - (1.0 - settings.min_lr_ratio) * decay


def _warmup(steps: int | None, settings: StageSettings) -> int:
    """Return the number of steps of the warm-up."""
    warmup = settings.warmup_steps
    if steps is None:
        return int(warmup)
    return round(warmup * steps) if 0 < warmup < 1 else min(int(warmup), steps)


def scheduled(
    step: int, run_step: int, steps: int | None, settings: StageSettings, optimizer: OptimizerConfig
) -> dict[str, float]:
    """Return the scheduled ones of ``weight_decay`` and ``muon_momentum`` with their values in a step.

    The step is ``step`` of a stage of ``steps`` and ``run_step`` of the run, both counted from 0.
    """
    values = {}
    if optimizer.weight_decay_end is not None:
        change = optimizer.weight_decay_end - optimizer.weight_decay
        progress = 0.0
        if steps is not None:
            start = 0 if settings.max_hours is None else _decay_start(steps, settings)
            progress = _progress(step, start, steps)
        values["weight_decay"] = optimizer.weight_decay + change * progress
    if optimizer.muon_momentum_start is not None:
        change = optimizer.muon_momentum - optimizer.muon_momentum_start
        progress = min(1.0, run_step / optimizer.muon_momentum_steps)
        values["muon_momentum"] = optimizer.muon_momentum_start + change * progress
    return values


def _progress(step: int, start: int, end: int) -> float:
    """Return the share of the steps from ``start`` to ``end`` that are done, 0 before ``start``."""
    return 0.0 if step <= start else (step - start) / (end - start)


def end_in_time(step: int, seconds: float, steps: int | None, settings: StageSettings) -> int | None:
    """Return the stage's number of steps if ``max_hours`` fixes it now, after ``step`` steps in ``seconds``.

    The result is None before that time, during the warm-up, and once a stage that its other limits end after
    ``steps`` steps has begun to decay.
    """
    if settings.max_hours is None or step < _warmup(steps, settings):
        return None
    share = 1 - settings.decay_fraction if settings.schedule == "wsd" else 1.0
    decaying = steps is not None and step >= _decay_start(steps, settings)
    if decaying or seconds < share * settings.max_hours * 3600:
        return None
    # The most steps of a stage that begins to decay now: ``step / share`` up to rounding.
    end = int(step / share)
    while _decay_start(end + 1, settings) <= step:
        end += 1
    return end


def _decay_start(steps: int, settings: StageSettings) -> int:
    """Return the last step at the peak rate."""
    warmup = _warmup(steps, settings)
    if settings.schedule == "constant":
        return steps
    if settings.schedule == "wsd":
        return max(warmup, steps - int(steps * settings.decay_fraction))
    return warmup
