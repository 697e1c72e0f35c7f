"""The estimated cost of an index equals the measured one at the measured size, and is plausible beyond."""

import shutil

import pytest

from spider.common.formatting import quantity
from spider.config import load_config
from spider.config.ngram import NgramConfig
from spider.config.requests import PIECE
from spider.data.ngram.cost import cost
from spider.data.shards import load_metadata
from spider.describe import describe, render
from spider.model.spider.config import PRESETS


def test_the_estimate_is_the_measured_cost_at_the_size_of_the_default_corpus():
    slim = NgramConfig.model_validate(PRESETS["slim"]["ngram"])
    assert cost(slim, 23_708_035).disk == pytest.approx(357.3e6, rel=0.01)  # measured (docs/LOG.md)
    assert cost(NgramConfig(), 23_708_035).disk == pytest.approx(339.9e6, rel=0.01)


def test_more_text_and_more_contexts_cost_more_and_contexts_are_at_most_positions():
    config = NgramConfig(contexts=[1, 8, 14, 40, "words1", "words5"])
    sizes = [1e5, 1e7, 1e9, 1e12]
    disks = [cost(config, size).disk for size in sizes]
    assert disks == sorted(disks)
    for size, disk in zip(sizes, disks, strict=True):
        assert size < disk < size * (1 + 6 + sum(8 + 16 for _ in config.contexts)) + 1e6
        more = cost(config.model_copy(update={"contexts": [1, 8, 14, 20, 40, "words1", "words5"]}), size)
        assert more.disk > disk and more.look_up > cost(config, size).look_up
        assert more.seconds == pytest.approx(cost(config, size).seconds * 7 / 6)
    common = config.model_copy(update={"rare": 40})
    assert cost(common, 1e9).disk > cost(config, 1e9).disk


def test_runs_on_disk_have_the_measured_size_and_grow_by_the_piece():
    """A pair takes 12 bytes on disk, and many pieces are written once more when they are merged in groups."""
    slim = NgramConfig.model_validate(PRESETS["slim"]["ngram"])
    assert cost(slim, 24.06e6).runs == pytest.approx(24.06e6 + 12 * 70.3e6, rel=0.01)  # (docs/LOG.md)
    piece = cost(slim, PIECE).runs
    assert cost(slim, 10 * PIECE).runs == pytest.approx(10 * piece)
    assert 1000 * piece < cost(slim, 1000 * PIECE).runs < 1000 * (piece + 2 * 16 * PIECE)


def test_describe_estimates_from_the_runs_own_text_once_it_is_encoded(shards, tmp_path, capsys):
    shutil.copytree(shards, tmp_path / "shards/toy")
    splits = load_metadata(shards).splits
    run = {"data": "toy", "model": "slim", "stages": [{"name": "a", "max_steps": 1}]}
    run["defaults"] = {"seq_len": 64, "micro_batch": 4}
    data = {"toy": {"source": {"kind": "pydocs"}, "ngram": 0.4}}
    config = load_config({"results": str(tmp_path), "datasets": data, "runs": {"r": run}})
    (own,) = describe(config, "r")["counted_text"]
    assert own["text"] == splits["ngram"].tokens + splits["train"].tokens
    render(describe(config, "r"))
    assert f"N-gram index of {quantity(own['text'], 'B')} of text: " in " ".join(
        capsys.readouterr().out.split()
    )


def test_describe_estimates_the_index_of_a_run(capsys):
    data = {"d": {"source": {"kind": "pydocs"}, "ngram": 0.5}}
    run = {"data": "d", "stages": [{"name": "a", "max_steps": 1}]}
    run["defaults"] = {"seq_len": 64, "micro_batch": 4}
    config = load_config({"datasets": data, "runs": {"r": {**run, "model": "slim"}}})
    described = describe(config, "r")
    billion, crawl = described["counted_text"]
    assert (billion["text"], crawl["text"]) == (1e9, 46e9) and 20 < crawl["disk"] / billion["disk"] < 46
    render(described)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "N-gram index of 46.0 GB of text: 269 GB on disk, and 2.61 TB more until its counts are merged; "
        in said
    )
    assert "18 h 24 min of a processor to count and merge" in said
    without = load_config({"datasets": data, "runs": {"r": {**run, "model": "tiny"}}})
    assert describe(without, "r")["counted_text"] == []
