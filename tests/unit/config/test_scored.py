"""Stages on one text share what is computed of it without a model, whatever tokens and settings they have."""

from spider.config import load_config
from spider.config.scored import baselines_name, learned_splits, overlap_name


def names(run: str, **evaluation) -> tuple[str, str]:
    """Return the names of the overlap and of the baselines of a run, with these settings."""
    settings = {"max_bytes": 5000} | evaluation
    other = [{"name": "main", "max_steps": 2, "data": "other"}]
    shared = {"model": "tiny", "stages": [{"name": "main", "max_steps": 2}], "evaluation": settings}
    config = load_config(
        {
            "datasets": {
                "text": {"source": {"kind": "pydocs"}, "validation": 0.1, "ngram": 0.5},
                "text-bpe": {"like": "text", "tokenizer": "bpe"},
                "other": {"source": {"kind": "pydocs"}, "validation": 0.1},
            },
            "tokenizers": {"bpe": {"data": "text"}},
            "runs": {
                "bytes": {"data": "text", **shared},
                "bpe": {"data": "text-bpe", **shared, "model": "gpt-cpu"},
                "index": {"data": "text", **shared, "model": "slim"},
                "mixed": {"data": "text", **shared, "stages": other},
            },
        }
    )
    spec = config.stage(run, "main")
    return overlap_name(config, spec), baselines_name(config, spec)


def test_runs_on_one_text_share_its_overlap_and_its_baselines():
    assert names("bytes") == names("bpe") == names("index", tasks={}, overlap=0.25)
    assert not set(names("bytes")) & {*names("mixed"), *names("bytes", max_bytes=6000)}


def test_settings_of_compressors_change_neither_the_overlap_nor_the_scores():
    for change in ({"zpaq": True}, {"training_bytes": 100}, {"training_bytes": None}):
        assert names("bytes", **change)[0] == names("bytes")[0]
        assert names("bytes", **change)[1] != names("bytes")[1]
    assert names("bytes", training_bytes=0)[0] != names("bytes")[0], "nothing is searched"


def test_a_stream_is_not_stored_so_no_training_text_is_known():
    stream = {"kind": "stream", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}
    run = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 2}]}
    datasets = {"d": {"source": stream}, "held": {"source": {"kind": "pydocs"}}}
    config = load_config({"datasets": datasets, "runs": {"r": {**run, "evaluation": {"data": "held"}}}})
    assert learned_splits(config, config.stage("r", "a")) == []
