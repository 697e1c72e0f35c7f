"""The test of pairs is seldom wrong, finds effects, and stops early."""

import math

import numpy as np
import pytest
from spider_lab.sequential import ALPHA, after, bounds

from spider.evaluation.noise import Noise

MOST = 5


def decide(differences, noise):
    for k in range(1, MOST + 1):
        shown = after(differences[:k], noise, MOST)
        if shown.stops:
            break
    return shown, k


def verdicts(effect, *, count=400, deviation=0.01, freedom=20, seed=0):
    """Return outcomes and numbers of pairs of tests, with noise that is estimated from earlier runs."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        earlier = deviation * math.sqrt(random.chisquare(freedom) / freedom) if freedom else 0
        pairs = random.normal(effect, deviation * math.sqrt(2), MOST).tolist()
        found.append(decide(pairs, Noise(earlier, freedom) if freedom else None))
    return found


@pytest.mark.parametrize("freedom", [0, 4, 20])
def test_a_verdict_without_a_difference_is_rare(freedom):
    found = [shown.outcome for shown, _ in verdicts(0.0, freedom=freedom, count=1000)]
    assert 1 - found.count("not shown") / len(found) <= ALPHA + 0.02


def test_an_effect_of_two_deviations_is_found_with_fewer_pairs_than_are_allowed():
    found = verdicts(-0.02)
    assert [shown.outcome for shown, _ in found].count("better") >= 0.75 * len(found)
    assert not any(shown.outcome == "worse" for shown, _ in found)
    assert np.mean([k for _, k in found]) < 0.7 * MOST
    assert np.mean([k for _, k in verdicts(0.0)]) < 0.7 * MOST


def test_the_interval_holds_the_effect_whenever_the_test_stops():
    found = [shown.low <= -0.02 <= shown.high for shown, _ in verdicts(-0.02)]
    assert np.mean(found) >= 1 - ALPHA - 0.03


def test_one_pair_decides_nothing_if_no_earlier_run_has_shown_the_noise():
    shown = after([0.5], None, MOST)
    assert shown.outcome == "not shown" and not shown.stops and math.isinf(shown.high)
    assert bounds(0, MOST)[0] == math.inf
    assert after([-0.5], Noise(0.01, 20), MOST).outcome == "better"


def test_pairs_that_vary_far_more_than_earlier_runs_count_alone():
    wide = after([-0.5, 0.3], Noise(0.001, 50), MOST)
    assert wide.outcome == "not shown" and wide.high - wide.low > 1


def test_early_verdicts_need_more_evidence():
    levels = bounds(20, MOST)
    assert list(levels) == sorted(levels, reverse=True) and levels is bounds(20, MOST)
