"""Advice about evaluations: held-out text, tasks, test-time training, groups and mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spider.config import TTTConfig, load_config
from spider.config.scored import overlap_name, stage_with
from spider.config.tasks import JsonlTask
from spider.data.shards import Shards, balanced
from spider.evaluation.adapt import adapt
from spider.evaluation.foreign import ForeignModel
from spider.evaluation.golf_bytes import golf_bytes
from spider.evaluation.measures import train_stream
from spider.evaluation.questions import tasks
from spider.evaluation.text import LearnedFrom, validation_stream
from spider.model.reading import Scoring
from spider.tokens import BYTES
from spider.training.rollouts import Prompts
from tests.transformers_models import byte_level, gpt2
from tests.unit.evaluation.test_adapt import TOKENS, toy
from tests.unit.model.small_gpt import build_gpt

from .followed import refused
from .test_configuration import BASE
from .test_training import encoded

WINDOWS = Scoring(seq_len=16, overlap=0.5, batch=3)


def test_test_time_training_learns_all_parameters_or_at_a_lower_rate():
    few = TTTConfig(chunk=40, lr=0.05, layers="all")
    with refused("evaluation/adapt.py", "evaluation.ttt.layers: {}; leave it out"):
        adapt(toy(), TOKENS, few, WINDOWS)
    adapt(toy(), TOKENS, few.model_copy(update={"layers": None}), WINDOWS)
    wild = TTTConfig(chunk=8, lr=1e30)
    with refused("evaluation/adapt.py", "lower evaluation.ttt.lr"):
        adapt(build_gpt(), TOKENS, wild, WINDOWS)
    adapt(build_gpt(), TOKENS, wild.model_copy(update={"lr": 0.01}), WINDOWS)


def test_fewer_bytes_of_a_known_training_text_are_scored(tmp_path, finished, shards):
    folder = encoded(tmp_path / "toy", ["one two three " * 40, "four five six " * 40], validation=0)
    learned, key = LearnedFrom([(finished / "train.json", folder)], [], []), "evaluation.train_bytes"
    with refused("evaluation/measures.py", "bytes are more than the train split of {} has ({}); lower it"):
        train_stream(learned, 10**6, key)
    assert len(train_stream(learned, 300, key)[0]) > 300
    with refused("evaluation/measures.py", "the training text cannot be read; set it to 0"):
        train_stream(LearnedFrom([], [], []), 300, key)
    with refused("evaluation/golf_bytes.py", "and this text has none; leave it out"):
        golf_bytes(TOKENS, BYTES)


def test_the_text_of_a_stage_is_named_by_its_stage():
    config = load_config(BASE)
    with refused("config/scored.py", "no stage of the configuration has a text of this name; name RUN/STAGE"):
        stage_with(config, "0123456789abcdef", overlap_name)
    run, stage = config.choose()
    spec = config.stage(run, stage)
    assert stage_with(config, overlap_name(config, spec), overlap_name) == spec


def test_more_documents_are_held_out(tmp_path):
    texts = ["one two three four"] * 30
    none = encoded(tmp_path / "none", texts, validation=0)
    with refused("evaluation/text.py", "and encode again"):
        validation_stream(none, 100)
    assert validation_stream(encoded(tmp_path / "some", texts, validation=0.5), 100)
    with refused("training/rollouts.py", "does not hold a conversation; encode some, or hold more out"):
        Prompts(Shards(none, "validation"))
    held = encoded(tmp_path / "text", texts, validation=0.5)
    with refused("training/rollouts.py", "this document has no answer; encode the data with format: chat"):
        Prompts(Shards(held, "validation"))[0]
    said = '[{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]'
    talk = encoded(tmp_path / "talk", [said] * 30, validation=0.5, format="chat")
    assert Prompts(Shards(talk, "validation"))[0][1] == "2"


def test_groups_are_recorded_and_even(tmp_path):
    def grouped(name: str, groups: list[str], **settings: Any) -> Path:
        texts = [f"text {i} of many words" for i in range(len(groups))]
        return encoded(tmp_path / name, texts, {"url": groups}, **settings)

    split = {"split_by": {"column": "url"}}
    many = [str(i % 20) for i in range(200)]
    with refused("data/shards.py", "or leave the key out"):
        balanced(grouped("none", many, validation=0.5), 1000, 0.3)
    balanced(grouped("some", many, validation=0.5, **split), 1000, 0.3)
    few = grouped("few", ["0"] * 100 + ["1"] * 100, validation=0.7, **split)
    with refused("data/shards.py", "or evaluation.max_bytes, or leave largest_group out"):
        balanced(few, 1000, 0.3)
    balanced(grouped("more", many, validation=0.7, **split), 1000, 0.3)


def test_a_folder_of_transformers_gets_its_tokenizer(tmp_path):
    tokenizer = byte_level(["one two three"])
    folder = gpt2(tmp_path / "gpt2", tokenizer)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with refused("evaluation/foreign.py", "write it there with save_pretrained of transformers"):
        ForeignModel.load(folder, "cpu")
    tokenizer.save_pretrained(folder)
    ForeignModel.load(folder, "cpu")


def test_questions_are_exported_as_utf_8(tmp_path):
    file = tmp_path / "t.jsonl"
    row = '{"context": "Hé", "continuation": "Ho"}'
    file.write_bytes(row.encode("latin-1"))
    task = JsonlTask(file=str(file))
    with refused("evaluation/questions.py", "holds bytes that are not UTF-8; export the file as UTF-8"):
        [*tasks("t", task)]
    file.write_text(row, encoding="utf-8")
    assert len(next(tasks("t", task)).questions) == 1
