"""Test tasks: a model that knows the answers is correct, another guesses, and costs equal sums by hand."""

import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from spider.config import EvaluationConfig
from spider.config.tasks import CoreTask, JsonlTask
from spider.data.chat import opening
from spider.evaluation.questions import Question, Task, is_right, tasks
from spider.evaluation.tasks import read_tasks, run_task, run_tasks
from spider.model.reading import Scoring
from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens
from spider.tokens.turns import TURN
from tests.unit.evaluation.toys import Bigram, Toy

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "boil", "tea"]
RNG = np.random.default_rng(0)


class Knows(Toy):
    """A model that predicts the next id of the texts, or ids, that it has memorised, and nothing else."""

    def __init__(self, texts, tokens=BYTES, sure=20.0):
        super().__init__()
        self.tokens, self.sure = tokens, sure
        self.weight = nn.Parameter(torch.zeros(1))
        self.after = {}
        for text in texts:
            ids = (tokens.encode(text) if isinstance(text, bytes) else text).tolist()
            for i in range(1, len(ids)):
                self.after[tuple(ids[max(0, i - 60) : i])] = ids[i]

    def forward(self, tokens_BT, n_loops=None, candidates_BTW=None):
        logits = torch.zeros(*tokens_BT.shape, self.tokens.size)
        for b, row in enumerate(tokens_BT.tolist()):
            for t in range(len(row)):
                if (known := self.after.get(tuple(row[max(0, t - 59) : t + 1]))) is not None:
                    logits[b, t, known] = self.sure
        return SimpleNamespace(logits=logits)


def answer(model, task, window=512):
    return run_task(model, task, Scoring(seq_len=window, batch=16))


def column(row, title):
    return row.columns[title].value


def test_costs_equal_sums_by_hand_per_byte_and_per_id():
    model = Bigram()
    question = Question((b"ab",) * 2, (b"cde", b"f"), 0)
    log_VV = model.table_VV.log_softmax(-1)
    cost = [-(log_VV[98, 99] + log_VV[99, 100] + log_VV[100, 101]).item(), -log_VV[98, 102].item()]
    for gold in (0, 1):
        answers = answer(model, Task("t", [question._replace(gold=gold)], 0.5))
        assert column(answers, "by total nats") == float(np.argmin(cost) == gold)
        expected = float(np.argmin([cost[0] / 3, cost[1]]) == gold)
        assert answers.value == column(answers, "by nats per token") == expected


def test_a_single_choice_is_correct_if_greedy_decoding_writes_it():
    task = Task("t", [Question((b"say ",), (b"yes",), 0), Question((b"say ",), (b"no",), 0)], 0.0)
    assert answer(Knows([b"say yes"]), task).value == 0.5


def test_long_questions_are_truncated_and_counted():
    task = Task("t", [Question((b"x" * 300,) * 2, (b"abc", b"abd"), 0)], 0.5)
    answers = answer(Knows([b"x" * 300 + b"abc"]), task, window=100)
    assert column(answers, "truncated") == 2 and column(answers, "by total nats") == 1


