"""Advice about comparisons of settings by pairs of runs, and about ladders."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from spider.checkpoints.records import Origin
from spider.config import load_config
from spider.describe import too_short
from spider.ladders.fit import fit
from spider.ladders.forecast import keep
from spider.verdicts.record import read_verdicts
from spider.verdicts.trial import Trial, with_change
from tests.unit.ladders.test_fit import BUDGETS, ladder
from tests.unit.verdicts.test_trial import (  # noqa: F401 (fixtures)
    demo,
    known,
    plain,
    trained,
    write,
)

from .followed import advised, refused
from .test_configuration import BASE, LADDER


def decide(demo, config, names, budget=None):  # noqa: F811
    trial = Trial(config, demo, names)
    return trial.decide(most=3, budget=budget, options=(), say=print)


def test_a_change_is_written_as_the_message_says(demo):  # noqa: F811
    config = load_config(plain(demo.root))
    with refused("verdicts/trial.py", "is not a setting; write KEY=VALUE, such as model.softcap=null"):
        with_change(config, "demo", ["lr"])
    with refused("verdicts/trial.py", "both runs of a pair have the same seed; compare other settings"):
        with_change(config, "demo", ["seed=3"])
    other, name = with_change(config, "demo", ["evaluation.max_bytes=500", "lr=1e-3"])
    with refused("verdicts/trial.py", "give both the same evaluation.data, {}"):
        Trial(other, demo, ("demo", name))
    other, name = with_change(config, "demo", ["lr=1e-3"])
    Trial(other, demo, ("demo", name))


def test_runs_of_a_pair_are_trained_or_moved_away(demo):  # noqa: F811
    config = known(demo)
    write(demo, config, "demo")
    config, name = with_change(config, "demo", ["model.width=16"])
    with refused("verdicts/trial.py", "no seed is trained of both {}; give a --budget to train some"):
        decide(demo, config, ("demo", name), budget=0)
    assert decide(demo, config, ("demo", name), budget=3600).pairs
    write(demo, config, name, text_sha256="0" * 64)
    with refused("verdicts/trial.py", "{} and {} were {} on different text; train both again"):
        decide(demo, config, ("demo", name))
    for one in ("demo", name):
        write(demo, config, one)
    assert decide(demo, config, ("demo", name)).pairs


def test_a_run_of_another_seed_gets_another_name(demo):  # noqa: F811
    config = known(demo)
    write(demo, config, "demo")
    changes = plain(demo.root)
    changes["runs"]["demo-seed1"] = changes["runs"]["slow"] | {"seed": 7}
    config, name = with_change(load_config(changes), "demo", ["model.width=32"])
    with refused("verdicts/trial.py", "has other settings than {}; give one of them another name"):
        decide(demo, config, ("demo", name))
    changes["runs"]["other"] = changes["runs"].pop("demo-seed1")
    config, name = with_change(load_config(changes), "demo", ["model.width=32"])
    assert decide(demo, config, ("demo", name)).pairs


def test_a_run_with_a_stage_that_the_configuration_lacks_is_moved_away(demo):  # noqa: F811
    config = known(demo)
    write(demo, config, "demo")
    config, name = with_change(config, "demo", ["model.width=16"])
    old = demo.stage(name, "old")
    shutil.copytree(demo.stage("demo", "main").path, old.path, symlinks=True)
    origin = Origin.read(old.origin)
    origin.model_copy(update={"fields": origin.fields | {"index": 1, "stage": "old"}}).write(old.origin)
    with refused("verdicts/trial.py", "was not trained with the settings of {}; move it away"):
        decide(demo, config, ("demo", name))
    old.path.parent.rename(demo.root / "aside")
    assert decide(demo, config, ("demo", name)).pairs


def test_a_line_that_is_not_a_verdict_is_removed(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text("{}\n")
    with refused("verdicts/record.py", "{}:{}: is not a verdict; remove the line"):
        read_verdicts(path)
    path.write_text("")
    assert read_verdicts(path) == []


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
