"""Advice of the messages of this extra."""

from __future__ import annotations

import shutil
from dataclasses import replace

import click
import pytest
from spider_lab.fit import fit
from spider_lab.forecast import too_short
from spider_lab.trial import Trial, with_change
from spider_lab.try_command import Duration
from spider_lab.verdicts import read_verdicts
from test_fit import BUDGETS
from test_fit import ladder as made_ladder
from test_forecast import plain as ladders
from test_trial import (  # noqa: F401 (fixtures)
    demo,
    known,
    plain,
    trained,
    write,
)

from spider.checkpoints.records import Origin
from spider.config import load_config
from tests.advice.followed import advised, refused


def decide(demo, config, names, budget=None):  # noqa: F811
    trial = Trial(config, demo, names)
    return trial.decide(most=3, budget=budget, options=(), say=print)


def test_a_change_is_written_as_the_message_says(demo):  # noqa: F811
    config = load_config(plain(demo.root))
    with refused("lab/trial.py", "is not a setting; write KEY=VALUE, such as model.softcap=null"):
        with_change(config, "demo", ["lr"])
    with refused("lab/trial.py", "both runs of a pair have the same seed; compare other settings"):
        with_change(config, "demo", ["seed=3"])
    other, name = with_change(config, "demo", ["evaluation.max_bytes=500", "lr=1e-3"])
    with refused("lab/trial.py", "give both the same evaluation.data, {}"):
        Trial(other, demo, ("demo", name))
    other, name = with_change(config, "demo", ["lr=1e-3"])
    Trial(other, demo, ("demo", name))


def test_runs_of_a_pair_are_trained_or_moved_away(demo):  # noqa: F811
    config = known(demo)
    write(demo, config, "demo")
    config, name = with_change(config, "demo", ["model.width=16"])
    with refused("lab/trial.py", "no seed is trained of both {}; give a --budget to train some"):
        decide(demo, config, ("demo", name), budget=0)
    assert decide(demo, config, ("demo", name), budget=3600).pairs
    write(demo, config, name, text_sha256="0" * 64)
    with refused("lab/trial.py", "{} and {} were {} on different text; train both again"):
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
    with refused("lab/trial.py", "has other settings than {}; give one of them another name"):
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
    with refused("lab/trial.py", "was not trained with the settings of {}; move it away"):
        decide(demo, config, ("demo", name))
    old.path.parent.rename(demo.root / "aside")
    assert decide(demo, config, ("demo", name)).pairs


def test_a_line_that_is_not_a_verdict_is_removed(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text("{}\n")
    with refused("lab/verdicts.py", "{}:{}: is not a verdict; remove the line"):
        read_verdicts(path)
    path.write_text("")
    assert read_verdicts(path) == []


def test_a_budget_is_a_duration():
    with pytest.raises(click.BadParameter) as caught:
        Duration().convert("5", None, None)
    advised(str(caught.value), "lab/try_command.py", "is not a duration; write 90s, 30m or 2h")
    assert Duration().convert("90s", None, None) == 90


def test_sizes_and_seeds_are_added_to_a_ladder():
    for at, more in (((2.0, 4.0, 8.0), (0.25, 0.5, 1.0)), ((0.1, 0.2, 0.4), (0.8, 1.6, 3.2))):
        said = " ".join(curve.problem or "" for curve in fit(made_ladder(BUDGETS, at=at)).curves)
        if more < at:
            advised(said, "lab/fit.py", "the best size is below the smallest; add smaller ones")
        else:
            advised(said, "lab/fit.py", "the best size is above the largest; add larger ones")
        assert not any(c.problem for c in fit(made_ladder(BUDGETS, at=sorted((*at, *more)))).curves)
    sizes = (0.2, 0.5, 1.0, 2.0, 5.0)
    bent = [
        replace(one, bpb=one.bpb + (0.05 if "-1.0-" in one.run and one.budget == BUDGETS[0] else 0))
        for one in made_ladder(BUDGETS, noise=0.002, common=0, at=sizes)
    ]
    (said,) = fit(bent).left_out
    advised(said, "lab/fit.py", "{}: leave out size {}")
    assert not fit([one for one in bent if f"{one.size:g}" != said.rpartition(" ")[2]]).left_out


def test_a_ladder_is_written_as_the_message_says(tmp_path):
    config = ladders(tmp_path)
    config["ladders"]["toy"] |= {"links": {"lr": "width.real"}, "grid": {"seed": [1, 2]}}
    with refused("lab/ladders.py", "has no grid of its own; write rungs and target"):
        load_config(config)
    del config["ladders"]["toy"]["grid"]
    with refused("lab/ladders.py", "is not a part of a formula; write {}"):
        load_config(config)
    config["ladders"]["toy"]["links"]["lr"] = "1 / width"
    config["ladders"]["toy"]["rungs"][0]["flops"] = 1e6
    said = too_short(load_config(config), "toy")
    advised(said[0], "lab/forecast.py", "give it more FLOPs, a smaller size or a smaller batch")
    config["ladders"]["toy"]["rungs"] = [{"flops": flops, "sizes": [8, 16, 32]} for flops in (6e8, 8e8)]
    assert not too_short(load_config(config), "toy")
