import math

import pytest

from spider.config import StageSettings
from spider.training.schedule import lr_factor


def settings(**changes):
    return StageSettings(max_steps=100, **{"warmup_steps": 10, "min_lr_ratio": 0.1, **changes})


def factors(steps, **changes):
    return [lr_factor(step, steps, settings(**changes)) for step in range(steps)]


def test_warm_up_rises_linearly_from_its_first_share_to_the_peak():
    assert factors(100)[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 5), (5, 5), (6, 5), (100, 0), (100, 10)])
def test_no_step_trains_at_rate_zero(schedule, min_lr_ratio, steps, warmup_steps):
    found = factors(steps, schedule=schedule, min_lr_ratio=min_lr_ratio, warmup_steps=warmup_steps)
    assert len(found) == steps
    assert all(0 < f <= 1 for f in found)


def test_cosine_passes_the_middle_half_way_and_linear_falls_evenly():
    cosine = factors(110, schedule="cosine")
    assert cosine[60] == pytest.approx((1 + 0.1) / 2)
    assert cosine[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    linear = factors(110, schedule="linear")
    assert linear[35] == pytest.approx(1 - 0.9 / 4)
    assert cosine[-1] > linear[-1] * 0.9 > 0.09


def test_constant_stays_at_the_peak():
    assert set(factors(100, schedule="constant")[10:]) == {1.0}


def test_a_step_outside_the_stage_is_refused():
    with pytest.raises(ValueError, match="step 100 is not one of"):
        lr_factor(100, 100, settings())
