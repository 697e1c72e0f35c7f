"""Advice about models in other programs, rewards, provenance, evidence and leftovers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from spider_trust.documents import find
from spider_trust.order import Order

from spider.checkpoints.compress.pipeline import fit_cap
from spider.common.files import read_json, write_json
from spider.common.results import Results
from spider.config import RolloutConfig, load_config
from spider.config.imports import allow_import
from spider.config.model import family_block, family_config
from spider.data.cleaning import evidence
from spider.data.cleaning.evidence import _text
from spider.data.packing import pack
from spider.data.shards import Shards, build_metadata, load_metadata
from spider.evaluation.foreign import ForeignModel
from spider.hf.modeling import SpiderForCausalLM
from spider.hf.tokenization import SpiderTokenizer
from spider.model import build_model
from spider.provenance.lineage import result_of
from spider.publish.export import export
from spider.training.rollouts import Prompts, Rollouts, check
from spider.training.stage import train
from spider.workflow.clean import leftovers
from tests.transformers_models import byte_level, gpt2
from tests.unit.small_datasets import dataset
from tests.unit.small_training import MODEL

from .conftest import SHORT
from .followed import refused
from .test_commands import here, made, spider  # noqa: F401 (fixtures)
from .test_training import encoded

TOY = Path(__file__).parents[1] / "families/toy"


def test_a_compressed_model_gets_a_larger_cap():
    def size(clip: float) -> float:
        return 20_000 + 10_000 * (8 - math.log2(clip))

    with refused("checkpoints/compress/pipeline.py", "use fewer parameters, fewer bits or a larger cap"):
        fit_cap(10_000, 80_000, size, lambda clip: round(size(clip)))
    with refused("checkpoints/compress/pipeline.py", "no clip near {} gives a file of {} bytes; raise cap"):
        fit_cap(60_000, 80_000, size, lambda clip: 61_000)
    assert fit_cap(61_000, 80_000, size, lambda clip: round(size(clip)))[1] <= 61_000


def test_a_model_without_conversations_gets_a_text(stage, tmp_path):
    export(stage.path, tmp_path / "own")
    tokenizer = SpiderTokenizer.from_pretrained(tmp_path / "own")
    asked = [{"role": "user", "content": "1 + 1"}]
    with refused("hf/tokenization.py", "give it a text"):
        tokenizer.apply_chat_template(asked)
    tokenizer("1 + 1")
    with refused("hf/modeling.py", "leave dtype out, and call the model under torch.autocast"):
        SpiderForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.bfloat16)
    model = SpiderForCausalLM.from_pretrained(tmp_path / "own")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 8, dtype=torch.long))
    tokenizer.conversations = "talk"
    with refused("hf/tokenization.py", "and are not truncated: leave these options out"):
        tokenizer.apply_chat_template(asked, tools=[print])
    tokenizer.apply_chat_template(asked)


def test_a_family_of_ones_own_is_named(tmp_path, monkeypatch):
    shutil.copytree(TOY, tmp_path / "my_family")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("config/model.py", "If you trust that code, name the family: spider --family-module {}"):
        family_config("my_family")
    allow_import("my_family")
    family_config("my_family")


def test_a_model_reads_an_index_if_its_family_does(tmp_path, monkeypatch):
    shutil.copytree(TOY, folder := tmp_path / "plain_family")
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("if config.ngram:", "if False:"))
    monkeypatch.syspath_prepend(tmp_path)
    allow_import("plain_family")
    block = {"family": "plain_family", "width": 8}
    with refused("model/__init__.py", "the family {} reads no n-gram index; leave it out"):
        build_model(family_block(block | {"ngram": {}}))
    build_model(family_block(block))


def test_a_model_reads_candidates():
    model = build_model(family_block(MODEL | {"ngram": {"contexts": [1, 2], "matches": [2]}}))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with refused("model/interface.py", "pass its candidates as `candidates_BTW`"):
        model(ids)
    model(ids, **model.empty_candidates(ids))


def test_conversations_are_corrected_or_rewarded_otherwise(tmp_path):
    def talk(name: str, answer: str) -> Shards:
        said = f'[{{"role": "user", "content": "1 + 1"}}, {{"role": "assistant", "content": "{answer}"}}]'
        return Shards(encoded(tmp_path / name, [said] * 20, validation=0, format="chat"), "train")

    def checked(shards: Shards, seq_len: int = 32) -> None:
        check(Prompts(shards), SimpleNamespace(seq_len=seq_len), "toy")

    number, word = talk("number", "2"), talk("word", "two")
    with refused("training/rollouts.py", "leaves no place for an answer in a window of {}; raise seq_len"):
        checked(number, seq_len=8)
    checked(number, seq_len=32)
    with refused("training/rollouts.py", "correct the data"):
        checked(word)
    checked(number)
    sampler = SimpleNamespace(rollouts=RolloutConfig(samples=4), seq_len=32)
    order = {"seq_len": 32, "seed": 0, "position": None}
    with refused("training/rollouts.py", "is not a multiple of rollouts.samples ({}); change micro_batch"):
        Rollouts(number, sampler, **order, rows=6)
    Rollouts(number, sampler, **order, rows=8)


def test_answers_are_learned_from_conversations(tmp_path, make_spec, talk):
    spec = make_spec(packing="best_fit", attend="row", **SHORT)
    settings = spec.settings.model_copy(update={"learn": "assistant"})
    spec = spec.model_copy(update={"settings": settings})
    folder = encoded(tmp_path / "text", ["one two three"] * 40, validation=0)
    pack(folder, 32)
    with refused("training/loop.py", "targets is an assistant's; check that {} holds conversations"):
        train(spec, tmp_path / "a", folder)
    said = '[{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]'
    folder = encoded(tmp_path / "talk", [said] * 40, validation=0, format="chat")
    pack(folder, 32)
    assert train(spec, tmp_path / "b", folder).steps == 6


def test_a_model_that_reads_less_than_it_says_gets_another_number(tmp_path):
    texts = [f"one {i} two {i * i}" for i in range(20)]
    model = ForeignModel.load(gpt2(tmp_path, byte_level(texts), context=32), "cpu")
    model.network.config.n_positions = 64
    ids_N = model.tokens.encode(" ".join(texts))
    assert model.context == 64
    with refused("evaluation/foreign.py", "that its config.json promises; correct them there"):
        model.check(ids_N, model.context)
    model.network.config.n_positions = 32
    model.check(ids_N, model.context)


def test_documents_and_results_are_named(here):  # noqa: F811
    config, results = load_config(Path("config.yaml")), Results(Path("results"))
    with refused("trust/documents.py", "{}: name a document as DATASET:ID or DATASET/PART:ROW"):
        find(config, results, "toy")
    assert find(config, results, "toy:3") == find(config, results, "toy/000:3") == ("toy", "000", 3)
    raw = results.raw("toy", "000")
    raw.unlink()
    with refused("trust/documents.py", "not found, but {}; name it as DATASET/PART:ROW"):
        find(config, results, "toy:3")
    assert find(config, results, "toy/000:3") == ("toy", "000", 3)
    with refused("data/documents.py", "no such file; download it first (with temp: true it is deleted"):
        _text(config, results, "toy", "000", 3)
    spider("data", "download", "toy", "000", "--output", raw)
    assert _text(config, results, "toy", "000", 3)
    stage = results.stage("r", "a")
    aside = stage.path.rename("aside")
    with refused("provenance/lineage.py", "train this stage first"):
        result_of(stage.path)
    with refused("trust/order.py", "no such receipt; train {} first"):
        Order(config, "r")
    aside.rename(stage.path)
    assert result_of(stage.path) and Order(config, "r").names == ["a"]


def test_changed_evidence_is_made_again(tmp_path):
    path = tmp_path / "removed/000.parquet"
    evidence.write_removed(path, "000", evidence.table({}, 0))
    path.write_bytes(b"damaged")
    with refused("data/cleaning/evidence.py", "delete it and {}.json, and run {}"):
        evidence.read(path)
    for one in (path, path.with_suffix(".json")):
        one.unlink()
    evidence.write_removed(path, "000", evidence.table({}, 0))
    assert evidence.read(path).num_rows == 0


def test_a_results_folder_without_configurations_is_removed_by_hand(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "config.yaml").write_text("runs: 3")
    with refused("workflow/clean.py", "so nothing can be kept; remove it by hand"):
        leftovers(tmp_path)
    shutil.rmtree(tmp_path)


def test_a_dataset_of_another_vocabulary_is_encoded_again(tmp_path):
    folder = encoded(tmp_path / "toy", ["one"], validation=0)
    plain = read_json(folder / "metadata.json")
    write_json(folder / "metadata.json", plain | {"vocab_size": 99})
    with refused("data/shards.py", "delete it and run `snakemake datasets/{}`"):
        load_metadata(folder)
    shutil.rmtree(folder.parent)
    load_metadata(encoded(tmp_path / "toy", ["one"], validation=0))
    build_metadata(folder, "toy", dataset(validation=0), source={}, parts=["000"])
