"""Test reinforcement learning: rewards, batches, the gradient of a step, resumption, and refused data."""

from __future__ import annotations

import contextlib
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spider.checkpoints.metrics import read_rows
from spider.config import load_config
from spider.data.chat import asked
from spider.data.encode import encode_part
from spider.data.shards import Shards, build_metadata
from spider.model import build_model
from spider.tokens import BYTES
from spider.tokens.turns import TURN
from spider.training.loop import Trainer, seed_of
from spider.training.rollouts import AnswerValidation, Prompts, Rollouts, Sampler, check
from spider.training.stage import train
from spider.training.warmup import warm_up
from tests.unit.small_datasets import dataset
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome

SETTINGS = dataset(source={"kind": "arithmetic"}, format="chat", validation=0.2)
ANSWERS = {"samples": 4, "max_bytes": 3, "val_prompts": 3}
MODEL = {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2}


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Sums of two numbers of one digit."""
    root = tmp_path_factory.mktemp("sums")
    said = [asked(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]
    pq.write_table(pa.table({"text": said, "id": list(map(str, range(100)))}), root / "000.parquet")
    encode_part(root / "000.parquet", root / "shards", "000", SETTINGS)
    build_metadata(root / "shards", "sums", SETTINGS, source={}, parts=["000"])
    return root / "shards"


def configuration(rollouts=ANSWERS, source="arithmetic", **changes):
    stage = {"name": "rl", "max_steps": 4, "ckpt_every": 2, "val_every": 2, "log_every": 2, "lr": 0.01}
    stage |= {"seq_len": 24, "micro_batch": 4, "grad_accum": 2, "warmup_steps": 0}
    of_run = {name: changes.pop(name) for name in ("parallel", "model", "compile") if name in changes}
    chat = {"source": {"kind": source}, "format": "chat" if source == "arithmetic" else "text"}
    run = {"data": "sums", "model": MODEL, "precision": "fp32"} | of_run
    run["stages"] = [stage | {"rollouts": rollouts} | changes]
    return load_config({"datasets": {"sums": chat, "more": chat}, "runs": {"r": run}})


def spec(**changes):
    return configuration(**changes).stage("r", "rl")


# ------------------------------------------------------------------------------------------------ rewards


# ------------------------------------------------------------------------------------------------ batches


def sampler(model_spec, seed=0):
    torch.manual_seed(0)
    model = build_model(model_spec.model)
    return Sampler(model, model_spec, partial(seed_of, seed), contextlib.nullcontext)


def batches(data, model_spec, rows, rank=0, world=1, position=None):
    order = {"seq_len": 24, "seed": 1, "rows": rows, "rank": rank, "world": world, "position": position}
    return Rollouts(Shards(data, "train"), sampler(model_spec), **order)


def test_a_batch_holds_prompts_with_their_answers_and_advantages(sums):
    model_spec = spec()
    batch = next(batches(sums, model_spec, rows=8))
    assert batch.rows_BT1.shape == (8, 25)
    for group in (slice(0, 4), slice(4, 8)):
        prompts = {bytes(row[: np.argmax(row == TURN)].astype(np.uint8)) for row in batch.rows_BT1[group]}
        assert len(prompts) == 1
        assert batch.advantage_B[group].sum() == pytest.approx(0)
    for row, learned in zip(batch.rows_BT1, batch.learned_BT, strict=True):
        answer = row[1:][learned]
        start = int(np.argmax(learned)) + 1
        assert row[:start].tolist()[-1] == BYTES.specials["RESERVED_2"]  # ASSISTANT
        assert (row[start + len(answer) :] == BYTES.pad).all() and 1 <= len(answer) <= 4


def test_processes_share_the_prompts_and_a_position_continues(sums):
    model_spec = spec()
    whole = batches(sums, model_spec, rows=16)
    first, second = next(whole), next(whole)
    for rank in range(2):
        part = next(batches(sums, model_spec, rows=8, rank=rank, world=2))
        assert np.array_equal(part.rows_BT1, first.rows_BT1[8 * rank :][:8])
        assert part.position == first.position
    again = next(batches(sums, model_spec, rows=16, position=first.position))
    assert np.array_equal(again.rows_BT1, second.rows_BT1)
    assert np.array_equal(again.reward_B, second.reward_B)


def test_an_answer_that_does_not_end_gets_no_reward():
    answers = [[*b"7", TURN], [*b"it is 7.0", TURN], [*b"7"], [*b"8", BYTES.eos], [*b"7 or 8", TURN], []]
    assert sampler(spec()).rewards(answers, "... #### 7").tolist() == [1, 1, 0, 0, 0, 0]


def test_made_up_questions_occur_once_and_are_answered(tmp_path):
    SETTINGS.source.fetch("000", tmp_path / "000.parquet", SETTINGS)
    talks = [json.loads(row["text"]) for row in pq.read_table(tmp_path / "000.parquet").to_pylist()]
    assert len({question["content"] for question, _ in talks}) == 8100
    numbers = [question["content"].strip("What is?").split(" + ") for question, _ in talks]
    answers = [int(answer["content"]) for _, answer in talks]
    assert answers == [int(a) + int(b) for a, b in numbers]


def test_answers_without_a_number_and_prompts_without_room_are_refused_before_training(sums):
    wide = sampler(spec())
    wide.seq_len = 4
    with pytest.raises(ValueError, match=r"prompt of conversation 0 has \d+ tokens.*raise seq_len"):
        check(Prompts(Shards(sums, "train")), wide, "sums")
    with pytest.raises(ValueError, match=r"conversation 0, 'none', has no number.*correct the data"):
        check([(np.zeros(2), "none")], sampler(spec()), "sums")


# ----------------------------------------------------------------------------------------------- training


def test_the_gradient_is_that_of_the_advantages_times_the_log_probabilities(sums, tmp_path):
    origin = {"data_digest": Shards(sums, "train").digest.split("/")[0], "parent_weights": None}
    trainer = Trainer(spec(), tmp_path, sums, origin)
    batch = next(trainer.loader)
    rng = np.random.default_rng(0)
    batch.advantage_B[:] = rng.normal(size=8)
    counted_B = batch.learned_BT.sum(1)
    trainer.model.train()
    trainer._forward_backward(batch, counted_B, int(counted_B.sum()))
    got = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()
    rows = torch.from_numpy(batch.rows_BT1.astype(np.int64))
    log_p_BTV = trainer.model(rows[:, :-1]).logits.log_softmax(-1)
    chosen_BT = log_p_BTV.gather(2, rows[:, 1:, None])[..., 0]
    weight_BT = torch.from_numpy(batch.learned_BT * batch.advantage_B[:, None])
    (-(chosen_BT * weight_BT).sum() / int(counted_B.sum())).backward()
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-6)


def test_a_killed_stage_continues_to_the_same_bytes(sums, tmp_path):
    train(spec(), tmp_path / "whole", sums)
    with pytest.raises(Stop):
        train(spec(), tmp_path / "killed", sums, on_step=crash_at(3))
    train(spec(), tmp_path / "killed", sums)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    logged = read_rows(tmp_path / "whole/metrics.jsonl")
    assert [row.step for row in logged] == [0, 2, 4]
    assert all({"val/pass_1", "val/pass_4"} <= row.metrics.keys() for row in logged)
    assert {"train/reward", "train/loss"} <= logged[-1].metrics.keys()


def test_pass_at_k_counts_prompts_with_a_correct_answer(sums, monkeypatch):
    own = sampler(spec())
    validation = AnswerValidation(sums, own, 0, 1)
    rewards = iter([np.array([1.0, 0, 0, 0]), np.zeros(4), np.ones(4)])
    monkeypatch.setattr(own, "rewards", lambda *_: next(rewards))
    assert validation.sums() == pytest.approx({"val/pass_1": 1.25 / 3, "val/pass_4": 2 / 3})


# -------------------------------------------------------------------------------------------- refused input


def test_a_compiled_stage_runs_the_graphs_of_its_warm_up_and_samples_with_none(sums, tmp_path, graphs):
    own = spec(max_steps=2).model_copy(update={"compile": True})
    warm_up(own, tmp_path / "warmup.json")
    measured = graphs()
    train(own, tmp_path / "rl", sums, warmup=tmp_path / "warmup.json")
    assert graphs() == measured and len(measured) == 4
    assert own.shape != spec(rollouts=None).shape
