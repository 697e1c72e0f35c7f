"""Each source of a mixture has a score of its own, which a separate evaluation of it confirms."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.checkpoints.records import Receipt
from spider.common.results import Results, write_config
from spider.config import load_config
from spider.data.encode import encode_part
from spider.data.mixture import read_of_each
from spider.data.shards import build_metadata, load_metadata
from spider.evaluation.evaluate import evaluate
from spider.evaluation.records import Evaluation
from spider.evaluation.result import ALONE, CARRIED, metrics
from spider.evaluation.text import learned_from
from spider.training.stage import train
from tests.unit.small_datasets import dataset

HELD_OUT = {"prose": 0.3, "sums": 0.3, "notes": 0.0}
MIX = {"prose": 0.7, "sums": 0.3}
LATER = {"prose": 0.2, "sums": 0.8}
WIDE = {"prose": 0.6, "sums": 0.3, "notes": 0.1}


def configuration(folder: Path, **evaluation):
    model = {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2}
    shared = {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "log_every": 2, "ckpt_every": 5, "warmup_steps": 0}
    stages = [
        {"name": "main", "max_steps": 6},
        {"name": "later", "max_steps": 4, "data": {"mix": LATER}},
        {"name": "wide", "max_steps": 4, "data": {"mix": WIDE}},
        {"name": "last", "max_steps": 2, "data": "sums"},
    ]
    run = {"data": {"mix": MIX}, "model": model, "precision": "fp32", "stages": stages}
    run["defaults"] = shared | {"schedule": "constant"}
    run["evaluation"] = {"max_bytes": 900, "loops_bytes": 0, "carry_over": 500, **evaluation}
    datasets = {
        name: {"source": {"kind": "local", "files": [f"{name}.parquet"]}, "validation": share}
        for name, share in HELD_OUT.items()
    }
    return load_config({"results": str(folder), "datasets": datasets, "runs": {"mixed": run}})


def evaluated(results: Results, stage: str, output: str | None = None, **evaluation):
    run, config = "mixed", configuration(results.root, **evaluation)
    spec = config.stage(run, stage)
    folder = results.stage(run, stage).path
    return evaluate(
        folder / "train.json",
        spec,
        results.shards(spec.evaluation.data),
        folder / output if output else folder,
        learned_from=learned_from(config, run, stage),
        sources={name: results.shards(name) for name in config.sources(run)},
        device="cpu",
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Train and evaluate four stages of a mixture."""
    results = Results(tmp_path_factory.mktemp("results"))
    for name, share in HELD_OUT.items():
        texts = [f"{name} {i}: " + f"{i} and {i % 7} make {i + i % 7}. " * 3 for i in range(90)]
        raw, settings = results.raw(name, "000"), dataset(validation=share)
        raw.parent.mkdir(parents=True)
        pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(90)]}), raw)
        encode_part(raw, results.shards(name), "000", settings)
        build_metadata(results.shards(name), name, settings, source={"kind": "local"}, parts=["000"])
    config = configuration(results.root)
    write_config(results.root, config.written)
    previous = None
    for stage in ("main", "later", "wide", "last"):
        spec, folder = config.stage("mixed", stage), results.stage("mixed", stage)
        train(spec, folder.path, results.shards(spec.data), previous=previous)
        previous = folder.receipt
        evaluated(results, stage)
    return results


def by_source(evaluation):
    return {row.label: row for row in evaluation.results["sources"].rows}


def test_a_figure_equals_that_of_a_separate_evaluation_of_the_source(made):
    found = by_source(Evaluation.read(made.stage("mixed", "later").evaluation))
    assert [*found] == ["prose", "sums", "mean by weight"]
    for name in ("prose", "sums"):
        alone = evaluated(made, "later", name, data=name)
        assert (found[name].value, found[name].columns[CARRIED].value) == (alone.bpb, alone.bpb_carried)
        assert found[name].columns["bytes scored"].value == alone.bytes == 900
    assert found["prose"].value != found["sums"].value


def test_the_mean_has_the_weights_of_the_stage_without_sources_that_hold_out_no_text(made):
    for stage, weights in {"main": MIX, "wide": WIDE, "last": {"sums": 1.0}}.items():
        result = Evaluation.read(made.stage("mixed", stage).evaluation).results["sources"]
        *rows, mean = result.rows
        for context in (ALONE, CARRIED):
            scores = {row.label: row.number(context).value for row in rows}
            known = {name: weight for name, weight in weights.items() if name in scores}
            expected = sum(known[name] * scores[name] for name in known) / sum(known.values())
            assert mean.number(context).value == pytest.approx(expected, rel=1e-12)
        assert mean.columns["weight"].value == pytest.approx(sum(known.values()))
        assert result.notes == ["notes holds out no text, so it has no figure."]
        assert metrics({"sources": result})["sources/bpb/sums_carried"] == scores["sums"]


def test_what_was_read_is_that_of_all_stages_until_then(made):
    result = by_source(Evaluation.read(made.stage("mixed", "last").evaluation))
    later, wide = (
        read_of_each(Receipt.read(made.stage("mixed", stage).receipt).position) for stage in ("later", "wide")
    )
    assert sum(later.values()) == 4 * (6 + 4) and sum(wide.values()) == 4 * 4
    expected = {"prose": later["prose"] + wide["prose"], "sums": later["sums"] + wide["sums"] + 4 * 2}
    for name, samples in expected.items():
        split = load_metadata(made.shards(name)).splits["train"]
        columns, epochs = result[name].columns, samples / -(-split.tokens // 32)
        assert columns["samples read"].value == samples
        assert columns["epochs"].value == pytest.approx(epochs)
        assert columns["bytes read"].value == round(epochs * split.bytes)
