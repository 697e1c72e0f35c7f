"""How much seeds alone move a score, and which table then marks no model as the best."""

import pytest

from spider.evaluation.noise import Noise, pooled, undecided


def test_the_noise_is_pooled_over_groups():
    assert pooled([[1.0]]) is None
    assert Noise(0.01, 5).hides(0.027, models=2) and not Noise(0.01, 5).hides(0.027, models=1)
    found = pooled([[1.0, 1.2], [3.0, 3.3, 3.6], [5.0]])
    assert found.freedom == 3 and found.deviation == pytest.approx(((0.02 + 0.18) / 3) ** 0.5)


def test_no_model_is_the_best_if_seeds_alone_move_a_score_as_much():
    noise = Noise(deviation=0.01, freedom=4)
    near = [("one", 1.0, True), ("two", 1.02, True), ("three", 1.5, True)]
    said = undecided(near, noise)
    assert said.startswith("No model is marked as the best: one and two differ by no more than seeds alone")
    assert undecided(near, None) is None
    assert undecided([("one", 1.0, True), ("two", 1.03, True)], noise) is None
    assert undecided([("xz", 1.0, False), ("zstd", 1.001, False)], noise) is None
