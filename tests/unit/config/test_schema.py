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

STREAM = {"source": {"kind": "stream", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}}


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
        ("runs.demo.stages.1.tokens", -5, "runs.demo.stages[1].tokens: must be positive (got -5)"),
        ("runs.demo.stages.1.tokns", 5, 'runs.demo.stages[1].tokns: unknown key; did you mean "tokens"?'),
        ("runs.demo.model", "tinny", "runs.demo.model.preset: no preset 'tinny'; did you mean \"tiny\"?"),
        (
            "runs.demo.model",
            {"preset": "tiny", "moe": {"exprts": 3}},
            'runs.demo.model.moe.exprts: unknown key; did you mean "experts"?',
        ),
        (
            "runs.demo.model",
            {"preset": "tiny", "attention": {"rope_dim": 15}},
            "runs.demo.model.attention: rope_dim must be even, RoPE rotates pairs (got 15)",
        ),
        ("runs.demo.precision", "fp9", "runs.demo.precision: must be one of 'auto', 'fp8', 'bf16' or 'fp32'"),
        ("runs.demo.seed", "x", "runs.demo.seed: must be a whole number (got 'x')"),
        ("runs.demo.seed", True, "runs.demo.seed: must be a number (got true)"),  # as YAML reads `yes`
        (
            "datasets.docs.split_by",
            {"column": "url", "pattern": "(["},
            "datasets.docs.split_by.pattern: is not a regular expression: unterminated character set",
        ),
        (
            "datasets.docs.license",
            "CC BY 4.0",
            "datasets.docs.license: must be a license's name on the hub, in lower case, such as cc-by-4.0",
        ),
        (
            "datasets.docs.language",
            "english",
            "datasets.docs.language: must be a language code of two or three letters such as en, or code,",
        ),
        ("datasets.docs.language", False, "datasets.docs.language: must be text (got False)"),  # `no`
        ("datasets.docs.ngram", 1, "datasets.docs.ngram: must be below 1.0 (got 1)"),
        ("datasets.docs.ngram", -0.1, "datasets.docs.ngram: must be at least 0.0 (got -0.1)"),
        (
            "datasets.docs.ngram",
            0.995,
            "datasets.docs.ngram: leaves no document to train on; validation + ngram = 0.005 + 0.995 must",
        ),
        ("runs.demo.data", "dosc", "runs.demo.stages[0].data: no dataset 'dosc'; did you mean \"docs\"?"),
        ("runs.demo.stages", [], "runs.demo.stages: must not be empty"),
        ("runs.demo.stages", [{"name": "a"}], "runs.demo.stages[0]: needs tokens, max_steps,"),
        ("runs.demo.optimizer", "nanochatt", "runs.demo.optimizer.preset: no optimizer 'nanochatt'; did you"),
        (
            "runs.demo.optimizer",
            {"betas": [0.9, 1]},
            "runs.demo.optimizer.betas[1]: must be below 1.0 (got 1)",
        ),
        (
            "runs.demo.optimizer",
            {"groups": {"head": {"lr_ratio": 2}}},
            "runs.demo.optimizer.groups.head: the family spider has no such group; its groups are matrices, "
            "tables, vectors",
        ),
        (
            "runs.demo.model",
            {"family": "gpt", "depth": 12, "heads": 5},
            "runs.demo.model.heads: depth: 12 means 6 heads of 128 and heads: 6 (got 5); leave heads",
        ),
        (
            "runs.demo.model",
            {"family": "gpt", "depth": 12, "kv_heads": 4},
            "runs.demo.model: kv_heads: 4 does not divide heads: 6",
        ),
        ("runs.demo.model", {"family": "gpt", "depth": 1.5}, "runs.demo.model.depth: must be a whole number"),
        (
            "runs.demo.resources",
            {"processes": 7},
            "runs.demo.stages[0]: a step has micro_batch x grad_accum = 4 windows, which 7 processes cannot "
            "share evenly; the nearest batch that they can share is micro_batch: 1, grad_accum: 7 (7 windo",
        ),
        ("runs.demo.stages.1.name", "a", "runs.demo.stages[1].name: 'a' is used twice in this run"),
        ("runs.demo.stages.1.name", "../x", "runs.demo.stages[1].name: a name is letters, digits"),
        ("datasets.docs.source", {"kind": "hib"}, "datasets.docs.source.kind: no source 'hib'"),
        ("datasets.docs.source", {"kind": "hub"}, "datasets.docs.source.repo: is required"),
        ("datasets.docs.validation", 0, "datasets.docs.validation must be above 0"),
        ("runs", [], "runs: must be a mapping"),
        (
            "runs.demo.defaults.keep_every",
            70,
            "runs.demo.stages[0].keep_every: must be a multiple of ckpt_every, because only saved "
            "steps can be kept (got 70, ckpt_every is 50)",
        ),
        (
            "runs.demo.evaluation",
            {"ttt": {"layers": []}},
            "runs.demo.evaluation.ttt.layers: must be all, or a list of layers, counted from 0 (got [])",
        ),
        (
            "runs.demo.evaluation",
            {"ttt": {"chunk": 100}},
            "runs.demo.evaluation.ttt.chunk: must divide the window of its evaluation, 128 in stage b, or be "
            "at least as long (got 100)",
        ),
        (
            "runs.demo.evaluation",
            {"seq_len": 9000, "ttt": {}},
            "runs.demo.evaluation.ttt.chunk: must divide the window of its evaluation, 9000 in stage b, or",
        ),
        (
            "runs.demo.evaluation",
            {"ttt": {"chunk": 256, "objective": "projection", "layers": "all"}},
            "runs.demo.evaluation.ttt.chunk: with objective: projection must be shorter than the window of "
            "its evaluation, 128 in stage b (got 256)",
        ),
        (
            "runs.demo.evaluation",
            {"ttt": {"chunk": 128, "reset": "window"}},
            "runs.demo.evaluation.ttt.chunk: with reset: window must be shorter than the window of its",
        ),
        (
            "runs.demo.evaluation",
            {"ttt": {"layers": [0, 99]}},
            "runs.demo.evaluation.ttt.layers: 99 is not one of the model's ",
        ),
        ("runs.demo.tf32", "high", "runs.demo.tf32: must be true or false (got 'high')"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_key_and_the_reason(path, value, message):
    with pytest.raises(ConfigError) as caught:
        load_config(changed(path, value))
    assert message in str(caught.value)


def test_a_removed_key_is_refused_with_what_to_do():
    model = {"preset": "tiny", "recurrence": {"halting": False}}
    stages = [{"name": "a", "max_steps": 1}]
    plain = {"store": "s", "datasets": {"d": {"source": {"kind": "pydocs"}}}}
    plain["runs"] = {"r": {"data": "d", "model": model, "stages": stages}}
    with pytest.raises(ConfigError) as caught:
        load_config(plain)
    lines = str(caught.value).splitlines()
    assert "store: was removed; link `raw` of the one results folder into the other" in lines
    assert "runs.r.model.recurrence.halting: was removed; leave it out; this part is always on" in lines


def test_every_problem_is_reported_at_once():
    config = changed("runs.demo.seed", -1)
    config["runs"]["demo"]["stages"][0]["seq_len"] = "long"
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_not_yaml_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML"):
        load_config(path)


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
        ("runs.demo.defaults.keep_every", 100, True),
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


@pytest.mark.parametrize(
    "uri",
    [
        "http://ada:lovelace@host:5000",
        "https://sesame-sesame@host/path",
        "HTTPS://sesame-sesame@host",
        "postgresql://ada:lovelace@host/mlflow",
    ],
)
def test_a_password_or_token_in_the_address_of_the_store_is_refused(uri):
    with pytest.raises(ConfigError, match=r"tracking: uri holds a password or a token.*in the environment"):
        load_config({**BASE, "tracking": {"uri": uri}})


@pytest.mark.parametrize(
    "uri",
    ["https://host/a@b", "http://host?of=a@b", "postgresql://ada@host/mlflow", "sqlite:////data/a@b.db"],
)
def test_an_address_of_the_store_without_a_secret_is_taken(uri):
    assert load_config({**BASE, "tracking": {"uri": uri}}).tracking.uri == uri


@pytest.mark.parametrize("micro_batch", [1, 2, 7, 8, 12])
@pytest.mark.parametrize("grad_accum", [1, 4, 5])
def test_a_refusal_names_the_nearest_batch_that_processes_can_share(micro_batch, grad_accum):
    """Against a search over all batches; a pass is never larger than it was, so it takes no more memory."""
    plain = changed(
        "runs.demo.defaults", {"micro_batch": micro_batch, "grad_accum": grad_accum, "max_steps": 1}
    )
    spec = load_config(plain).stage("demo", "b")
    whole = micro_batch * grad_accum
    for processes in range(1, 20):
        try:
            spec.micro_batch(processes)
        except ConfigError as error:
            found = re.search(r"micro_batch: (\d+), grad_accum: (\d+) \((\d+) windows\)", str(error))
            assert found is not None
            micro, accum, named = map(int, found.groups())
            shared = [n for n in range(1, 2 * (whole + processes)) if n % processes == 0]
            nearest = min(abs(n - whole) for n in shared)
            assert named == micro * accum and named % processes == 0 and micro <= micro_batch
            assert abs(named - whole) == nearest
        else:
            assert whole % processes == 0


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
