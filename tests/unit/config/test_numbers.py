"""Whole numbers as people write them: YAML 1.1 reads ``6e5`` as text and ``6.0e+5`` as a fraction."""

from __future__ import annotations

import copy

import pytest
import yaml

from spider.config import ConfigError, load_config

BASE = yaml.safe_load("""
datasets: {docs: {source: {kind: pydocs}}}
runs:
  r:
    data: docs
    model: tiny
    defaults: {seq_len: 64, micro_batch: 4}
    stages: [{name: a, tokens: 600_000}]
""")


def with_tokens(text: str) -> dict:
    plain = copy.deepcopy(BASE)
    plain["runs"]["r"]["stages"][0]["tokens"] = yaml.safe_load(text)
    return plain


@pytest.mark.parametrize("text", ["6e5", "6.0e+5", "600000.0", "6000000e-1"])
def test_a_whole_number_in_any_notation_is_the_same_configuration(text):
    written, plain = load_config(with_tokens(text)), load_config(BASE)
    tokens = written.runs["r"].stages[0].tokens
    assert tokens == 600_000 and isinstance(tokens, int)
    assert written.stage("r", "a").identity == plain.stage("r", "a").identity


@pytest.mark.parametrize("text", ["6.5", "65e-1", "1e999999", "six"])
def test_what_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match=r"^runs.r.stages\[0\].tokens: must be a whole number \(got "):
        load_config(with_tokens(text))
