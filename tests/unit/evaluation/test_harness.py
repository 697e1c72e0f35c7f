"""Compare the numbers of lm-evaluation-harness with ours on the same items and the same text."""

import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("lm_eval")

from spider.config.model import family_block
from spider.config.tasks import JsonlTask
from spider.data.chat import opening
from spider.evaluation.bpb import score
from spider.evaluation.harness import HarnessModel, run_harness
from spider.evaluation.questions import tasks
from spider.evaluation.tasks import run_task
from spider.model import build_model
from spider.model.reading import Scoring
from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens
from tests.forkserver import spider
from tests.unit.evaluation.toys import Scripted
from tests.unit.hf.small_exports import exported

WORDS = ["the", "value", "of", "a", "list", "returns", "another", "function", "naïve", "then", "error"]
PAIRS = BpeTokens([(ord("t"), ord("h")), (272, ord("e")), (ord(" "), 273), (ord("a"), ord("n"))])
WINDOW = 64
ROOT = Path(__file__).parents[3]


def model_of(tokens):
    torch.manual_seed(0)
    sizes = {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2, "vocab_size": tokens.size}
    model = build_model(family_block({"family": "gpt", **sizes}), tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def harness_model(model, window=WINDOW):
    return HarnessModel(model, Scoring(seq_len=window, batch=16, overlap=0.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three tasks: two of forty questions and one of three texts."""
    tmp_path = tmp_path_factory.mktemp("tasks")
    draw = np.random.default_rng(0)
    rows = []
    for i in range(40):
        choices = draw.choice(WORDS, 4, replace=False).tolist()
        query = f"Question {i}: " + " ".join(draw.choice(WORDS, 3 + i % 12))
        rows.append({"query": query, "choices": choices, "gold": i % 4})
    texts = [{"text": " ".join(draw.choice(WORDS, n))} for n in (4, 30, 90)]
    for name, lines in (("questions", rows), ("texts", texts)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))

    def write(name, source, kind, metrics, **keys):
        data = {"test": str(tmp_path / f"{source}.jsonl")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}}
        task |= {"test_split": "test", "output_type": kind, "metric_list": [{"metric": m} for m in metrics]}
        task |= {"metadata": {"version": 7}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task | keys))

    choose = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
    write("choose", "questions", "multiple_choice", ["acc", "acc_bytes"], **choose)
    write("roll", "texts", "loglikelihood_rolling", ["bits_per_byte"], doc_to_text="", doc_to_target="text")
    until = {"until": ["\n"], "max_gen_toks": 12}
    write("write", "questions", "generate_until", ["exact_match"], doc_to_text="query",
          doc_to_target="{{choices[gold]}}", generation_kwargs=until)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        yield tmp_path


@pytest.mark.parametrize("tokens", [BYTES, PAIRS], ids=["bytes", "pairs"])
def test_the_numbers_of_the_harness_equal_ours(folder, tokens):
    model = model_of(tokens)
    names = ["choose", "roll", "write"]
    found = run_harness(harness_model(model), names, include=folder, label="it", weights="w")
    rows = {row.name.removeprefix("harness/"): row for row in found.result.rows}
    assert {name: found.versions[name] for name in names} == dict.fromkeys(names, "7")
    items = {row.hub_dataset: row.columns["items"].value for row in rows.values()}
    assert items == {"choose": 40, "roll": 3, "write": 40} and rows["write/exact_match"].value == 0.0

    (task,) = tasks("ours", JsonlTask(file=str(folder / "questions.jsonl")))
    ours = run_task(model, task, Scoring(seq_len=WINDOW, batch=7))
    by_sum = ours.columns["by total nats"].value
    assert (by_sum, ours.value) == tuple(rows[f"choose/{m}"].value for m in ("acc", "acc_bytes"))
    assert 0 < ours.columns["truncated"].value < found.result.details["truncated"], "prompts for generation"
    texts = [json.loads(line)["text"].encode() for line in (folder / "texts.jsonl").open()]
    scores = [score(model, tokens.encode(text)[:-1], Scoring(seq_len=WINDOW, overlap=0.5)) for text in texts]
    nats = sum(one.nats["byte"] for one in scores)
    bits = nats / math.log(2) / sum(map(len, texts))
    assert rows["roll/bits_per_byte"].value == pytest.approx(bits, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"until": ["\n", "two"]}, " one. "),
        ({"until": "\n"}, " one. two"),
        ({"max_gen_toks": 3}, " on"),
        ({"until": []}, " one. two\nthree"),
    ],
)
def test_generation_ends_at_the_words_of_the_task_at_eos_or_after_max_gen_toks(options, text):
    model = harness_model(Scripted([*b" one. two\nthree", BYTES.eos]))
    assert model.generate_until([SimpleNamespace(args=("say", options))]) == [text]


def test_a_prompt_in_chat_form_is_read_with_the_ids_of_turns():
    model, tokens = model_of(PAIRS), PAIRS
    chat = HarnessModel(model, Scoring(seq_len=WINDOW, batch=16, overlap=0.5), chat=True)
    said = [("system", "be brief"), ("user", "the value"), ("assistant", "a"), ("user", "of")]
    history = [{"role": role, "content": content} for role, content in said]
    ids = np.concatenate([opening(said, tokens, answer=True), tokens.encode(b"then")[1:-1]]).astype(np.int64)
    log_TV = model(torch.from_numpy(ids[None])).logits.log_softmax(-1)[0]
    begin = len(opening(said, tokens, answer=True))
    by_hand = [log_TV[t - 1, ids[t]].item() for t in range(begin, len(ids))]
    ((nats, _),) = chat.loglikelihood([SimpleNamespace(args=(chat.apply_chat_template(history), "then"))])
    assert nats == pytest.approx(sum(by_hand), abs=1e-4)
    begun = chat.apply_chat_template([*history, {"role": "assistant", "content": "the"}], False)
    ((rest, _),) = chat.loglikelihood([SimpleNamespace(args=(begun, "n"))])
    assert rest == pytest.approx(by_hand[-1], abs=1e-4)


def test_nothing_is_fetched_without_online_and_a_missing_extra_is_reported(tmp_path):
    stage = exported(model_of(BYTES), tmp_path / "toy")
    away = {"task": "away", "dataset_path": "nobody/nothing", "output_type": "multiple_choice"}
    (tmp_path / "away.yaml").write_text(yaml.safe_dump(away | {"test_split": "test"}))
    words = [spider(), "harness", str(stage), "--output", str(tmp_path / "out.json"), "--tasks", "away"]
    words += ["--include", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "task away: its text is not on this machine; --online" in done.stderr
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(\"No module named 'lm_eval'\")")
    without = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(words, capture_output=True, text=True, env=without)
    assert done.returncode == 1 and "pip install -e '.[harness]'" in done.stderr
    assert not (tmp_path / "out.json").exists()
