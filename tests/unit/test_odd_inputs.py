"""Valid but odd files end in one sentence that names the file, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spider.common.files import read_json
from spider.config.schema import Given, read_yaml
from spider.config.tasks import CoreTask, JsonlTask
from spider.data.chat import parse
from spider.evaluation.foreign import ForeignModel
from spider.evaluation.questions import tasks
from spider.tokens.stored import read_tokens
from tests.transformers_models import byte_level, gpt2, multilingual

DEEP = "[" * 100_000
DIGITS = "1" * 5_000
ENTRY = {"label": "a", "dataset_uri": "a.jsonl", "num_fewshot": [0]}
QUESTION = {"query": "q", "choices": ["a", "b"], "gold": 1}


def said(error: pytest.ExceptionInfo[ValueError]) -> str:
    """Return the message, which must be one short line."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 600, text
    return text


@pytest.mark.parametrize("text", [DEEP, DIGITS, f'{{"a": {DIGITS}}}', '{"format": 1'])
def test_json(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    for read in (read_json, read_tokens):
        with pytest.raises(ValueError) as error:
            read(path)
        assert said(error).startswith(f"{path}: not valid JSON (")
    with pytest.raises(ValueError) as error:
        parse(text)
    assert said(error).startswith("is not valid JSON (") or text == DIGITS


@pytest.mark.parametrize(
    "text", [DEEP, "2020-13-45", "!!int ''", "!!bool maybe", "!!timestamp x", DIGITS, "!!float x"]
)
def test_yaml(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"results: {text}\n")
    with pytest.raises(ValueError, match=r"config.yaml: not valid YAML: \S"):
        read_yaml(path)
    with pytest.raises(ValueError, match=r"^--lr: .* is not valid YAML$"):
        Given("--lr", "lr", text)


@pytest.mark.parametrize(
    "row",
    [
        {**QUESTION, "choices": None},
        {"context_options": True, "continuation": "c", "gold": 0},
        {"question": "q", "choices": {"label": ["A"], "text": 1}, "answerKey": "A"},
    ],
)
def test_rows_of_questions(row, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, (QUESTION, row))))
    with pytest.raises(ValueError) as error:
        list(tasks("t", JsonlTask(file=str(path))))
    assert said(error).startswith(f"{path}, line 2: choices must be a list")


def bundle(folder: Path, **changes: Any) -> CoreTask:
    (folder / "eval_data").mkdir(exist_ok=True)
    (folder / "eval_data/a.jsonl").write_text("\n".join([json.dumps(QUESTION)] * 3))
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\na,25\n")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": [ENTRY | changes]}))
    return CoreTask(folder=str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"label": None},
        {"dataset_uri": 1},
        {"num_fewshot": None},
        {"num_fewshot": ["x"]},
        {"continuation_delimiter": None},
    ],
    ids=str,
)
def test_tables_of_tasks(changes, tmp_path):
    assert len(list(tasks("core", bundle(tmp_path)))) == 1
    task = bundle(tmp_path, **changes)
    assert task.files() == [f"{tmp_path}/core.yaml", f"{tmp_path}/eval_meta_data.csv"]
    with pytest.raises(ValueError) as error:
        list(tasks("core", task))
    assert said(error).startswith(
        f"{tmp_path}/core.yaml: must be YAML with the key icl_tasks, a list of tasks: "
    )
    assert f"icl_tasks.0.{next(iter(changes))}" in str(error.value)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return {make: gpt2(folder / make.__name__, make(["a b c"])) for make in (byte_level, multilingual)}


@pytest.mark.parametrize(
    ("file", "changes", "kind"),
    [
        ("config.json", {"model_type": ["x"]}, "TypeError"),
        ("config.json", {"n_positions": []}, "StrictDataclassFieldValidationError"),
        ("tokenizer_config.json", {"unk_token": [None]}, "TypeError"),
        ("tokenizer.json", {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2}}, "Panic"),
        ("tokenizer.json", {"normalizer": {"type": "None"}}, "Exception"),
    ],
    ids=str,
)
def test_folders_of_transformers(file, changes, kind, foreign):
    path = foreign[multilingual] / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    try:
        with pytest.raises(ValueError) as error:
            ForeignModel.load(path.parent, "cpu")
    finally:
        path.write_text(before)
    assert said(error).startswith(f"{path.parent}: ") and kind in str(error.value)