def jsonl(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_rows_of_parquet_are_questions_like_lines(tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": f"So #### {i + 1}"} for i in range(3)]
    lines = jsonl(tmp_path / "t.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    read = [[*tasks("t", JsonlTask(file=str(file)))] for file in (lines, tmp_path / "t.parquet")]
    assert read[0] == read[1]
    lines.write_bytes(b'{"question": "\xff", "answer": "a"}')
    with pytest.raises(ValueError, match="line 1: holds bytes that are not UTF-8"):
        [*tasks("t", JsonlTask(file=str(lines)))]


def test_three_formats_of_lines_are_read_and_get_shots(tmp_path):
    rows = [
        {"query": "Q1", "choices": ["a", "b"], "gold": 1},
        {"context_options": ["x", "y"], "continuation": "z", "gold": 0},
        {"context": "say", "continuation": "it"},
    ]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    (task,) = tasks("mine", JsonlTask(file=str(path), shots=2))
    first, second, third = task.questions
    assert first.contexts[0].endswith(b"\n\nQ1 ") and first.contexts[0].count(b"\n\n") == 2
    assert b"x z\n\n" in first.contexts[0] and b"say it\n\n" in first.contexts[0]
    assert (first.choices, first.gold) == ((b"a", b"b"), 1)
    assert [one[-2:] for one in second.contexts] == [b"x ", b"y "] and set(second.choices) == {b"z"}
    assert third.choices == (b"it",) and task.chance == pytest.approx((0.5 + 0.5 + 0) / 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "gold must be one of 0 to 1 .got 2"),
        ({"query": "q", "choices": ["a", "b"]}, "gold must be one of 0 to 1 .got None"),
        ({"query": "q", "choices": ["a", ""], "gold": 0}, "has no choices, or an empty one"),
        ({"query": "q", "choices": ["a", "a"], "gold": 0}, "two choices are equal"),
        ({"query": "q", "choices": ["a", 3], "gold": 0}, "a question and its answers must be text"),
        ({"text": "q"}, "needs choices, context_options or continuation .keys: text"),
        ({"question": "q", "answer": "so ####  "}, "a question without choices needs an answer"),
        ([1], "must be an object"),
    ],
)
def test_malformed_lines_are_reported_with_their_number(tmp_path, row, message):
    path = jsonl(tmp_path / "t.jsonl", row)
    with pytest.raises(ValueError, match=f"t.jsonl, line 1: {message}"):
        list(tasks("mine", JsonlTask(file=str(path))))


def test_a_folder_in_the_format_of_the_core_bundle_is_read(tmp_path):
    (tmp_path / "eval_data").mkdir()
    rows = [{"query": f"q{i}", "choices": ["a", "b", "c"], "gold": i % 3} for i in range(9)]
    jsonl(tmp_path / "eval_data/mc.jsonl", *rows)
    jsonl(tmp_path / "eval_data/lm.jsonl", *({"context": f" c{i} ", "continuation": "x"} for i in range(5)))
    (tmp_path / "core.yaml").write_text(
        "icl_tasks:\n"
        "- {label: mc, dataset_uri: mc.jsonl, num_fewshot: [2], icl_task_type: multiple_choice}\n"
        '- {label: lm, dataset_uri: lm.jsonl, num_fewshot: [0], continuation_delimiter: "\\n"}\n'
    )
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nmc,33\nlm,0\n")
    mc, lm = tasks("core", CoreTask(folder=str(tmp_path), items=4))
    assert (mc.name, mc.chance, len(mc.questions)) == ("core/mc", 0.33, 4)
    random.Random(1337).shuffle(rows)
    for i, (row, question) in enumerate(zip(rows[:4], mc.questions, strict=True)):
        others = [rows[j] for j in range(4) if j != i]
        drawn = random.Random(1234 + i).sample(others, 2)
        shots = [f"{one['query']} {one['choices'][one['gold']]}" for one in drawn]
        assert question.contexts[0].decode() == "\n\n".join([*shots, f"{row['query']} "])
    assert re.fullmatch(rb"c\d\n", lm.questions[0].contexts[0]) and lm.chance == 0


def test_core_is_the_mean_of_centered_accuracy_by_mean_nats_per_token():
    """The model is a bigram table, so the expected figure is computed from the table."""
    model = Bigram()
    log_VV = model.table_VV.log_softmax(-1)
    draw = np.random.default_rng(1)
    expected, found = [], []
    for name, chance, count in (("a", 0.25, 4), ("b", 0.5, 2)):
        questions, right = [], 0
        for _ in range(30):
            choices = tuple(bytes(draw.integers(97, 123, draw.integers(2, 9))) for _ in range(count))
            gold = int(draw.integers(count))
            costs = []
            for choice in choices:
                path = b"?" + choice
                nats = [-log_VV[path[i], path[i + 1]].item() for i in range(len(choice))]
                costs.append(sum(nats) / len(nats))
            right += int(np.argmin(costs)) == gold
            questions.append(Question((b"why?",) * count, choices, gold))
        expected.append((right / 30 - chance) / (1 - chance))
        found.append(Task(f"core/{name}", questions, chance, bundle="core"))
    *rows, core = run_tasks(model, [*found, Task("other", found[0].questions, 0.25)], Scoring(seq_len=64))
    assert [row.name for row in rows] == ["tasks/core/a", "tasks/core/b", "tasks/other"]
    assert core.name == "tasks/core/CORE" and core.value == pytest.approx(np.mean(expected), abs=1e-12)
    assert [column(row, "centered, per token") for row in rows[:2]] == pytest.approx(expected)


PAIRS = BpeTokens([(ord("t"), ord("h")), (272, ord("e")), (ord(" "), 273)])
FORMATS = [
    {"query": "What is the sky?", "choices": ["blue", "green"], "gold": 0},
    {"question": "the MMLU", "choices": ["w", "x", "y", "z"], "answer": 3, "subject": "s"},
    {"question": "letters", "choices": ["w", "x", "y"], "answer": "B"},
    {"question": "the ARC", "choices": {"text": ["r", "s", "t"], "label": ["1", "2", "3"]}, "answerKey": "3"},
    {"question": "the GSM8K", "answer": "2 + 2 = <<2+2=4>>4, and 1,000 more.\n#### 1,004"},
    {"context": "The capital?", "continuation": "Paris"},
]


def known_answers(task, answers, tokens):
    """Return a model that gives these answers, each after its question as a user's turn."""
    known = []
    for question, answer in zip(task.questions, answers, strict=True):
        ids = opening([("user", question.contexts[0].decode())], tokens, answer=True)
        known.append(np.concatenate([ids, tokens.encode(answer)[1:-1], [TURN]]))
    return Knows(known, tokens)


@pytest.mark.parametrize("tokens", [BYTES, PAIRS])
def test_questions_in_chat_form_are_answered_by_letters_or_by_a_written_answer(tmp_path, tokens):
    path = jsonl(tmp_path / "t.jsonl", *FORMATS)
    (task,) = tasks("mine", JsonlTask(file=str(path), chat=True))
    asked = task.questions[0].contexts[0].decode()
    assert asked.startswith("What is the sky?\n\nA. blue\nB. green\n\n") and "letter" in asked
    assert [one.choices for one in task.questions[:2]] == [(b"A", b"B"), (b"A", b"B", b"C", b"D")]
    right = [b"A", b"D", b"B", b"C", b"Then it is #### 1004.0", b" Paris"]
    wrong = [b"B", b"A", b"C", b"A", b"Of 1,004 #### 7", b"Paris!"]
    assert answer(known_answers(task, right, tokens), task).value == 1
    assert answer(known_answers(task, wrong, tokens), task).value == 0
    assert answer(known_answers(task, right[:3] + wrong[3:], tokens), task).value == 0.5


@pytest.mark.parametrize(
    ("written", "expected", "right"),
    [
        ("It is 12.", "12", True),
        ("12 and then 13", "12", False),
        ("7 - 19 = -12", "-12", True),
        ("$1,234.50", "1234.5", True),
        ("#### 5 apples", "so 2 + 3 #### 5", True),
        ("Paris ", "Paris", True),
        ("in Paris", "Paris", False),
    ],
)
def test_an_answer_is_right_by_its_last_number_or_its_text(written, expected, right):
    assert is_right(written, expected) is right


def test_tasks_in_chat_form_are_for_models_that_learned_from_conversations(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", FORMATS[0])
    plain = {"file": str(path)}
    settings = EvaluationConfig(tasks={"plain": plain, "mine": {**plain, "chat": True}})
    found, (note,) = read_tasks(settings, False)
    assert [task.name for task in found] == ["plain"]
    assert note == "mine: not asked, because this stage has not learned from conversations yet."
    found, notes = read_tasks(settings, True)
    assert [task.name for task in found] == ["plain", "mine"] and notes == []
