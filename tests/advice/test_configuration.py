"""Each message about the configuration: it is refused, the advice changes some keys, and it is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spider.config import ConfigError, load_config
from spider.config.schema import Given, with_settings
from spider.tracking import target

from .followed import OUT, changed, check_said, refused

DOCS = {"source": {"kind": "pydocs"}}
BASE = {
    "datasets": {"docs": DOCS},
    "runs": {
        "r": {
            "data": "docs",
            "model": "tiny",
            "defaults": {"seq_len": 128, "micro_batch": 4, "lr": 1e-3, "max_steps": 7},
            "stages": [{"name": "a"}, {"name": "b", "lr": 2e-3}],
        }
    },
}
HUB = {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}
STREAM = {"source": HUB | {"kind": "stream"}}
MINE = {"source": {"kind": "local", "files": ["a.jsonl", "b.jsonl"]}}
TALK = {"source": {"kind": "local", "files": ["talk.jsonl"]}, "format": "chat"}
SHARDS = {"source": {"kind": "tokens", "train": ["t"], "validation": ["v"], "model": "m", "vocab_size": 1024}}

NGRAM = {"preset": "tiny", "ngram": {}}
GPT = "gpt-cpu"
WEB = {"datasets.web": STREAM, ".data": "web", ".evaluation.data": "docs"}
ON_TALK = {"datasets.talk": TALK, ".data": "talk"}
REWARDED = ON_TALK | {".defaults.rollouts": {}, ".defaults.micro_batch": 16}
TOKENIZED = {"tokenizers.t": {"data": "docs"}, "datasets.docs.tokenizer": "t", ".model": GPT}
#: Two datasets, of which the run learns one and is scored on the other.
TWO = {"datasets.one": MINE, "datasets.two": MINE, ".data": "two", ".evaluation.data": "one"}

NARROW = {"matrices": {"weights": "bf16"}}


def compared_with(dataset: str) -> dict[str, Any]:
    return {"cleaning": {"exact": True, "against": [dataset]}}


#: A phrase of a message, by module; the keys that provoke it; and the keys to change, for each remedy.
#: A path that begins with a dot is one of the run.
# fmt: off
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "config/run.py": [
        ("set kind: adamw8bit, or fp32",
         {".optimizer": {"kind": "muon", "groups": NARROW}, ".precision": "bf16"},
         {".optimizer.kind": "adamw8bit"}, {".optimizer.groups.matrices.weights": "fp32"}),
        ("does not use Muon; set kind: muon, or leave it out",
         {".optimizer": {"kind": "adamw", "muon_rows": True}}, {".optimizer.kind": "muon"},
         {".optimizer.muon_rows": OUT}),
        ("has no scaled decay; set kind: muon, or another decay",
         {".optimizer": {"groups": {"matrices": {"decay": "scaled"}}}}, {".optimizer.kind": "muon"},
         {".optimizer.groups.matrices.decay": "l2"}),
        ("trains output projections of feed-forwards only; set layers: all",
         {".model": GPT, ".evaluation.ttt": {"chunk": 64, "objective": "projection"}},
         {".evaluation.ttt.layers": "all"}),
        ("make both multiples of {}", {".resources": {"gpus": 3, "nodes": 2}}, {".resources.gpus": 4}),
        ("does not support it; set next_token, or use a gpt",
         {".evaluation.ttt": {"chunk": 64, "objective": "projection", "layers": "all"}},
         {".evaluation.ttt.objective": "next_token"}, {".model": GPT}),
        ("set precision: bf16 or fp8", {".optimizer": {"kind": "adamw8bit", "groups": NARROW}},
         {".precision": "bf16"}, {".precision": "fp8"}),
        ("set fp32 (each process then holds a share of them), or parallel: ddp",
         {".optimizer": {"kind": "adamw8bit", "groups": NARROW}, ".precision": "bf16", ".parallel": "fsdp"},
         {".optimizer.groups.matrices.weights": "fp32"}, {".parallel": "ddp"}),
        ("only matrices have a scaled rate; set decoupled or l2",
         {".optimizer": {"kind": "muon", "groups": {"tables": {"decay": "scaled"}}}},
         {".optimizer.groups.tables.decay": "decoupled"}, {".optimizer.groups.tables.decay": "l2"}),
        ("Muon has no betas; set optimizer.muon_momentum and muon_beta2 instead",
         {".optimizer": {"kind": "muon", "groups": {"matrices": {"betas": [0.9, 0.99]}}}},
         {".optimizer.groups.matrices": OUT, ".optimizer.muon_momentum": 0.9, ".optimizer.muon_beta2": 0.99}),
        ("only matrices and tables may be bf16; leave it out",
         {".precision": "bf16", ".optimizer": {"groups": {"vectors": {"weights": "bf16"}}}},
         {".optimizer.groups.vectors": OUT}),
        ("names no width; leave it out",
         {".model": {"family": "tests.families.toy", "width": 8},
          ".optimizer": {"groups": {"vectors": {"width_exponent": -0.5}}}},
         {".optimizer.groups.vectors.width_exponent": OUT}),
    ],
    "config/schema.py": [
        ("a run has the same name; choose another", {"foreign.r": "folder"},
         {"foreign": {"other": "folder"}}),
        ("has no stored text to compare with; leave it out",
         {"datasets.web": STREAM, "datasets.docs.cleaning": {"exact": True, "against": ["web"]}},
         {"datasets.docs.cleaning.against": []}),
        ("has the text of {}; name that",
         {"datasets.twin": {"like": "docs"}, "datasets.mine": MINE | compared_with("twin")},
         {"datasets.mine.cleaning.against": ["docs"]}),
        ("would come before themselves; leave {} out",
         {"datasets.docs": DOCS | compared_with("mine"), "datasets.mine": MINE | compared_with("docs")},
         {"datasets.docs.cleaning.against": []}, {"datasets.mine.cleaning.against": []}),
    ],
    "config/spec.py": [
        ("set schedule: wsd, which decays at the end of the time, or constant", {".stages.0.max_hours": 8},
         {".stages.0.schedule": "wsd"}, {".stages.0.schedule": "constant"}),
        ("set schedule: wsd, or leave weight_decay_end out",
         {".optimizer": {"weight_decay_end": 0.0}, ".defaults": {"max_hours": 1, "schedule": "constant"}},
         {".defaults.schedule": "wsd"}, {".optimizer.weight_decay_end": OUT}),
        ("windows_per_step; leave one of them out",
         {".defaults.windows_per_step": 8, ".defaults.grad_accum": 2}, {".defaults.windows_per_step": OUT},
         {".defaults.grad_accum": OUT}),
        ("is a stream, without a train split; leave it out", WEB | {".evaluation.train_bytes": 1000},
         {".evaluation.train_bytes": OUT}),
        ("evaluation.tasks lists no task; add one, or leave it out", {".defaults.tasks_every": 50},
         {".evaluation.tasks.q": {"file": "q.jsonl"}}, {".defaults.tasks_every": OUT}),
        (".{}: {}; set ddp, or leave it out", {".defaults.samples_every": 50, ".parallel": "fsdp"},
         {".parallel": "ddp"}, {".defaults.samples_every": OUT}),
        ("has no loops; leave it out", {".model": GPT, ".defaults.n_loops": 4}, {".defaults.n_loops": OUT}),
        ("use an encoded dataset, such as hub",
         {"datasets.web": STREAM, ".data": {"mix": {"docs": 1, "web": 1}}},
         {"datasets.web.source.kind": "hub"}),
        (".val_every: {} is a stream and has no validation split; leave it out",
         WEB | {".defaults.val_every": 50}, {".defaults.val_every": OUT}),
        (".validation is 0; raise it, or leave val_every out",
         {"datasets.mine": MINE | {"validation": 0}, ".stages.1.data": "mine", ".stages.1.val_every": 50},
         {"datasets.mine.validation": 0.1}, {".stages.1.val_every": OUT}),
        (".packing: best_fit needs all documents in advance, but {} is a stream; leave it out",
         WEB | {".defaults.packing": "best_fit"}, {".defaults.packing": OUT}),
        (".packing: {}; leave it out",
         {".model": NGRAM, "datasets.docs.ngram": 0.5, ".defaults.packing": "best_fit"},
         {".defaults.packing": OUT}),
        ("which reads its files in turn anyway; leave it out", WEB | {".defaults.order": "text"},
         {".defaults.order": OUT}),
        (".attend: document: needs packed rows; set packing: best_fit",
         {".model": GPT, ".defaults.attend": "document"}, {".defaults.packing": "best_fit"}),
        ("attends to the whole row; leave it out",
         {".defaults.attend": "document", ".defaults.packing": "best_fit"}, {".defaults.attend": OUT}),
        (".learn: assistant: {}; set packing: best_fit", ON_TALK | {".defaults.learn": "assistant"},
         {".defaults.packing": "best_fit"}),
        ("has one dataset of conversations; name one",
         REWARDED | {"datasets.more": TALK, ".data": {"mix": {"talk": 1, "more": 1}}}, {".data": "talk"}),
        ("learns from its own answers; leave packing, learn and order out",
         REWARDED | {".defaults.packing": "best_fit", ".defaults.learn": "assistant"},
         {".defaults.packing": OUT, ".defaults.learn": OUT}),
        ("sampling needs the whole model in each process; set parallel: ddp",
         REWARDED | {".parallel": "fsdp"}, {".parallel": "ddp"}),
    ],
    "config/settings.py": [
        ("write stages.NAME.SETTING, NAME being {}", {".grid": {"stages.lr": [0.001]}},
         {".grid": {"stages.a.lr": [0.001]}}),
        ("leave it out there, or write stages.{}.{}", {".grid": {"lr": [0.001]}}, {".stages.1.lr": OUT},
         {".grid": {"stages.b.lr": [0.001]}}),
        ("overrides the model's loops; write n_loops",
         {".defaults.n_loops": 2, ".grid": {"model.recurrence.loops": [2, 3]}},
         {".grid": {"n_loops": [2, 3]}}),
        ("leave values out, or make several sweeps", {".grid": {"seed": [*range(201)]}},
         {".grid.seed": [*range(200)]}),
        ("{}: {}; name the values: {name: value}",
         {".stages.1.lr": OUT, ".grid": {"seed": [1], "lr": [0.004, "4e-3"]}},
         {".grid.lr": {"one": 0.004, "two": 0.005}}),
        ("cannot be part of a name; name the values: {name: value, ...}",
         {".grid": {"model": [{"preset": "tiny"}]}}, {".grid.model": {"small": {"preset": "tiny"}}}),
    ],
    "config/data.py": [
        ("is a size, which {} does not compare; use >= or <=",
         {"datasets.docs.cleaning": {"filters": ["bytes ~ 200"]}},
         {"datasets.docs.cleaning.filters": ["bytes >= 200"]}),
        ("is inherited from {} (key like); leave it out",
         {"datasets.twin": {"like": "docs", "validation": 0.1}}, {"datasets.twin.validation": OUT}),
        ("itself inherits from {}; name that",
         {"datasets.twin": {"like": "docs"}, "datasets.third": {"like": "twin"}},
         {"datasets.third.like": "docs"}),
        ("truncates text, and a conversation is JSON; leave it out",
         ON_TALK | {"datasets.talk": TALK | {"max_document_bytes": 100}},
         {"datasets.talk.max_document_bytes": OUT}),
        ("makes conversations; set format: chat, or leave it out", {"datasets.docs.answer_column": "answer"},
         {"datasets.docs.format": "chat"}, {"datasets.docs.answer_column": OUT}),
    ],
    "data/sources/stream.py": [
        ("a stream compares no documents; leave out all of it but filters",
         {"datasets.web": STREAM | {"cleaning": {"filters": ["bytes >= 9"], "exact": True}}},
         {"datasets.web.cleaning.exact": OUT}, {"datasets.web.source.kind": "hub"}),
        ("is a stream, which is not stored; give a source",
         {"datasets.web": STREAM, "datasets.twin": {"like": "web"}}, {"datasets.twin": STREAM}),
        ("so nothing can be deleted; leave it out", {"datasets.web": STREAM | {"temp": True}},
         {"datasets.web.temp": OUT}),
        ("leave it out, or download the text: source.kind: hub", {"datasets.web": STREAM | {"ngram": 0.5}},
         {"datasets.web.ngram": OUT}, {"datasets.web.source.kind": "hub"}),
        ("a stream can only be text; download the conversations: source.kind: hub",
         {"datasets.web": STREAM | {"format": "chat"}}, {"datasets.web.source.kind": "hub"}),
    ],
    "data/sources/hub.py": [
        ("a stream reads only parquet files (got {}); set source.kind: hub",
         {"datasets.web.source": STREAM["source"] | {"files": ["a.jsonl"]}},
         {"datasets.web.source.kind": "hub"}),
        ("take reads only parquet files (got {}); {}",
         {"datasets.web.source": HUB | {"files": ["a.jsonl"], "take": "1 MB"}},
         {"datasets.web.source.take": OUT}),
        ("leave take out, or download the file and set source.kind: local",
         {"datasets.web.source": HUB | {"files": ["a.jsonl"], "take": "1 MB"}},
         {"datasets.web.source": {"kind": "local", "files": ["a.jsonl"], "take": "1 MB"}}),
    ],
    "data/sources/tokens.py": [
        ("published shards {}; leave it out", {"datasets.web": SHARDS | {"id_column": "id"}},
         {"datasets.web.id_column": OUT}),
    ],
    "config/checks.py": [
        ("or evaluate on {}",
         TWO | {"datasets.one.id_column": "uuid"},
         {".evaluation.data": "two"}),
        ("give both the same {}, {}",
         TWO | {"datasets.one.id_column": "uuid"},
         {"datasets.two.id_column": "uuid"}, {"datasets.one.id_column": "id"}),
        ("hold out different documents of it, because their {} differs",
         TWO | {"datasets.one.split_by": {"column": "url"}},
         {"datasets.two.split_by": {"column": "url"}}),
        ("set datasets.{}.validation: {}, {}",
         TWO | {"datasets.one.validation": 0.1},
         {"datasets.two.validation": 0.1}),
        ("{}, but {}; name the same path in both",
         TWO | {"datasets.one.source.files": ["texts/a.txt"], "datasets.two.source.files": ["texts"]},
         {"datasets.one.source.files": ["texts"]}, {"datasets.two.source.files": ["texts/a.txt"]}),
        ("which {} holds out; take it out of one of them",
         TWO | {"datasets.one": SHARDS, "datasets.two": SHARDS, ".model": GPT,
               "datasets.two.source.train": ["v"], "datasets.two.source.validation": ["w"]},
         {"datasets.two.source.train": ["t"]}),
        ("is a stream, which is not stored; name another dataset",
         TOKENIZED | {"datasets.web": STREAM, "tokenizers.t.data": "web"}, {"tokenizers.t.data": "docs"}),
        ("has token ids instead of text; name another dataset",
         TOKENIZED | {"datasets.web": SHARDS, "tokenizers.t.data": "web"}, {"tokenizers.t.data": "docs"}),
        ("use a dataset of bytes, or a model of family {}", TOKENIZED | {".model": "tiny"},
         {"datasets.docs.tokenizer": OUT}, {".model": GPT}),
        ("is decided by the dataset's tokenizer ({}); leave it out",
         TOKENIZED | {".model": {"preset": GPT, "vocab_size": 300}}, {".model.vocab_size": OUT}),
        ("use a dataset of bytes, or leave the n-gram index out",
         TOKENIZED | {".model": {"preset": GPT, "ngram": {}}, "datasets.docs.ngram": 0.5},
         {"datasets.docs.tokenizer": OUT}, {".model.ngram": OUT}),
        ("is a stream and has no validation shards; name another dataset", WEB | {".evaluation": {}},
         {".evaluation.data": "docs"}),
        ("needs groups of documents; set datasets.{}.split_by, or leave it out",
         {".evaluation.largest_group": 0.1}, {"datasets.docs.split_by": {"column": "url"}},
         {".evaluation.largest_group": OUT}),
        ("leave compress or model.ngram out", {".model": NGRAM, "datasets.docs.ngram": 0.5, ".compress": {}},
         {".compress": OUT}, {".model.ngram": OUT}),
        ("set that to the share of documents to count, such as 0.8", {".model": NGRAM},
         {"datasets.docs.ngram": 0.8}),
        ("name that first, or leave model.ngram out",
         {".model": NGRAM, "datasets.docs.ngram": 0.5, "datasets.mine": MINE,
          ".stages.1.data": {"mix": {"mine": 1, "docs": 1}}},
         {".stages.1.data": {"mix": {"docs": 1, "mine": 1}}}, {".model.ngram": OUT}),
        ("take the file out of one of them, or leave model.ngram out",
         {".model": NGRAM, "datasets.mine": MINE | {"ngram": 0.5}, ".data": {"mix": {"mine": 1, "more": 1}},
          "datasets.more": {"source": {"kind": "local", "files": ["a.jsonl", "c.jsonl"]}}},
         {"datasets.mine.source.files": ["b.jsonl"]}, {"datasets.more.source.files": ["c.jsonl"]},
         {".model.ngram": OUT}),
        ("train a stage on data of format: chat, or leave it out",
         {".evaluation.tasks.q": {"file": "q.jsonl", "chat": True}},
         {"datasets.talk": TALK, ".stages.1.data": "talk"}, {".evaluation.tasks.q.chat": OUT}),
    ],
    "config/tasks.py": [
        ("a question in chat form has no shots; leave shots or chat out",
         ON_TALK | {".evaluation.tasks.q": {"file": "q", "chat": True, "shots": 2}},
         {".evaluation.tasks.q.shots": OUT}, {".evaluation.tasks.q.chat": OUT}),
    ],
    "model/gpt/config.py": [
        ("{}; leave {} or depth out", {".model": {"preset": GPT, "depth": 8}}, {".model.depth": OUT},
         {".model": {"family": "gpt", "depth": 8}}),
        ("use L for full, S for short_window, as in SSSL (got {})",
         {".model": {"preset": GPT, "windows": "XL"}}, {".model.windows": "SSSL"}),
        ("so no layer is looped; set it, or leave loops out",
         {".model": {"preset": GPT, "recurrence": {"loops": 2}}}, {".model.recurrence.layers": [0, 1]},
         {".model.recurrence.loops": OUT}),
    ],
    "model/spider/config.py": [
        ("set precision: bf16, or leave compile out", {".compile": True, ".precision": "fp32"},
         {".precision": "bf16"}, {".compile": OUT}),
    ],
}
# fmt: on


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Work in a folder with the texts that a configuration may name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "talk.jsonl", "q.jsonl", "texts/a.txt"):
        (tmp_path / name).write_text("{}")


@pytest.mark.parametrize(
    ("phrase", "broken", "remedies"),
    [
        pytest.param(phrase, broken, remedies, id=phrase.replace(" ", "-"))
        for rows in ADVICE.values()
        for phrase, broken, *remedies in rows
    ],
)
def test_the_keys_of_the_advice_make_a_configuration_valid(phrase, broken, remedies):
    plain = changed(BASE, broken)
    with pytest.raises(ValueError) as caught:
        load_config(plain)
    check_said(str(caught.value), phrase)
    for remedy in remedies:
        load_config(changed(plain, remedy))


def test_a_run_of_several_or_of_a_sweep_is_named():
    config = load_config(changed(BASE, {"runs.other": BASE["runs"]["r"] | {"grid": {"seed": [1, 2]}}}))
    with refused("config/schema.py", "the configuration has several runs, name one: {}"):
        config.choose()
    assert config.choose("r") == ("r", "a")
    with refused("config/schema.py", "is a sweep, name one of its runs: {}"):
        config.run("other")
    assert config.run("other-seed1").seed == 1


def test_one_of_two_equal_settings_is_enough():
    config = load_config(BASE)
    given = [Given("lr=0.1", "lr", "0.1"), Given("lr=0.2", "lr", "0.2")]
    with refused("config/schema.py", "are the same setting; give one of them"):
        with_settings(config, "r", "a", given)
    with_settings(config, "r", "a", given[:1])


def test_one_of_two_equal_keys_is_removed_or_renamed(tmp_path):
    blocks = ["datasets: {docs: {source: {kind: pydocs}}}\n", f"runs: {json.dumps(BASE['runs'])}\n"]
    (config := tmp_path / "c.yaml").write_text("".join([*blocks, *blocks]))
    with refused("config/schema.py", "the key {} is given in {}; remove or rename one", error=ConfigError):
        load_config(config)
    config.write_text("".join(blocks))
    load_config(config)


def test_the_password_of_the_store_is_set_in_the_environment(monkeypatch, tmp_path):
    given = changed(BASE, {"tracking.uri": (whole := "http://ada:secret@host")})
    with refused("config/run.py", "set it in the environment: for a server MLFLOW_TRACKING_USERNAME and"):
        load_config(given)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", whole)
    settings = load_config(changed(given, {"tracking": OUT})).tracking
    assert target.store_uri(tmp_path, settings) == whole
