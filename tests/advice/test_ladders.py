"""Advice about ladders."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from spider.config import load_config
from spider.describe import too_short
from spider.ladders.fit import fit
from spider.ladders.forecast import keep
from tests.unit.ladders.test_fit import BUDGETS, ladder

from .followed import advised, refused
from .test_configuration import BASE, LADDER

ADVICE = {
    "ladders/fit.py": [
        ("the best size is below the smallest; add smaller ones", (2.0, 4.0, 8.0), (0.25, 0.5, 1.0)),
        ("the best size is above the largest; add larger ones", (0.1, 0.2, 0.4), (0.8, 1.6, 3.2)),
    ]
}


def test_sizes_and_seeds_are_added_to_a_ladder():
    for phrase, at, more in ADVICE["ladders/fit.py"]:
        said = [curve.problem or "" for curve in fit(ladder(BUDGETS, at=at)).curves]
        assert any(phrase in one for one in said), said
        assert not any(curve.problem for curve in fit(ladder(BUDGETS, at=sorted((*at, *more)))).curves)
    sizes = (0.2, 0.5, 1.0, 2.0, 5.0)
    bent = [
        replace(one, bpb=one.bpb + (0.05 if "-1.0-" in one.run and one.budget == BUDGETS[0] else 0))
        for one in ladder(BUDGETS, noise=0.002, common=0, at=sizes)
    ]
    (said,) = fit(bent).left_out
    advised(said, "ladders/fit.py", "{}: leave out size {}")
    assert not fit([one for one in bent if f"{one.size:g}" != said.rpartition(" ")[2]]).left_out
    with_fewer = load_config(BASE | {"ladders": {"l": LADDER}})
    runs = [{"run": run, "stages": [{"steps": 1}]} for run in with_fewer.rungs["l"].rungs]
    advised(
        too_short(with_fewer, runs)[0], "describe.py", "give it more FLOPs, a smaller size or a smaller batch"
    )
    for one in runs:
        one["stages"][0]["steps"] = 10_000
    assert not too_short(with_fewer, runs)


def test_a_training_that_began_before_its_forecast_is_moved_away(tmp_path, finished):
    folder = shutil.copytree(finished, tmp_path / "a", symlinks=True)
    with refused(
        "ladders/forecast.py", "move the folder away to train again, or remove `forecast` from the run"
    ):
        keep(tmp_path / "forecast.json", folder, 1e9)
    folder.rename(tmp_path / "aside")
    with pytest.raises(
        ValueError, match="needs a forecast before it starts"
    ):  # The workflow writes it first.
        keep(tmp_path / "forecast.json", folder, 1e9)
