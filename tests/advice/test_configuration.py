"""Each message about the configuration: it is refused, the advice changes some keys, and it is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spider.config import ConfigError, load_config
from spider.config.schema import Given, with_settings
from spider.tracking import target

from .followed import OUT, changed, check_said, refused

BASE = {
    "datasets": {"docs": {"source": {"kind": "pydocs"}}},
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
WEB = {"datasets.web": STREAM, "runs.r.data": "web", "runs.r.evaluation.data": "docs"}
ON_TALK = {"datasets.talk": TALK, "runs.r.data": "talk"}
REWARDED = ON_TALK | {"runs.r.defaults.rollouts": {}, "runs.r.defaults.micro_batch": 16}
TOKENIZED = {"tokenizers.t": {"data": "docs"}, "datasets.docs.tokenizer": "t", "runs.r.model": GPT}
LADDER = {
    "data": "docs",
    "model": "tiny",
    "defaults": {"seq_len": 128, "micro_batch": 4},
    "stages": [{"name": "main"}],
    "size": "model.hidden",
    "rungs": [{"flops": flops, "sizes": [16, 32, 64]} for flops in (1e9, 2e9)],
}

NARROW = {"matrices": {"weights": "bf16"}}
#: A phrase of a message, by module; the keys that provoke it; and the keys to change, for each remedy.
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "config/run.py": [
        (
            "set kind: adamw8bit, or fp32",
            {"runs.r.optimizer": {"kind": "muon", "groups": NARROW}, "runs.r.precision": "bf16"},
            {"runs.r.optimizer.kind": "adamw8bit"},
            {"runs.r.optimizer.groups.matrices.weights": "fp32"},
        ),
        (
            "does not use Muon; set kind: muon, or leave it out",
            {"runs.r.optimizer": {"kind": "adamw", "muon_rows": True}},
            {"runs.r.optimizer.kind": "muon"},
            {"runs.r.optimizer.muon_rows": OUT},
        ),
        (
            "has no scaled decay; set kind: muon, or another decay",
            {"runs.r.optimizer": {"groups": {"matrices": {"decay": "scaled"}}}},
            {"runs.r.optimizer.kind": "muon"},
            {"runs.r.optimizer.groups.matrices.decay": "l2"},
        ),
        (
            "trains output projections of feed-forwards only; set layers: all",
            {"runs.r.model": GPT, "runs.r.evaluation.ttt": {"chunk": 64, "objective": "projection"}},
            {"runs.r.evaluation.ttt.layers": "all"},
        ),
        (
            "make both multiples of {}",
            {"runs.r.resources": {"gpus": 3, "nodes": 2}},
            {"runs.r.resources.gpus": 4},
        ),
        (
            "does not support it; set next_token, or use a gpt",
            {
                "runs.r.evaluation.ttt": {
                    "chunk": 64,
                    "objective": "projection",
                    "layers": "all",
                }
            },
            {"runs.r.evaluation.ttt.objective": "next_token"},
            {"runs.r.model": GPT},
        ),
        (
            "set precision: bf16 or fp8",
            {"runs.r.optimizer": {"kind": "adamw8bit", "groups": NARROW}},
            {"runs.r.precision": "bf16"},
            {"runs.r.precision": "fp8"},
        ),
        (
            "set fp32 (each process then holds a share of them), or parallel: ddp",
            {
                "runs.r.optimizer": {"kind": "adamw8bit", "groups": NARROW},
                "runs.r.precision": "bf16",
                "runs.r.parallel": "fsdp",
            },
            {"runs.r.optimizer.groups.matrices.weights": "fp32"},
            {"runs.r.parallel": "ddp"},
        ),
        (
            "only matrices have a scaled rate; set decoupled or l2",
            {"runs.r.optimizer": {"kind": "muon", "groups": {"tables": {"decay": "scaled"}}}},
            {"runs.r.optimizer.groups.tables.decay": "decoupled"},
            {"runs.r.optimizer.groups.tables.decay": "l2"},
        ),
        (
            "Muon has no betas; set optimizer.muon_momentum and muon_beta2 instead",
            {"runs.r.optimizer": {"kind": "muon", "groups": {"matrices": {"betas": [0.9, 0.99]}}}},
            {
                "runs.r.optimizer.groups.matrices": OUT,
                "runs.r.optimizer.muon_momentum": 0.9,
                "runs.r.optimizer.muon_beta2": 0.99,
            },
        ),
        (
            "only matrices and tables may be bf16; leave it out",
            {
                "runs.r.precision": "bf16",
                "runs.r.optimizer": {"groups": {"vectors": {"weights": "bf16"}}},
            },
            {"runs.r.optimizer.groups.vectors": OUT},
        ),
        (
            "names no width; leave it out",
            {
                "runs.r.model": {"family": "tests.families.toy", "width": 8},
                "runs.r.optimizer": {"groups": {"vectors": {"width_exponent": -0.5}}},
            },
            {"runs.r.optimizer.groups.vectors.width_exponent": OUT},
        ),
    ],
    "config/schema.py": [
        (
            "a run has the same name; choose another",
            {"foreign.r": "folder"},
            {"foreign": {"other": "folder"}},
        ),
        (
            "has no stored text to compare with; leave it out",
            {"datasets.web": STREAM, "datasets.docs.cleaning": {"exact": True, "against": ["web"]}},
            {"datasets.docs.cleaning.against": []},
        ),
        (
            "has the text of {}; name that",
            {
                "datasets.twin": {"like": "docs"},
                "datasets.mine": MINE | {"cleaning": {"exact": True, "against": ["twin"]}},
            },
            {"datasets.mine.cleaning.against": ["docs"]},
        ),
        (
            "would come before themselves; leave {} out",
            {
                "datasets.docs.cleaning": {"exact": True, "against": ["mine"]},
                "datasets.mine": MINE | {"cleaning": {"exact": True, "against": ["docs"]}},
            },
            {"datasets.docs.cleaning.against": []},
            {"datasets.mine.cleaning.against": []},
        ),
    ],
    "config/spec.py": [
        (
            "set schedule: wsd, which decays at the end of the time, or constant",
            {"runs.r.stages.0.max_hours": 8},
            {"runs.r.stages.0.schedule": "wsd"},
            {"runs.r.stages.0.schedule": "constant"},
        ),
        (
            "set schedule: wsd, or leave weight_decay_end out",
            {
                "runs.r.optimizer": {"weight_decay_end": 0.0},
                "runs.r.defaults": {"max_hours": 1, "schedule": "constant"},
            },
            {"runs.r.defaults.schedule": "wsd"},
            {"runs.r.optimizer.weight_decay_end": OUT},
        ),
        (
            "ckpt_minutes saves by the clock; leave one of them out",
            {"runs.r.defaults.keep_every": 100, "runs.r.defaults.ckpt_minutes": 10},
            {"runs.r.defaults.keep_every": OUT},
            {"runs.r.defaults.ckpt_minutes": OUT},
        ),
        (
            "windows_per_step; leave one of them out",
            {"runs.r.defaults.windows_per_step": 8, "runs.r.defaults.grad_accum": 2},
            {"runs.r.defaults.windows_per_step": OUT},
            {"runs.r.defaults.grad_accum": OUT},
        ),
        (
            "is a stream, without a train split; leave it out",
            WEB | {"runs.r.evaluation.train_bytes": 1000},
            {"runs.r.evaluation.train_bytes": OUT},
        ),
        (
            "evaluation.tasks lists no task; add one, or leave it out",
            {"runs.r.defaults.tasks_every": 50},
            {"runs.r.evaluation.tasks.q": {"file": "q.jsonl"}},
            {"runs.r.defaults.tasks_every": OUT},
        ),
        (
            ".{}: {}; set ddp, or leave it out",
            {"runs.r.defaults.samples_every": 50, "runs.r.parallel": "fsdp"},
            {"runs.r.parallel": "ddp"},
            {"runs.r.defaults.samples_every": OUT},
        ),
        (
            "has no loops; leave it out",
            {"runs.r.model": GPT, "runs.r.defaults.n_loops": 4},
            {"runs.r.defaults.n_loops": OUT},
        ),
        (
            "use an encoded dataset, such as hub",
            {"datasets.web": STREAM, "runs.r.data": {"mix": {"docs": 1, "web": 1}}},
            {"datasets.web.source.kind": "hub"},
        ),
        (
            ".val_every: {} is a stream and has no validation split; leave it out",
            WEB | {"runs.r.defaults.val_every": 50},
            {"runs.r.defaults.val_every": OUT},
        ),
        (
            ".validation is 0; raise it, or leave val_every out",
            {
                "datasets.mine": MINE | {"validation": 0},
                "runs.r.stages.1.data": "mine",
                "runs.r.stages.1.val_every": 50,
            },
            {"datasets.mine.validation": 0.1},
            {"runs.r.stages.1.val_every": OUT},
        ),
        (
            ".packing: best_fit needs all documents in advance, but {} is a stream; leave it out",
            WEB | {"runs.r.defaults.packing": "best_fit"},
            {"runs.r.defaults.packing": OUT},
        ),
        (
            ".packing: {}; leave it out",
            {"runs.r.model": NGRAM, "datasets.docs.ngram": 0.5, "runs.r.defaults.packing": "best_fit"},
            {"runs.r.defaults.packing": OUT},
        ),
        (
            "which reads its files in turn anyway; leave it out",
            WEB | {"runs.r.defaults.order": "text"},
            {"runs.r.defaults.order": OUT},
        ),
        (
            ".attend: document: needs packed rows; set packing: best_fit",
            {"runs.r.model": GPT, "runs.r.defaults.attend": "document"},
            {"runs.r.defaults.packing": "best_fit"},
        ),
        (
            "attends to the whole row; leave it out",
            {"runs.r.defaults.attend": "document", "runs.r.defaults.packing": "best_fit"},
            {"runs.r.defaults.attend": OUT},
        ),
        (
            ".learn: assistant: {}; set packing: best_fit",
            ON_TALK | {"runs.r.defaults.learn": "assistant"},
            {"runs.r.defaults.packing": "best_fit"},
        ),
        (
            "has one dataset of conversations; name one",
            REWARDED | {"datasets.more": TALK, "runs.r.data": {"mix": {"talk": 1, "more": 1}}},
            {"runs.r.data": "talk"},
        ),
        (
            "learns from its own answers; leave packing, learn and order out",
            REWARDED | {"runs.r.defaults.packing": "best_fit", "runs.r.defaults.learn": "assistant"},
            {"runs.r.defaults.packing": OUT, "runs.r.defaults.learn": OUT},
        ),
        (
            "sampling needs the whole model in each process; set parallel: ddp",
            REWARDED | {"runs.r.parallel": "fsdp"},
            {"runs.r.parallel": "ddp"},
        ),
    ],
    "config/settings.py": [
        (
            "write stages.NAME.SETTING, NAME being {}",
            {"runs.r.grid": {"stages.lr": [1e-3]}},
            {"runs.r.grid": {"stages.a.lr": [1e-3]}},
        ),
        (
            "leave it out there, or write stages.{}.{}",
            {"runs.r.grid": {"lr": [1e-3]}},
            {"runs.r.stages.1.lr": OUT},
            {"runs.r.grid": {"stages.b.lr": [1e-3]}},
        ),
        (
            "overrides the model's loops; write n_loops",
            {"runs.r.defaults.n_loops": 2, "runs.r.grid": {"model.recurrence.loops": [2, 3]}},
            {"runs.r.grid": {"n_loops": [2, 3]}},
        ),
        (
            "leave values out, or make several sweeps",
            {"runs.r.grid": {"seed": [*range(201)]}},
            {"runs.r.grid.seed": [*range(200)]},
        ),
        (
            "{}: {}; name the values: {name: value}",
            {"runs.r.stages.1.lr": OUT, "runs.r.grid": {"seed": [1], "lr": [4e-3, "4e-3"]}},
            {"runs.r.grid.lr": {"one": 4e-3, "two": 5e-3}},
        ),
        (
            "cannot be part of a name; name the values: {name: value, ...}",
            {"runs.r.grid": {"model": [{"preset": "tiny"}]}},
            {"runs.r.grid.model": {"small": {"preset": "tiny"}}},
        ),
    ],
    "config/data.py": [
        (
            "is inherited from {} (key like); leave it out",
            {"datasets.twin": {"like": "docs", "validation": 0.1}},
            {"datasets.twin.validation": OUT},
        ),
        (
            "itself inherits from {}; name that",
            {"datasets.twin": {"like": "docs"}, "datasets.third": {"like": "twin"}},
            {"datasets.third.like": "docs"},
        ),
        (
            "leave it out, or download the text: source.kind: hub",
            WEB | {"datasets.web": STREAM | {"cleaning": {"exact": True}}},
            {"datasets.web.cleaning": OUT},
            {"datasets.web.source.kind": "hub"},
        ),
        (
            "truncates text, and a conversation is JSON; leave it out",
            ON_TALK | {"datasets.talk": TALK | {"max_document_bytes": 100}},
            {"datasets.talk.max_document_bytes": OUT},
        ),
        (
            "makes conversations; set format: chat, or leave it out",
            {"datasets.docs.answer_column": "answer"},
            {"datasets.docs.format": "chat"},
            {"datasets.docs.answer_column": OUT},
        ),
        (
            "is a size, which {} does not compare; use >= or <=",
            {"datasets.docs.cleaning": {"filters": ["bytes ~ 200"]}},
            {"datasets.docs.cleaning.filters": ["bytes >= 200"]},
        ),
    ],
    "data/sources/stream.py": [
        (
            "limit the tokens of the stages, or download the text",
            WEB | {"datasets.web": {"source": STREAM["source"] | {"take": "1 MB"}}},
            {"datasets.web.source.take": OUT, "runs.r.defaults.tokens": 1_000_000},
            {"datasets.web.source.kind": "hub"},
        ),
        (
            "is a stream, which is not stored; give a source",
            {"datasets.web": STREAM, "datasets.twin": {"like": "web"}},
            {"datasets.twin": STREAM},
        ),
        (
            "so nothing can be deleted; leave it out",
            {"datasets.web": STREAM | {"temp": True}},
            {"datasets.web.temp": OUT},
        ),
        (
            "leave it out, or download the text: source.kind: hub",
            {"datasets.web": STREAM | {"ngram": 0.5}},
            {"datasets.web.ngram": OUT},
            {"datasets.web.source.kind": "hub"},
        ),
        (
            "a stream can only be text; download the conversations: source.kind: hub",
            {"datasets.web": STREAM | {"format": "chat"}},
            {"datasets.web.source.kind": "hub"},
        ),
    ],
    "data/sources/hub.py": [
        (
            "a stream reads only parquet files (got {}); set source.kind: hub",
            {"datasets.web.source": STREAM["source"] | {"files": ["a.jsonl"]}},
            {"datasets.web.source.kind": "hub"},
        ),
        (
            "take reads only parquet files (got {}); {}",
            {"datasets.web.source": HUB | {"files": ["a.jsonl"], "take": "1 MB"}},
            {"datasets.web.source.take": OUT},
        ),
        (
            "leave take out, or download the file and set source.kind: local",
            {"datasets.web.source": HUB | {"files": ["a.jsonl"], "take": "1 MB"}},
            {"datasets.web.source": {"kind": "local", "files": ["a.jsonl"], "take": "1 MB"}},
        ),
    ],
    "data/sources/tokens.py": [
        (
            "published shards {}; leave it out",
            {"datasets.web": SHARDS | {"id_column": "id"}},
            {"datasets.web.id_column": OUT},
        )
    ],
    "config/checks.py": [
        (
            "or evaluate on {}",
            {
                "datasets.one": MINE | {"id_column": "uuid"},
                "datasets.two": MINE,
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"runs.r.evaluation.data": "two"},
        ),
        (
            "give both the same {}, {}",
            {
                "datasets.one": MINE | {"id_column": "uuid"},
                "datasets.two": MINE,
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"datasets.two.id_column": "uuid"},
            {"datasets.one.id_column": "id"},
        ),
        (
            "hold out different documents of it, because their {} differs",
            {
                "datasets.one": MINE | {"split_by": {"column": "url"}},
                "datasets.two": MINE,
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"datasets.two.split_by": {"column": "url"}},
        ),
        (
            "set datasets.{}.validation: {}, {}",
            {
                "datasets.one": MINE | {"validation": 0.1},
                "datasets.two": MINE,
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"datasets.two.validation": 0.1},
        ),
        (
            "{}, but {}; name the same path in both",
            {
                "datasets.one": {"source": {"kind": "local", "files": ["texts/a.txt"]}},
                "datasets.two": {"source": {"kind": "local", "files": ["texts"]}},
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"datasets.one.source.files": ["texts"]},
            {"datasets.two.source.files": ["texts/a.txt"]},
        ),
        (
            "which {} holds out; take it out of one of them",
            {
                "datasets.one": SHARDS,
                "datasets.two.source": SHARDS["source"] | {"train": ["v"], "validation": ["w"]},
                "runs.r.model": GPT,
                "runs.r.data": "two",
                "runs.r.evaluation.data": "one",
            },
            {"datasets.two.source.train": ["t"]},
        ),
        (
            "is a stream, which is not stored; name another dataset",
            TOKENIZED | {"datasets.web": STREAM, "tokenizers.t.data": "web"},
            {"tokenizers.t.data": "docs"},
        ),
        (
            "has token ids instead of text; name another dataset",
            TOKENIZED | {"datasets.web": SHARDS, "tokenizers.t.data": "web"},
            {"tokenizers.t.data": "docs"},
        ),
        (
            "use a dataset of bytes, or a model of family {}",
            TOKENIZED | {"runs.r.model": "tiny"},
            {"datasets.docs.tokenizer": OUT},
            {"runs.r.model": GPT},
        ),
        (
            "is decided by the dataset's tokenizer ({}); leave it out",
            TOKENIZED | {"runs.r.model": {"preset": GPT, "vocab_size": 300}},
            {"runs.r.model.vocab_size": OUT},
        ),
        (
            "use a dataset of bytes, or leave the n-gram index out",
            TOKENIZED | {"runs.r.model": {"preset": GPT, "ngram": {}}, "datasets.docs.ngram": 0.5},
            {"datasets.docs.tokenizer": OUT},
            {"runs.r.model.ngram": OUT},
        ),
        (
            "is a stream and has no validation shards; name another dataset",
            WEB | {"runs.r.evaluation": {}},
            {"runs.r.evaluation.data": "docs"},
        ),
        (
            "needs groups of documents; set datasets.{}.split_by, or leave it out",
            {"runs.r.evaluation.largest_group": 0.1},
            {"datasets.docs.split_by": {"column": "url"}},
            {"runs.r.evaluation.largest_group": OUT},
        ),
        (
            "leave compress or model.ngram out",
            {"runs.r.model": NGRAM, "datasets.docs.ngram": 0.5, "runs.r.compress": {}},
            {"runs.r.compress": OUT},
            {"runs.r.model.ngram": OUT},
        ),
        (
            "set that to the share of documents to count, such as 0.8",
            {"runs.r.model": NGRAM},
            {"datasets.docs.ngram": 0.8},
        ),
        (
            "name that first, or leave model.ngram out",
            {
                "runs.r.model": NGRAM,
                "datasets.docs.ngram": 0.5,
                "datasets.mine": MINE,
                "runs.r.stages.1.data": {"mix": {"mine": 1, "docs": 1}},
            },
            {"runs.r.stages.1.data": {"mix": {"docs": 1, "mine": 1}}},
            {"runs.r.model.ngram": OUT},
        ),
        (
            "take the file out of one of them, or leave model.ngram out",
            {
                "runs.r.model": NGRAM,
                "datasets.mine": MINE | {"ngram": 0.5},
                "datasets.more": {"source": {"kind": "local", "files": ["a.jsonl", "c.jsonl"]}},
                "runs.r.data": {"mix": {"mine": 1, "more": 1}},
            },
            {"datasets.mine.source.files": ["b.jsonl"]},
            {"datasets.more.source.files": ["c.jsonl"]},
            {"runs.r.model.ngram": OUT},
        ),
        (
            "train a stage on data of format: chat, or leave it out",
            {"runs.r.evaluation.tasks.q": {"file": "q.jsonl", "chat": True}},
            {"datasets.talk": TALK, "runs.r.stages.1.data": "talk"},
            {"runs.r.evaluation.tasks.q.chat": OUT},
        ),
    ],
    "config/tasks.py": [
        (
            "a question in chat form has no shots; leave shots or chat out",
            ON_TALK | {"runs.r.evaluation.tasks.q": {"file": "q", "chat": True, "shots": 2}},
            {"runs.r.evaluation.tasks.q.shots": OUT},
            {"runs.r.evaluation.tasks.q.chat": OUT},
        )
    ],
    "model/gpt/config.py": [
        (
            "{}; leave {} or depth out",
            {"runs.r.model": {"preset": GPT, "depth": 8}},
            {"runs.r.model.depth": OUT},
            {"runs.r.model": {"family": "gpt", "depth": 8}},
        ),
        (
            "use L for full, S for short_window, as in SSSL (got {})",
            {"runs.r.model": {"preset": GPT, "windows": "XL"}},
            {"runs.r.model.windows": "SSSL"},
        ),
        (
            "so no layer is looped; set it, or leave loops out",
            {"runs.r.model": {"preset": GPT, "recurrence": {"loops": 2}}},
            {"runs.r.model.recurrence.layers": [0, 1]},
            {"runs.r.model.recurrence.loops": OUT},
        ),
    ],
    "model/spider/config.py": [
        (
            "set precision: bf16, or leave compile out",
            {"runs.r.compile": True, "runs.r.precision": "fp32"},
            {"runs.r.precision": "bf16"},
            {"runs.r.compile": OUT},
        ),
    ],
}


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
