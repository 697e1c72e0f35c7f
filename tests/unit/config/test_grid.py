import copy

import pytest
import yaml

from spider.config import ConfigError, load_config
from spider.config.settings import LIMIT

BASE = """
datasets: {docs: {source: {kind: pydocs}}}
runs:
  demo:
    data: docs
    model: tiny
    defaults: {seq_len: 128, micro_batch: 4}
    stages: [{name: a, tokens: 10_240}, {name: b, max_steps: 7, warmup_steps: 0}]
"""


def config_with(grid: str, **run):
    config = yaml.safe_load(BASE)
    config["runs"]["demo"] |= {"grid": yaml.safe_load(grid), **run}
    return config


def test_a_grid_becomes_one_run_for_each_combination():
    config = load_config(config_with("{model.recurrence.loops: [2, 4], lr: [4e-3, 0.8]}"))
    names = ["demo-loops2-lr4e-3", "demo-loops2-lr8e-1", "demo-loops4-lr4e-3", "demo-loops4-lr8e-1"]
    assert list(config.runs) == names and config.sweeps == {"demo": names}
    for name, loops, lr in zip(names, (2, 2, 4, 4), (4e-3, 0.8, 4e-3, 0.8), strict=True):
        plain = yaml.safe_load(BASE)
        plain["runs"] = {name: plain["runs"]["demo"]}
        plain["runs"][name]["model"] = {"preset": "tiny", "recurrence": {"loops": loops}}
        plain["runs"][name]["defaults"]["lr"] = lr
        assert load_config(plain).runs[name] == config.runs[name]
        for stage in ("a", "b"):
            assert load_config(plain).stage(name, stage).identity == config.stage(name, stage).identity


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("{model.recurrence.loops: [2]}", ["demo-loops2"]),
        ("{optimizer.kind: [muon, adamw8bit]}", ["demo-kindmuon", "demo-kindadamw8bit"]),
        ("{compile: [true, null]}", ["demo-compiletrue", "demo-compilenull"]),
        ("{lr: [3.0, 0.15, 3.0e+12]}", ["demo-lr3", "demo-lr15e-2", "demo-lr3e12"]),
        ("{model: {small: {preset: tiny, hidden: 64}, full: tiny}}", ["demo-small", "demo-full"]),
        ("{model.boundary.hidden: [64], model.hidden: [96]}", ["demo-boundary_hidden64-model_hidden96"]),
        ("{stages.b.max_steps: [3, 5], seed: [0]}", ["demo-max_steps3-seed0", "demo-max_steps5-seed0"]),
    ],
)  # fmt: skip
def test_the_names_of_runs_are_readable(grid, names):
    assert list(load_config(config_with(grid)).runs) == names


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("{lrr: [1]}", 'runs.demo.grid.lrr: unknown key; did you mean "lr"?'),
        ("{lr: [1.0, 2.0, 1.0]}", "runs.demo.grid.lr: 1.0 occurs twice"),
        ("{lr: [4e-3, 4.0e-3]}", "two combinations are both named 'demo-lr4e-3'"),
        ("{lr: [-1.0]}", "runs.demo-lr-1.defaults.lr: must be positive (got -1.0)"),
    ],
)
def test_a_wrong_grid_is_refused_with_its_key_and_the_reason(grid, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config_with(grid))
    assert message in str(caught.value)


def test_a_grid_of_too_many_runs_is_refused():
    fits = config_with(str({"seed": list(range(LIMIT // 2)), "lr": [1.0, 2.0]}))
    assert len(load_config(fits).runs) == LIMIT
    with pytest.raises(ConfigError, match=rf"201 x 3 values make 603 runs, and a grid may make {LIMIT}"):
        load_config(config_with(str({"seed": list(range(201)), "lr": [1.0, 2.0, 3.0]})))


def test_two_runs_of_one_name_are_refused():
    config = config_with("{lr: [4e-3]}")
    config["runs"]["demo-lr4e-3"] = copy.deepcopy(yaml.safe_load(BASE)["runs"]["demo"])
    for runs in (config["runs"], dict(reversed(config["runs"].items()))):
        with pytest.raises(ConfigError, match="'demo-lr4e-3', but another run has that name"):
            load_config(config | {"runs": runs})
