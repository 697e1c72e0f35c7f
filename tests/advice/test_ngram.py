"""Advice about n-gram indexes and the models that read them."""

from __future__ import annotations

import shutil

import pytest

import spider
from spider.checkpoints.compress.pipeline import compress
from spider.checkpoints.load import Checkpoint
from spider.common.results import CompressedFolder, Results
from spider.config import CompressConfig
from spider.data.ngram.lookup import NgramLookup
from spider.data.ngram.store import build, build_indexes, count_part, open_index, verify
from spider.data.shards import load_metadata
from spider.hf.modeling import SpiderForCausalLM
from spider.publish.export import export
from spider.tokens import BYTES
from spider.training.stage import train
from tests.unit.ngram.small_index import (  # noqa: F401 (fixtures)
    CONFIG,
    PARTS,
    indexes,
    make_shards,
    make_spec,
    results,
    shards,
)

from .followed import refused

ADVICE = {
    "data/ngram/table.py": [
        ("{}: ends after {} of {} elements; delete {} and run again", 4),
        ("{}: {} keys, but {} has {} counts; delete {} and run again", None),
    ]
}


@pytest.fixture
def copied(indexes, tmp_path):  # noqa: F811
    return shutil.copytree(indexes["full"].parent, tmp_path / "ngram")


def test_a_damaged_or_other_index_is_deleted_and_counted_anew(copied, shards, tmp_path):  # noqa: F811
    split, full = copied / "split", copied / "full"
    digest = open_index(full).description.data_digest
    other = CONFIG.model_copy(update={"contexts": [1, 2]})
    with refused("data/ngram/store.py", "delete {} and run {}, which counts the text anew"):
        open_index(full).check(digest, ["ngram"])
    with refused("data/ngram/store.py", "delete {} and run {}, which counts the text anew"):
        open_index(full).check_counted(other)
    with refused("data/ngram/store.py", "({}, {}, not {}); train on that dataset, or {}"):
        open_index(full).check("another", ["ngram", "train"])
    (full / "5.rows.npy").write_bytes(b"")
    with refused("data/ngram/store.py", "delete {} and run {}, which counts the text anew"):
        verify(full)
    shutil.rmtree(full)
    with refused("data/ngram/store.py", "delete {} and run {}, which counts the text anew"):
        open_index(full)
    build_indexes(shards, CONFIG, split, full)
    verify(full)
    open_index(full).check(digest, ["ngram", "train"])


def test_damaged_counts_are_deleted_and_counted_again(copied, shards, tmp_path):  # noqa: F811
    metadata, counts = load_metadata(shards), copied / "counts"
    parts = [counts / part for part in PARTS]
    run = next((counts / "000/ngram").glob("*.counts.npy"))
    for phrase, cut in ADVICE["data/ngram/table.py"]:
        other = next((counts / "001/ngram").glob(run.name))
        run.write_bytes(run.read_bytes()[:-cut] if cut else other.read_bytes())
        with refused("data/ngram/table.py", phrase):
            build(parts, metadata, ["ngram"], CONFIG, tmp_path / "out")
        shutil.rmtree(counts / "000")
        count_part(shards, metadata, "000", CONFIG, counts / "000")
        build(parts, metadata, ["ngram"], CONFIG, tmp_path / "out")
        verify(tmp_path / "out")


def test_more_documents_are_counted(tmp_path):
    texts = {"000": ["one two three four five"] * 20}
    (tmp_path / "few").mkdir()
    few = make_shards(tmp_path / "few", texts, share=1e-9)
    with refused("data/ngram/store.py", "or give more text"):
        build_indexes(few, CONFIG, tmp_path / "a", tmp_path / "b")
    (tmp_path / "more").mkdir()
    build_indexes(make_shards(tmp_path / "more", texts, share=0.5), CONFIG, tmp_path / "a", tmp_path / "b")


def test_a_carry_over_beyond_the_memory_is_lowered(indexes):  # noqa: F811
    lookup = NgramLookup(open_index(indexes["full"]), CONFIG, BYTES)
    with refused("data/ngram/candidates.py", "and this machine has {} GB; lower it"):
        lookup.document(carry_over=1 << 42)
    lookup.document(carry_over=1 << 10)


def test_the_index_of_a_checkpoint_or_an_export_is_brought_back(results, tmp_path):  # noqa: F811
    root = shutil.copytree(results.root, tmp_path / "results")
    full = Results(root).ngram("toy", CONFIG.counted, "full")
    whole = full.rename(tmp_path / "whole")
    shutil.copytree(full.with_name("split"), full)
    with refused("checkpoints/load.py", "run the workflow again, or name its own results"):
        Checkpoint.at(root / "runs/r/a").model()
    Checkpoint.at(results.root / "runs/r/a").model()
    shutil.copytree(root / "runs", tmp_path / "elsewhere")
    with refused("checkpoints/load.py", "export it there, and use the exported folder"):
        Checkpoint.at(tmp_path / "elsewhere/r/a").model()
    shutil.rmtree(full)
    whole.rename(full)
    exported = tmp_path / "exported"
    export(root / "runs/r/a", exported)
    spider.load_model(exported)
    readers = (spider.load_model, SpiderForCausalLM.from_pretrained)
    for read in readers:
        shutil.rmtree(exported / "ngram")
        with refused("data/ngram/store.py", "copy the exported folder whole, or export again"):
            read(exported)
        shutil.rmtree(exported)
        export(root / "runs/r/a", exported)
        read(exported)


def test_a_run_without_an_index_is_compressed_and_its_file_copied_again(
    results,  # noqa: F811
    shards,  # noqa: F811
    make_spec,  # noqa: F811
    tmp_path,
):
    spec, config = make_spec(max_steps=2, val_every=0), CompressConfig(method="nearest", clip=8.0)
    with refused("checkpoints/compress/pipeline.py", "train a run without one (model.ngram: null)"):
        compress(results.stage("r", "a").receipt, spec, config, shards, tmp_path / "c")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"ngram": None})})
    train(spec, tmp_path / "b", shards)
    compress(tmp_path / "b/train.json", spec, config, shards, tmp_path / "c")
    made = CompressedFolder(tmp_path / "c").model
    copied = tmp_path / "copy.spider"
    for cut in (30, -1):  # the header, and the rest
        copied.write_bytes(made.read_bytes()[:cut])
        with refused("checkpoints/compress/format.py", "copy it again from where it was made"):
            spider.load_model(copied)
        shutil.copyfile(made, copied)
        spider.load_model(copied)
