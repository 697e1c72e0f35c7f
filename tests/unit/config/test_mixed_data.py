"""A mixture in a configuration: wrong weights and sources are named, and a plain name stays as it was."""

from __future__ import annotations

import pytest

from spider.config import ConfigError, StageSpec, load_config
from spider.config.model import NgramConfig

STREAM = {"kind": "stream", "repo": "a/b", "revision": "0" * 40, "files": ["a.parquet"]}


def loaded(data, stage=None, model="tiny"):
    own = {} if stage is None else {"data": stage}
    datasets = {name: {"source": {"kind": "pydocs"}, "ngram": 0.2} for name in "ab"}
    datasets |= {
        "s": {"source": STREAM},
        "t": {"source": {"kind": "local", "files": ["x.txt"]}, "tokenizer": "bpe"},
        "u": {"source": {"kind": "local", "files": ["u.txt"]}},
    }
    run = {"data": data, "model": model, "stages": [{"name": "main", "max_steps": 2, **own}]}
    tokenizers = {"bpe": {"data": "a", "vocab_size": 300}}
    return load_config({"datasets": datasets, "tokenizers": tokenizers, "runs": {"r": run}})


def test_weights_are_shares_and_the_first_dataset_is_evaluated():
    for config in (loaded({"mix": {"b": 3, "a": 1}}), loaded("b", {"mix": {"b": "3e0", "a": 1}})):
        spec = config.stage("r", "main")
        assert spec.weights == {"b": 0.75, "a": 0.25} and spec.mixed
        assert (spec.data, spec.evaluation.data) == ("b", "b")
        assert StageSpec.model_validate_json(spec.model_dump_json()) == spec
    plain = loaded("a").stage("r", "main")
    assert plain.weights == {"a": 1} and not plain.mixed and plain.deciding()["settings"]["data"] == "a"
    assert plain.identity != loaded({"mix": {"a": 1}}).stage("r", "main").identity


def test_a_dataset_may_begin_or_end_at_a_switch_and_figures_weigh_it_by_the_mean_of_its_shares():
    written = {"mix": {"b": 3, "a": 1}, "switches": {100_000: {"a": 1}}}
    spec = loaded(written).stage("r", "main")
    assert spec.settings.data.mixes == [(0, {"b": 0.75, "a": 0.25}), (100_000, {"a": 1})]
    assert spec.weights == {"b": 0.375, "a": 0.625} and spec.data == "b"
    assert StageSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.deciding() != loaded({"mix": {"b": 3, "a": 1}}).stage("r", "main").deciding()
    with pytest.raises(ConfigError, match="all data must have the same vocabulary; t has that of bpe"):
        loaded(written | {"switches": {200_000: {"a": 1, "t": 3}}})


def test_an_ngram_index_is_of_the_first_dataset_and_shares_no_file_with_the_others():
    model = {"preset": "tiny", "ngram": {}}
    mixed = {"mix": {"a": 1, "u": 1}}
    assert loaded(mixed, model=model).ngram_reader("a", NgramConfig().counted) == "r"
    with pytest.raises(ConfigError, match=r"stages\[0\]\.data: the n-gram index is of a; name that first"):
        loaded(mixed, stage={"mix": {"u": 1, "a": 1}}, model=model)
    with pytest.raises(ConfigError, match=r"is of a, which shares the documentation with b, so it may hold"):
        loaded({"mix": {"a": 1, "b": 1}}, model=model)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mix": {"a": 1, "b": -1}}, "runs.r.data.mix.b: must be positive (got -1)"),
        ({"mix": {"a": float("nan")}}, "runs.r.data.mix.a: must be a finite number (got nan)"),
        ({"mix": {}}, "runs.r.data.mix: must not be empty"),
        ({"mix": {"a": 1, "c": 1}}, "runs.r.stages[0].data: no dataset 'c'"),
        ({"mix": {"a": 1}, "switches": {5: {"b": -1}}}, "switches[5].b: must be positive (got -1)"),
        ({"mix": {"a": 1}, "switches": {0: {"b": 1}}}, "must be positive (got 0)"),
        (["a"], "runs.r.data: must be the name of a dataset, or a mapping"),
    ],
)
def test_wrong_data_is_an_error_with_its_key(data, message):
    with pytest.raises(ConfigError) as error:
        loaded(data)
    assert message in str(error.value)
