"""What a memory of a large text is said to cost: what was measured at the size of that, and sane beyond."""

import pytest

from spider.config import load_config
from spider.config.memory import MemoryConfig
from spider.describe import describe, render
from spider.memory.cost import cost
from spider.model.spider.config import PRESETS


def test_it_is_what_was_measured_at_the_size_of_the_default_corpus():
    slim = MemoryConfig.model_validate(PRESETS["slim"]["memory"])
    assert cost(slim, 23_708_035).disk == pytest.approx(357.3e6, rel=0.01)  # its memory on disk (docs/LOG.md)
    assert cost(MemoryConfig(), 23_708_035).disk == pytest.approx(339.9e6, rel=0.01)


def test_more_text_and_more_contexts_cost_more_and_no_text_has_more_contexts_than_places():
    config = MemoryConfig(orders=[1, 8, 14, 40], words=[1, 5])
    sizes = [1e5, 1e7, 1e9, 1e12]
    disks = [cost(config, size).disk for size in sizes]
    assert disks == sorted(disks)
    for size, disk in zip(sizes, disks, strict=True):
        assert size < disk < size * (1 + 6 + sum(8 + 16 for _ in config.contexts)) + 1e6
        more = cost(config.model_copy(update={"orders": [1, 8, 14, 20, 40]}), size)
        assert more.disk > disk and more.look_up > cost(config, size).look_up
        assert more.seconds == pytest.approx(cost(config, size).seconds * 7 / 6)
    often = config.model_copy(update={"rare": 40})
    assert cost(often, 1e9).disk > cost(config, 1e9).disk


def test_a_description_says_it_of_a_run_with_a_memory(capsys):
    data = {"d": {"source": {"kind": "pydocs"}, "memory": 0.5}}
    run = {"data": "d", "stages": [{"name": "a", "max_steps": 1}]}
    run["defaults"] = {"seq_len": 64, "micro_batch": 4}
    config = load_config({"datasets": data, "runs": {"r": {**run, "model": "slim"}}})
    described = describe(config, "r")
    billion, crawl = described["counted_text"]
    assert (billion["text"], crawl["text"]) == (1e9, 46e9) and 20 < crawl["disk"] / billion["disk"] < 46
    render(described)
    said = " ".join(capsys.readouterr().out.split())
    assert "Its memory of 46.0 GB of text: 269 GB on disk, 18.4 processor hours" in said
    without = load_config({"datasets": data, "runs": {"r": {**run, "model": "tiny"}}})
    assert describe(without, "r")["counted_text"] == []
