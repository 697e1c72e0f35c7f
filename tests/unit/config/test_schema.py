import copy
import json
import re
from pathlib import Path

import pytest

from spider.config import ConfigError, load_config
from spider.config.schema import read_yaml

ROOT = Path(__file__).parents[3]

BASE = {
    "datasets": {"docs": {"source": {"kind": "pydocs"}}},
    "runs": {
        "demo": {
            "data": "docs",
            "model": "tiny",
            "defaults": {"seq_len": 128, "micro_batch": 4, "lr": 1e-3},
            "stages": [{"name": "a", "tokens": 10_240}, {"name": "b", "max_steps": 7, "lr": 2e-3}],
        }
    },
}


def changed(path: str, value) -> dict:
    """BASE with the value at a dotted path replaced."""
    config = copy.deepcopy(BASE)
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    block = config
    for key in parents:
        block = block[key]
    block[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stages.1.tokens", -5, "stages[1].tokens: must be positive (got -5)"),
        ("stages.1.tokns", 5, 'stages[1].tokns: unknown key; did you mean "tokens"?'),
        ("stages.1.name", "a", "stages[1].name: 'a' is used twice in this run"),
        ("stages", [{"name": "a"}], "stages[0]: needs tokens, max_steps,"),
        ("model", "tinny", "model.preset: no preset 'tinny'; did you mean \"tiny\"?"),
        ("model", {"moe": {"exprts": 3}}, 'model.moe.exprts: unknown key; did you mean "experts"?'),
        ("model", {"family": "gpt", "depth": 12, "heads": 5}, "model.heads: depth: 12 means 6 heads of 128"),
        ("model", {"family": "gpt", "depth": 1.5}, "model.depth: must be a whole number"),
        ("seed", True, "seed: must be a number (got true)"),  # as YAML reads `yes`
        ("data", "dosc", "stages[0].data: no dataset 'dosc'; did you mean \"docs\"?"),
        ("optimizer", {"betas": [0.9, 1]}, "optimizer.betas[1]: must be below 1.0 (got 1)"),
        ("resources", {"processes": 7}, "windows, which 7 processes cannot share evenly; the nearest batch"),
        (
            "evaluation",
            {"ttt": {"chunk": 100}},
            "ttt.chunk: must divide the window of its evaluation, 128 in",
        ),
        (
            "evaluation",
            {"seq_len": 9000, "ttt": {}},
            "ttt.chunk: must divide the window of its evaluation, 9",
        ),
        (
            "evaluation",
            {"ttt": {"chunk": 256, "objective": "projection", "layers": "all"}},
            "ttt.chunk: with objective: projection must be shorter than the window",
        ),
    ],
)
def test_a_wrong_run_is_refused_with_the_key_and_the_reason(path, value, message):
    with pytest.raises(ConfigError) as caught:
        load_config(changed(f"runs.demo.{path}", value))
    assert str(caught.value).startswith("runs.demo.") and message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split_by", {"column": "url", "pattern": "(["}, "split_by.pattern: is not a regular expression: un"),
        (
            "license",
            "CC BY 4.0",
            "license: must be a license's name on the hub, in lower case, such as cc-by",
        ),
        ("language", False, "language: must be text (got False)"),  # as YAML reads `no`
        ("ngram", 0.995, "ngram: leaves no document to train on; validation + ngram = 0.005 + 0.995"),
        ("source", {"kind": "hib"}, "source.kind: no source 'hib'"),
        ("validation", 0, "validation must be above 0"),
    ],
)
def test_a_wrong_dataset_is_refused_with_the_key_and_the_reason(key, value, message):
    with pytest.raises(ConfigError) as caught:
        load_config(changed(f"datasets.docs.{key}", value))
    assert f"datasets.docs.{message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs: 1\ndatasets:\n  a: 1\n  b: 2\n  a: 3", "the key 'a' is given in line 3 and again in line 5"),
        ("results: a\n'results': b", "the key 'results' is given in line 1 and again in line 2"),
        ("a: [1, {b: {c: 1, d: 2,\n  c: 3}}]", "the key 'c' is given in line 1 and again in line 2"),
        ("a: {<<: {b: 1,\n b: 2}}", "the key 'b' is given in line 1 and again in line 2"),
        ("1: a\n0x1: b", "the key 1 is given in line 1 and again in line 2"),
        ('{\n\t"runs": {"a": 1,\n\t\t"a": 2}}', "the key 'a' is given in line 2 and again in line 3"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {message}; remove or rename one")):
        load_config(path)


def test_keys_of_a_merged_mapping_may_be_overridden(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &a {<<: {q: 1, r: 1}, q: 2}\nb: {<<: *a, q: 3}\nc: [*a, *a]\nd: &d [*d]")
    assert {**read_yaml(path), "d": 0} == {
        "a": {"q": 2, "r": 1}, "b": {"q": 3, "r": 1}, "c": [{"q": 2, "r": 1}] * 2, "d": 0,
    }  # fmt: skip
    path.write_text('{\n\t"a": ["b\\tc"]\n}')
    assert read_yaml(path) == json.loads(path.read_text())
    path.write_text("")
    assert read_yaml(path) is None


def test_a_stage_overrides_the_defaults_of_its_run_and_they_override_the_schema():
    config = load_config(BASE)
    a, b = config.stage("demo", "a"), config.stage("demo", "b")
    assert (a.settings.lr, b.settings.lr) == (1e-3, 2e-3)
    assert a.settings.seq_len == b.settings.seq_len == 128
    assert a.settings.warmup_steps == 200


def test_identity_sees_what_decides_the_weights_and_nothing_else():
    spec = load_config(BASE).stage("demo", "a")
    for path, value, same in [
        ("runs.demo.defaults.ema", {"decay": 0.99}, False),
        ("runs.demo.defaults.ckpt_every", 3, True),
        ("runs.demo.evaluation", {"max_bytes": 5}, True),
        ("runs.demo.evaluation", {"ttt": {"chunk": 128}}, True),
        ("runs.demo.stages.1.lr", 5e-3, True),
        ("runs.demo.defaults.lr", 5e-3, False),
        ("runs.demo.seed", 5, False),
        ("runs.demo.model", {"preset": "tiny", "hidden": 64}, False),
    ]:
        other = load_config(changed(path, value)).stage("demo", "a")
        assert (other.identity == spec.identity) is same, path


@pytest.mark.parametrize("path", ["config.yaml", *(f"presets/{p.name}" for p in ROOT.glob("presets/*.yaml"))])
def test_the_configurations_that_we_ship_are_valid(path):
    load_config(ROOT / path)


def test_a_password_or_token_in_the_address_of_the_store_is_refused():
    for uri in (
        "http://ada:lovelace@host:5000",
        "HTTPS://sesame-sesame@host",
        "postgresql://a:b@host/mlflow",
    ):
        with pytest.raises(ConfigError, match=r"tracking: uri holds a password or a token.*in the environme"):
            load_config({**BASE, "tracking": {"uri": uri}})
    for uri in ("https://host/a@b", "http://host?of=a@b", "postgresql://ada@host/mlflow"):
        assert load_config({**BASE, "tracking": {"uri": uri}}).tracking.uri == uri


def test_a_named_optimizer_is_its_settings_and_other_keys_override_it():
    named = changed("runs.demo.model", "gpt-cpu")
    found = {}
    for name in ("nanochat", {"preset": "nanochat"}, {"preset": "nanochat", "weight_decay": 0.1}):
        named["runs"]["demo"]["optimizer"] = name
        found[str(name)] = load_config(named).runs["demo"].optimizer
    plain, block, overridden = found.values()
    assert plain == block and plain.preset is None and plain.betas == (0.8, 0.95) and plain.clip is None
    assert overridden.changed() == {k: v for k, v in plain.changed().items() if k != "weight_decay"}
    named["runs"]["demo"] |= {"optimizer": "nanochat", "grid": {"optimizer.weight_decay": [0.1]}}
    (swept,) = load_config(named).runs.values()
    assert swept.optimizer == overridden


def test_depth_is_short_for_the_sizes_of_a_preset():
    for depth, preset in ((12, "gpt-d12"), (20, "gpt-d20"), (24, "gpt-d24")):
        sized, named = (
            {**changed("runs.demo.model", model)["runs"]["demo"]}
            for model in ({"preset": preset, "depth": depth}, preset)
        )
        blocks = [load_config({**BASE, "runs": {"demo": run}}).runs["demo"].model for run in (sized, named)]
        assert blocks[0] == blocks[1]
    odd = load_config(changed("runs.demo.model", {"family": "gpt", "depth": 13})).runs["demo"].model
    assert (odd.hidden, odd.layers, odd.heads, odd.head_dim) == (896, 13, 7, 128)
