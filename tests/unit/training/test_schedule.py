import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spider.config import OptimizerConfig, StageSettings, load_config
from spider.training.schedule import end_in_time, horizon, lr_factor, scheduled

FALLING = ["cosine", "linear", "wsd"]


def settings(**changes):
    return StageSettings(**{"max_steps": 100, "warmup_steps": 10, "min_lr_ratio": 0.1, **changes})


def factors(steps, **changes):
    return [lr_factor(step, steps, settings(**changes)) for step in range(steps)]


shapes = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 400),
        "warmup_steps": st.integers(0, 450),
        "min_lr_ratio": st.floats(0, 1),
        "decay_fraction": st.floats(0.01, 0.99),
        "schedule": st.sampled_from([*FALLING, "constant"]),
    }
)


@given(shapes)
def test_the_rate_rises_once_to_at_most_the_peak_falls_once_and_never_jumps(shape):
    found = factors(**shape)
    assert len(found) == shape["steps"] and all(0 < f <= 1 for f in found)
    rising, falling = found[: shape["warmup_steps"]], found[shape["warmup_steps"] :]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    warmup = len(rising)
    steps = len(falling)
    if shape["schedule"] == "wsd":
        steps = min(steps, max(1, int(shape["steps"] * shape["decay_fraction"])))
    steepest = math.pi / 2 if shape["schedule"] == "cosine" else 1
    limit = max(1 / max(1, warmup), steepest / max(1, steps)) + 1e-9
    assert all(abs(b - a) <= limit for a, b in pairwise(found))


@given(st.data(), st.integers(3, 400), st.floats(0, 1), st.sampled_from(["linear", "wsd"]))
def test_the_rate_reaches_its_end_one_step_after_the_last(data, steps, least, schedule):
    """A linear decay shows exactly that the last step is one step short of ``min_lr_ratio``."""
    warmup = data.draw(st.integers(0, steps - 3))
    share = data.draw(st.floats(min(2.01 / steps, 0.99), 0.99))
    found = factors(steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=least, decay_fraction=share)
    assert found[-1] + (found[-1] - found[-2]) == pytest.approx(least)


def decays(steps, ends=0.0, **changes):
    """Return the weight decay of each step, from 0.2."""
    optimizer = OptimizerConfig(weight_decay=0.2, weight_decay_end=ends)
    found = [scheduled(step, step, steps, settings(**changes), optimizer) for step in range(steps)]
    assert all(moving.keys() == {"weight_decay"} for moving in found)
    return [moving["weight_decay"] for moving in found]


@pytest.mark.parametrize("schedule", [*FALLING, "constant"])
def test_weight_decay_moves_linearly_to_its_end_over_the_stage(schedule):
    assert decays(100, schedule=schedule) == pytest.approx([0.2 * (1 - i / 100) for i in range(100)])
    assert decays(100, 0.3, schedule=schedule)[50] == pytest.approx(0.25)


def test_with_max_hours_weight_decay_moves_while_the_rate_decays():
    clocked = {"max_steps": None, "max_hours": 1.0, "schedule": "wsd", "decay_fraction": 0.25}
    found = decays(100, **clocked)
    assert found[:76] == [0.2] * 76
    assert found[75:] == pytest.approx([0.2 * (1 - i / 25) for i in range(25)])
    optimizer = OptimizerConfig(weight_decay=0.2, weight_decay_end=0.0)
    assert scheduled(50, 50, None, settings(**clocked), optimizer) == {"weight_decay": 0.2}
    assert decays(2, **clocked) == [0.2, 0.2]  # no step is left for it


def test_momentum_rises_linearly_over_the_steps_of_the_run():
    optimizer = OptimizerConfig(kind="muon", muon_momentum_start=0.85)
    found = [
        scheduled(0, at, None, settings(), optimizer)["muon_momentum"] for at in (0, 150, 299, 300, 9999)
    ]
    assert found == pytest.approx([0.85, 0.9, 0.95 - 0.1 / 300, 0.95, 0.95])


# ------------------------------------------------------------------------------------------------ the clock


def by_clock(settings, pace, *, steps=None):
    """Return the rates and the seconds of a stage whose step n takes ``pace(n)`` seconds."""
    rates, spent, end = [], 0.0, steps
    while end is None or len(rates) < end:
        rates.append(lr_factor(len(rates), end, settings))
        spent += pace(len(rates))
        end = end_in_time(len(rates), spent, end, settings) or end
    return rates, spent


@given(st.floats(0.01, 0.95), st.integers(0, 20), st.floats(0.5, 20), st.floats(0, 1))
def test_max_hours_includes_the_whole_decay(fraction, warmup, seconds, noise):
    hour = settings(
        max_steps=None,
        max_hours=1,
        schedule="wsd",
        decay_fraction=fraction,
        warmup_steps=warmup,
        min_lr_ratio=0.0,
    )
    assume((1 - fraction) * 3600 > (warmup + 1) * 2 * seconds)
    rates, spent = by_clock(hour, lambda n: seconds * (1 + noise * (-1) ** n))
    assert spent == pytest.approx(3600, abs=4 * seconds / (1 - fraction))
    # The rates are those of a stage that had this number of steps from the start.
    assert rates == [lr_factor(step, len(rates), hour) for step in range(len(rates))]


# ------------------------------------------------------------------------------------------------ the length


class Thousand:
    """A model of 1,000 parameters with 10 FLOPs per byte and loop at a window of 16, linear in the window."""

    def scaling_parameters(self):
        return 1000

    def flops_per_token(self, length, n_loops=None):
        return 10 * n_loops * length / 16


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"tokens": 3300}, 51),
        ({"max_steps": 7}, 7),
        ({"target_flops": 64_000}, 50),
        ({"tokens_per_parameter": 20}, 312),
        ({"tokens": 3300, "max_steps": 60, "target_flops": 1e5, "tokens_per_parameter": 3}, 46),
        ({"tokens": 1}, 1),
        ({"target_flops": 1e-3}, 1),
        ({"max_hours": 1, "schedule": "wsd"}, None),
        ({"max_hours": 1, "tokens": 3300, "schedule": "constant"}, 51),
    ],
)
def test_the_first_limit_ends_the_stage(limits, steps):
    assert horizon(spec_of(**limits), Thousand()) == steps


def spec_of(**stage):
    config = {
        "datasets": {"d": {"source": {"kind": "pydocs"}}},
        "runs": {
            "r": {
                "data": "d",
                "model": "tiny",
                "defaults": {"seq_len": 16, "micro_batch": 2, "grad_accum": 2, "n_loops": 2},
                "stages": [{"name": "a", **stage}],
            }
        },
    }
    return load_config(config).stage("r", "a")


def test_an_average_that_would_start_after_the_end_is_refused():
    with pytest.raises(ValueError, match=r"r/a: ema.start_step: 7 is not before the stage's end, .* 7 steps"):
        horizon(spec_of(max_steps=7, ema={"start_step": 7}), Thousand())
