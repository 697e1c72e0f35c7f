"""The cause that moves a metric: suspects, hybrids of two runs, and halving, with measured functions."""

from __future__ import annotations

import copy

import pytest

from spider.config import ConfigError, load_config
from spider.provenance.bisection import Search
from spider.provenance.hybrids import (
    Setting,
    block_of,
    hybrid,
    named,
    order_of,
    run_of,
    settings_between,
    suspects_of,
)

DATASETS = {name: {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.1} for name in "ab"}
RUN = {
    "data": "a",
    "model": {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2},
    "defaults": {"seq_len": 32, "lr": 1e-3},
    "stages": [{"name": "first", "max_steps": 6}, {"name": "second", "max_steps": 6, "schedule": "linear"}],
}


def changed(**keys):
    """Return the run with other values at dotted keys; ``__`` stands for a dot."""
    run = copy.deepcopy(RUN)
    for key, value in keys.items():
        *blocks, last = key.split("__")
        inner = run
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return run


def compared(one, other, last=("second", "second")):
    """Return both blocks, the order of stages, and a function for what is wrong with a hybrid."""
    config = load_config({"datasets": DATASETS, "runs": {"one": one, "other": other}})
    blocks = [block_of(config, run, stage) for run, stage in zip(("one", "other"), last, strict=True)]
    order = order_of(*(list(block["stages"]) for block in blocks))

    def problem(suspects):
        try:
            load_config({"datasets": DATASETS, "runs": {"h": run_of(hybrid(blocks[0], suspects), order)}})
        except ConfigError as error:
            return str(error)
        return ""

    return blocks, order, problem


def suspects(one, other, **rest):
    blocks, _, problem = compared(one, other, **rest)
    return suspects_of(settings_between(*blocks), problem)


def letters(count):
    return [(Setting(name, ((name,),), 0, 1),) for name in "abcdefghijklmnop"[:count]]


def search(count, measure, valid=lambda chosen: True):
    found = Search(1.5, 1.55)
    return found, named([found.find(letters(count), lambda chosen: measure(named(chosen)), valid)])


@pytest.mark.parametrize("guilty", "abcdefgh")
@pytest.mark.parametrize("noise", [0.01, -0.01])
def test_the_guilty_one_of_eight_is_found_in_four_measurements(guilty, noise):
    found, name = search(8, lambda names: 1.5 + (0.05 if guilty in names else noise))
    assert name == guilty
    assert len(found.measured) <= 4
    assert found.share(found.value(found.measured[-1][0][0])) > 0.5


@pytest.mark.parametrize("count", range(1, 17))
def test_any_number_of_suspects_is_halved(count):
    for guilty in "abcdefghijklmnop"[:count]:
        found, name = search(count, lambda names, guilty=guilty: 1.5 + 0.05 * (guilty in names))
        assert name == guilty
        assert len(found.measured) <= (count - 1).bit_length() + 1


def test_a_metric_that_falls_is_searched_as_one_that_rises():
    found = Search(1.55, 1.5)
    suspect = found.find(
        letters(8), lambda chosen: 1.5 if "f" in named(chosen) else 1.55, lambda chosen: True
    )
    assert named([suspect]) == "f"


def test_two_causes_together_are_not_named_as_one():
    found, name = search(8, lambda names: 1.5 + 0.05 * ("a" in names and "c" in names))
    assert found.share(next(value for chosen, value in found.measured if named(chosen) == name)) == 0
    chosen, value = found.smallest()
    assert (named(chosen), value) == ("a, b, c, d", 1.55)


def test_causes_in_both_halves_are_in_no_tested_set():
    found, _ = search(8, lambda names: 1.5 + 0.05 * ("a" in names and "h" in names))
    assert found.smallest() is None


def test_no_invalid_half_is_measured():
    """Two suspects are valid alone, and not together."""

    def valid(chosen):
        return not {"a", "b"} <= set(named(chosen).split(", "))

    for guilty in "abcdefgh":
        found, name = search(8, lambda names, guilty=guilty: 1.5 + 0.05 * (guilty in names), valid)
        assert name == guilty
        assert all(valid(chosen) for chosen, _ in found.measured)


