"""`spider chat`, and the training that leads to it: answers are learned, a stage without any is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from spider.checkpoints.load import Checkpoint
from spider.cli import cli
from spider.config import load_config
from spider.data.chat import opening
from spider.data.encode import encode_part
from spider.data.packing import pack
from spider.data.shards import build_metadata
from spider.evaluation.evaluate import evaluate
from spider.evaluation.generate import generate, stream_text
from spider.tokens import BYTES
from spider.tokens.turns import TURN
from spider.training.stage import train
from tests.unit.small_datasets import dataset

CHAT = dataset(validation=0.2, format="chat")
ROWS = [
    json.dumps(
        [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i} " * (i % 7 + 1)}]
    )
    for i in range(60)
]


def spec(stage="a", **settings):
    settings = {"seq_len": 16, "micro_batch": 2, "max_steps": 3, "packing": "best_fit"} | settings
    run = {
        "data": "talk",
        "model": {"family": "tests.families.toy", "width": 8},
        "precision": "fp32",
        "defaults": settings,
        "stages": [{"name": "a"}, {"name": "b"}],
        "evaluation": {"max_bytes": 500, "sample_bytes": 5, "loops_bytes": 0},
    }
    source = {"source": {"kind": "pydocs"}, "format": "chat"}
    return load_config({"datasets": {"talk": source}, "runs": {"r": run}}).stage("r", stage)


def written(folder, rows):
    pq.write_table(pa.table({"text": rows, "id": [str(i) for i in range(len(rows))]}), folder / "p.parquet")
    encode_part(folder / "p.parquet", folder / "talk", "000", CHAT)
    build_metadata(folder / "talk", "talk", CHAT, source={}, parts=["000"])
    pack(folder / "talk", 16)
    return folder / "talk"


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"), ROWS)


@pytest.fixture(scope="module")
def stage(talk, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run") / "a"
    train(spec(), folder, talk)
    return folder


def test_it_answers_each_line_from_all_that_was_said(stage):
    said = CliRunner().invoke(
        cli,
        ["chat", str(stage), "--bytes", "12", "--temperature", "0", "--context", "200"],
        input="Hi\n\nBye\n",
    )
    assert said.exit_code == 0, said.output
    model = Checkpoint.at(stage).model()
    history, expected = [], []
    for line in ("Hi", "Bye"):
        history.append(("user", line))
        ids = opening(history, BYTES, answer=True)
        sampling = {"temperature": 0.0, "top_k": 50, "seed": len(history), "context": 200, "ends": [TURN]}
        expected.append("".join(stream_text(generate(model, ids, max_bytes=12, **sampling))))
        history.append(("assistant", expected[-1] or " "))
    assert said.output == "".join(answer + "\n" for answer in expected)


def test_a_model_that_learned_calls_gets_their_outputs(tmp_path):
    # Each id follows from the one before, so the smallest model learns the answer. The output is not learned.
    parts = [("python", "6*7"), ("python_output", "?"), ("text", "!")]
    answer = [{"type": kind, "text": text} for kind, text in parts]
    row = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
    learned = spec(learn="assistant", max_steps=200, lr=0.1)
    train(learned, tmp_path / "a", written(tmp_path, [row] * 60))
    chat = ["chat", str(tmp_path / "a"), "--temperature", "0", "--context", "200"]
    said = CliRunner().invoke(cli, chat, input="a\na\n")
    assert said.exit_code == 0, said.output
    assert said.output == "⟨6*7⟩⟨= 42⟩!\n" * 2
    without = CliRunner().invoke(cli, [*chat, "--no-calculator"], input="a\n")
    assert "⟨" not in without.output


def test_what_was_once_trained_on_conversations_stays_so(stage, talk, shards, tmp_path):
    receipt = stage / "train.json"
    plain = spec("b", packing="ring", data="talk")
    train(plain, tmp_path / "b", shards, previous=receipt)
    assert Checkpoint.at(tmp_path / "b").manifest.conversations == "talk"


def test_answers_alone_are_learned_and_scored_apart(stage, talk, tmp_path):
    all_, answers = (train(spec(learn=what), tmp_path / what, talk) for what in ("all", "assistant"))
    assert answers.tokens == all_.tokens and answers.bytes < 0.8 * all_.bytes
    measured = evaluate(tmp_path / "assistant/train.json", spec(learn="assistant"), talk, tmp_path / "out")
    assert measured.bpb_assistant and measured.bpb_assistant != measured.bpb
