"""How much seeds alone move a score."""

import pytest

from spider.evaluation.noise import Noise, pooled


def test_the_noise_is_pooled_over_groups():
    assert pooled([[1.0]]) is None
    assert Noise(0.01, 5).hides(0.027, models=2) and not Noise(0.01, 5).hides(0.027, models=1)
    found = pooled([[1.0, 1.2], [3.0, 3.3, 3.6], [5.0]])
    assert found.freedom == 3 and found.deviation == pytest.approx(((0.02 + 0.18) / 3) ** 0.5)