def test_settings_have_one_name_wherever_they_are_set():
    one = changed()
    other = changed(defaults={"seq_len": 32})
    other["stages"] = [{**stage, "lr": 2e-3} for stage in RUN["stages"]]
    (suspect,) = suspects(one, other)
    assert str(suspect[0]) == "lr: 0.001 / 0.002"


def test_a_setting_of_one_stage_has_the_name_of_the_stage():
    other = changed()
    other["stages"][1]["max_steps"] = 8
    assert named(suspects(RUN, other)) == "stages.second.max_steps"


def test_what_decides_no_weight_and_no_score_is_no_suspect():
    other = changed(
        resources__threads=1, defaults__log_every=3, defaults__val_every=0, evaluation__prompt="a", seed=1
    )
    other["model"]["preset"] = "gpt-d12"
    assert "seed" in named(suspects(RUN, other)).split(", ")
    left_out = ("resources", "model.preset", "log_every", "val_every", "evaluation.prompt")
    assert not [name for name in left_out if name in named(suspects(RUN, other))]


def test_datasets_and_seeds_are_suspects():
    assert named(suspects(RUN, changed(data="b", seed=1))) == "seed, data"


def test_settings_that_are_only_valid_together_are_one_suspect():
    """Three heads need a width of 48. The seed needs neither."""
    found = suspects(RUN, changed(model__hidden=48, model__heads=3, seed=1))
    names = {frozenset(setting.name for setting in one) for one in found}
    assert names == {frozenset({"model.hidden", "model.heads"}), frozenset({"seed"})}


def test_another_limit_of_a_stage_is_one_suspect():
    other = changed()
    other["stages"] = [{"name": "first", "max_steps": 6}, {"name": "second", "tokens": 500}]
    found = [sorted(setting.name for setting in one) for one in suspects(RUN, other)]
    assert ["stages.second.max_steps", "stages.second.tokens"] in found


def test_another_family_is_one_suspect():
    assert named(suspects(RUN, changed(model={"preset": "tiny"}))) == "model"


def test_a_later_stage_is_a_suspect_and_what_follows_the_compared_stage_is_not():
    other = changed()
    other["stages"] = [*RUN["stages"], {"name": "third", "max_steps": 4}]
    assert named(suspects(RUN, other, last=("second", "third"))) == "stages.third"
    assert suspects(RUN, other) == []
    (blocks, order, _) = compared(RUN, other, last=("second", "third"))
    made = run_of(hybrid(blocks[0], suspects(RUN, other, last=("second", "third"))), order)
    assert [stage["name"] for stage in made["stages"]] == ["first", "second", "third"]
    back = run_of(hybrid(blocks[1], suspects(other, RUN, last=("third", "second"))), order)
    assert [stage["name"] for stage in back["stages"]] == ["first", "second"]


def test_an_earlier_stage_keeps_its_place():
    assert order_of(["b", "c"], ["a", "b", "x", "c"]) == ["a", "b", "x", "c"]
    with pytest.raises(ValueError, match="another order"):
        order_of(["a", "b"], ["b", "a"])


def test_a_hybrid_of_all_suspects_is_the_other_run():
    other = changed(seed=3, data="b", optimizer__betas=[0.8, 0.9], defaults__ema={"decay": 0.5})
    blocks, order, problem = compared(RUN, other)
    found = suspects_of(settings_between(*blocks), problem)
    plain = {"datasets": DATASETS, "runs": {"run": run_of(hybrid(blocks[0], found), order)}}
    made = load_config(plain).stage("run", "second")
    wanted = load_config({"datasets": DATASETS, "runs": {"run": other}}).stage("run", "second")
    assert made.identity == wanted.identity


def test_the_settings_that_cut_a_step_are_one_suspect():
    other = changed(defaults__micro_batch=32, defaults__grad_accum=2, seed=1)
    assert [named([one]) for one in suspects(RUN, other)] == ["seed", "micro_batch, grad_accum"]
