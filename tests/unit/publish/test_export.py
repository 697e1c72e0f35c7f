"""Exported models have the same weights to the bit, and the same bytes when they are exported again."""

from __future__ import annotations

import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

import spider
from spider.checkpoints.inventory import examine
from spider.checkpoints.load import Checkpoint
from spider.common import files
from spider.common.errors import CheckpointError
from spider.model import build_model
from spider.model.interface import model_tensors, weights_digest
from spider.model.reading import Scoring
from spider.model.spider.config import SpiderConfig
from spider.publish import export as exporting
from spider.publish.export import export
from spider.training.stage import train


@pytest.fixture(scope="module")
def stage(tmp_path_factory, shards, make_spec):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("r") / "a"
    train(make_spec(max_steps=2), folder, shards)
    return folder


def digest(path):
    return weights_digest(model_tensors(spider.load_model(path)[0]))


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("given", ["checkpoints/step-00000002", "", "train.json"])
def test_an_exported_model_loads_with_the_same_weights(stage, tmp_path, given):
    export(stage / given, tmp_path / "new/out")
    model, config = spider.load_model(tmp_path / "new/out")
    before, before_config = spider.load_model(stage)
    assert config == before_config and not model.training
    assert digest(tmp_path / "new/out") == files.read_json(stage / "train.json")["weights"]
    tokens_BT = torch.randint(0, 256, (2, 32))
    assert torch.equal(model(tokens_BT).logits, before(tokens_BT).logits)


def test_an_export_of_an_export_has_the_same_bytes(stage, tmp_path):
    export(stage, tmp_path / "first")
    export(tmp_path / "first", tmp_path / "second")
    written = ["README.md", "config.json", "generation_config.json", "model.safetensors", "spider_hf.py"]
    assert sorted(content(tmp_path / "first")) == [*written, "tokenizer_config.json"]
    assert content(tmp_path / "first") == content(tmp_path / "second")


def test_an_export_is_read_as_the_evaluation_reads_its_checkpoint(tmp_path, shards, make_spec):
    spec = make_spec(max_steps=2, precision="bf16", n_loops=1)
    train(spec, tmp_path / "a", shards)
    own = Checkpoint.at(tmp_path / "a").reading
    assert own.autocast and own.n_loops == 1
    export(tmp_path / "a", tmp_path / "first")
    assert Checkpoint.at(export(tmp_path / "first", tmp_path / "second").path).reading == own
    described = tmp_path / "second/config.json"
    plain = files.read_json(described)
    for key in ("precision", "n_loops"):  # as earlier versions wrote it
        del plain[key]
    files.write_json(described, plain)
    assert Checkpoint.at(tmp_path / "second").reading == Scoring(own.seq_len)


def test_other_programs_can_read_an_export_and_its_origin(stage, tmp_path):
    export(stage, tmp_path / "out")
    config = spider.load_model(stage)[1]
    build_model(config).load_state_dict(load_file(tmp_path / "out/model.safetensors"), strict=True)
    card, receipt = files.read_json(tmp_path / "out/config.json"), files.read_json(stage / "train.json")
    assert SpiderConfig.model_validate(card["model"]) == config
    for key in ("run", "stage", "global_step", "bytes", "best_loss", "data_digest", "identity", "weights"):
        assert card[key] == receipt[key], key
    assert (card["format"], card["spider"], card["window"]) == (2, spider.__version__, 32)
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1, "equal permissions"


def test_a_large_model_is_split_into_shards_without_change(stage, tmp_path, monkeypatch):
    export(stage, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_SHARD_BYTES", 20_000)
        export(stage, tmp_path / "cut")
    index = files.read_json(tmp_path / "cut/model.safetensors.index.json")
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 20_000
        assert {name for name, at in index["weight_map"].items() if at == shard.name} == held.keys()
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    export(tmp_path / "cut", tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_a_failed_export_leaves_the_earlier_one_unchanged(stage, tmp_path):
    export(stage, tmp_path / "out")
    before = content(tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"out: cannot be written: .*it needs [\d,]+ bytes"
        ) as caught:
            export(stage, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Nothing was left there or changed" in str(caught.value)
    assert content(tmp_path / "out") == before
    assert {f.name for f in tmp_path.iterdir()} == {"out"}


def test_a_changed_export_is_refused(stage, tmp_path):
    out = tmp_path / "out"
    export(stage, out)
    file = out / "model.safetensors"
    named = load_file(file)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model.safetensors: SHA-256 differs"):
        spider.load_model(out)
    named["other"] = named.pop("final_norm.weight")
    save_file(named, file)
    card = files.read_json(out / "config.json")
    card["files"][file.name] = {"size": file.stat().st_size, "sha256": files.sha256(file)}
    files.write_json(out / "config.json", card)
    with pytest.raises(CheckpointError, match=r"it has no final_norm.weight; this model has no other"):
        spider.load_model(out)
    (out / "spider_hf.py").write_text("import os")
    assert any("spider_hf.py: " in problem for problem in examine(out)["problems"])
