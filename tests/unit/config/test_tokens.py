"""The tokenizer of the dataset decides the vocabulary of a model. Settings that do not fit are named."""

import copy

import pytest

from spider.config import ConfigError, load_config

TOY = {"family": "tests.families.toy", "width": 8}
PLAIN = {
    "datasets": {
        "web": {"source": {"kind": "pydocs"}, "validation": 0.02, "text_column": "words"},
        "web-bpe": {"like": "web", "tokenizer": "bpe"},
        "live": {"source": {"kind": "stream", "repo": "a/b", "revision": "c", "files": ["d.parquet"]}},
    },
    "tokenizers": {"bpe": {"data": "web", "vocab_size": 1000}},
    "runs": {
        "bytes": {"data": "web", "model": TOY, "stages": [{"name": "a", "max_steps": 1}]},
        "bpe": {"data": "web-bpe", "model": TOY, "stages": [{"name": "a", "max_steps": 1}]},
    },
}


def changed(path, value):
    plain = copy.deepcopy(PLAIN)
    *blocks, last = path.split(".")
    here = plain
    for block in blocks:
        here = here[int(block) if block.isdecimal() else block]
    here[last] = value
    return plain


def test_the_tokenizer_of_the_dataset_decides_the_vocabulary_size():
    config = load_config(PLAIN)
    assert config.stage("bpe", "a").model.vocab_size == 1000
    assert config.stage("bytes", "a").model.vocab_size is None
    identities = {config.stage(run, "a").identity for run in ("bytes", "bpe")}
    shapes = {config.stage(run, "a").shape for run in ("bytes", "bpe")}
    assert len(identities) == len(shapes) == 2
    # The configuration may repeat the size.
    assert load_config(changed("runs.bpe.model", TOY | {"vocab_size": 1000})).runs == config.runs


def test_a_stream_has_a_tokenizer_that_was_learned_from_stored_text():
    plain = changed("datasets.live.tokenizer", "bpe")
    plain["runs"]["live"] = plain["runs"]["bpe"] | {"data": "live", "evaluation": {"data": "web"}}
    config = load_config(plain)
    assert config.stage("live", "a").model.vocab_size == 1000
    assert config.stage("live", "a").stream.tokenizer == "bpe"


def test_like_inherits_all_but_the_tokenizer_and_the_share_of_the_index():
    one, other = load_config(PLAIN).datasets["web"], load_config(PLAIN).datasets["web-bpe"]
    assert other.encoding() == one.encoding() and other.source == one.source
    assert (other.like, other.tokenizer) == ("web", "bpe")
    more = load_config(changed("datasets.web-bpe.ngram", 0.5)).datasets["web-bpe"]
    assert more.ngram == 0.5 and more.held_out() == one.held_out()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("datasets.web-bpe.like", "wbe", "datasets.web-bpe.like: no dataset 'wbe'; did you mean \"web\"?"),
        ("datasets.web-bpe.tokenizer", "bpee", "no tokenizer 'bpee'; did you mean \"bpe\"?"),
        ("tokenizers.bpe.data", "wbe", "tokenizers.bpe.data: no dataset 'wbe'; did you mean"),
        ("tokenizers.bpe.vocab_size", 271, "bpe.vocab_size: must be at least 272 (the bytes) and"),
        ("tokenizers.bpe.vocab_size", 70_000, "and at most 65,536 (shards are uint16); got 70,000"),
        ("runs.bytes.model", TOY | {"vocab_size": 999},
         "runs.bytes.model.vocab_size: is decided by the dataset's tokenizer (bytes: web names no tok"),
        ("runs.bpe.stages.0.data", "web",
         "stages[0].data: all data must have the same vocabulary; web has that of bytes, web-bpe"),
        ("runs.bytes.stages.0.data", "web-bpe", "vocabulary; web-bpe has that of bpe, web that of bytes"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_named_by_their_keys(path, value, message):
    with pytest.raises(ConfigError) as error:
        load_config(changed(path, value))
    assert message in str(error.value)


def test_a_tokenizer_may_be_learned_from_a_dataset_that_it_encodes():
    plain = changed("datasets.web.tokenizer", "bpe")
    plain["runs"].pop("bytes")
    assert load_config(plain).stage("bpe", "a").model.vocab_size == 1000
