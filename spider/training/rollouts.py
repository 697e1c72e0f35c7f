"""Reinforcement learning from answers: the batches of a stage with ``rollouts``.

The model answers each prompt several times. An answer is rewarded by a comparison with the reference answer
(`spider.evaluation.questions`), and its advantage is its reward minus the mean reward of the same prompt
(REINFORCE with a baseline: Williams, 1992; Ahmadian et al., arXiv:2402.14740). The loss of a step is

    - sum over answers i and their tokens t of A_i log p(y_it | before) / tokens of all answers

so each token counts alike (Yu et al., "DAPO", arXiv:2503.14476, section 3.3). Each batch is sampled from the
current weights. The loss needs no ratio of old and new probabilities, no clipping, no reference model and no
KL term.

The answers are a pure function of the weights, of the prompts' order and of the seeds, so a resumed stage
equals an uninterrupted one. Global prompt n is conversation ``permute(n)`` of its epoch, and a position is
one number, as in `spider.data.loader`. Processes share the prompts of a step.

A prompt is a conversation up to its last answer: BOS, the earlier turns, and the token that begins the
answer. The reference is the text of that answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spider.config import StageSpec
from spider.data.loader import Batch, Batches, epoch_keys, permute
from spider.data.shards import Shards
from spider.evaluation.generate import generate_many
from spider.evaluation.questions import last_number, reward
from spider.model.interface import Model
from spider.tokens.turns import ASSISTANT, TURN, assistant_mask


class Prompts:
    """The conversations of one split, in the order of its shards.

    Raises:
        ValueError: the split does not hold a conversation.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._begins: list[tuple[int, int]] = []
        for file, tokens in enumerate(shards.maps):
            begins = np.append(shards.begins(file), len(tokens)) + int(shards.borders[file])
            self._begins += zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
        if not self._begins:
            raise ValueError(f"{shards.name}: does not hold a conversation; encode some, or hold more out")

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> tuple[np.ndarray, str]:
        """Return a prompt (n,) uint16 and its reference answer.

        Raises:
            ValueError: the document is not a conversation.
        """
        begin, end = self._begins[number]
        ids = self._shards.read(begin, end - begin)
        answers = np.flatnonzero(ids == ASSISTANT)
        if not len(answers):
            where = "{}, token {}".format(*self._shards.locate(begin))
            raise ValueError(f"{where}: this document has no answer; encode the data with format: chat")
        first = int(answers[-1]) + 1
        return ids[:first], self._shards.vocabulary.decode(ids[first:])


log = logging.getLogger(__name__)

#: Gives the seed of an answer, for the names and numbers that identify it.
Seeds = Callable[..., int]


class Sampler:
    """Sample answers to prompts and reward them.

    Args:
        autocast: the context of the model's forward passes.
    """

    def __init__(self, model: Model, spec: StageSpec, seeds: Seeds, autocast: Callable[[], Any]) -> None:
        self.model = model
        assert spec.settings.rollouts is not None, "the stage learns from answers"
        self.rollouts = spec.settings.rollouts
        self.seq_len = spec.settings.seq_len
        self.n_loops = spec.loops if spec.model.looped else None
        self._seeds = seeds
        self._autocast = autocast

    def answers(self, prompt: np.ndarray, *purpose: object) -> list[list[int]]:
        """Return several answers to a prompt, as ids with the id that ends them.

        The calculator computes the calls in them. `assistant_mask` leaves its outputs out of the loss. A
        compiled model computes them eagerly, because each length of text would be another graph.
        """
        settings = self.rollouts
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            return generate_many(
                self.model,
                prompt,
                seeds=[self._seeds(*purpose, i) for i in range(settings.samples)],
                max_bytes=settings.max_bytes,
                max_ids=self.seq_len + 1 - len(prompt),
                temperature=settings.temperature,
                top_k=settings.top_k,
                n_loops=self.n_loops,
                context=self.seq_len,
                ends=[TURN],
                calculator=True,
            )

    def rewards(self, answers: Sequence[list[int]], reference: str) -> np.ndarray:
        """Return the reward of each answer. One that did not end within its limit gets none."""
        closed = {TURN, self.model.tokens.eos}
        ended = [bool(ids) and ids[-1] in closed for ids in answers]
        texts = [self.model.tokens.decode(ids) for ids in answers]
        return np.array([reward(text, reference) * done for text, done in zip(texts, ended, strict=True)])


class Rollouts(Batches):
    """Batches of sampled answers; ``rows`` answers of this process in each step.

    Raises:
        ValueError: a prompt does not fit into the window, or a reference answer lacks what is compared.
    """

    def __init__(self, shards: Shards, sampler: Sampler, **order: Any) -> None:
        fields = {"data": shards.digest, "seq_len": order.pop("seq_len"), "seed": order.pop("seed")}
        fields |= {"objective": "reinforce"}
        super().__init__("prompts", fields, **order)
        self.prompts = Prompts(shards)
        self._sampler = sampler
        position = order["position"]
        self._next_prompt = int(position["sample"]) if position is not None else 0
        if self._rows % sampler.rollouts.samples:
            raise ValueError(
                f"each of {self._world} processes has {self._rows} answers of a step, which is not a "
                f"multiple of rollouts.samples ({sampler.rollouts.samples}); change micro_batch"
            )
        if self._rank == 0:  # all processes have the same prompts, and end if one does
            check(self.prompts, sampler, shards.name)

    def epoch(self, position: dict[str, Any]) -> float:
        return int(position["sample"]) / len(self.prompts)

    def __next__(self) -> Batch:
        samples = self._sampler.rollouts.samples
        share = self._rows // samples
        first = self._next_prompt + self._rank * share
        self._next_prompt += share * self._world
        rows: list[np.ndarray] = []
        rewards: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        for number in range(first, first + share):
            prompt, reference = self.prompts[self._shuffled(number)]
            answers = self._sampler.answers(prompt, "answer", number)
            rewards.append(self._sampler.rewards(answers, reference))
            rows += [np.append(prompt, np.array(ids, np.uint16)) for ids in answers]
            learned += [np.arange(1, len(row)) >= len(prompt) for row in rows[-samples:]]
        reward_PS = np.stack(rewards)
        slots = self.order["seq_len"] + 1
        rows_BT1 = np.full((len(rows), slots), self._sampler.model.tokens.pad, np.uint16)
        learned_BT = np.zeros((len(rows), slots - 1), bool)
        for i, (row, own) in enumerate(zip(rows, learned, strict=True)):
            rows_BT1[i, : len(row)] = row
            learned_BT[i, : len(own)] = own & assistant_mask(row)[1:]
        return Batch(
            rows_BT1,
            {"sample": self._next_prompt, **self.order},
            candidates_BTW=self._candidates(rows_BT1),
            learned_BT=learned_BT,
            reward_B=reward_PS.ravel(),
            advantage_B=(reward_PS - reward_PS.mean(1, keepdims=True)).ravel().astype(np.float32),
        )

    def _candidates(self, rows_BT1: np.ndarray) -> np.ndarray | None:
        """Return the candidates of the model's n-gram index after each input, if it reads one."""
        lookup = self._sampler.model.lookup
        if lookup is None:
            return None
        inputs = rows_BT1[:, :-1].astype(np.int64)
        return np.stack([lookup.after(ids, 0, len(ids)) for ids in inputs])

    def _shuffled(self, number: int) -> int:
        """Return the conversation of a global prompt."""
        epoch, index = divmod(number, len(self.prompts))
        keys, _ = epoch_keys(self.order["seed"], epoch)
        return int(permute(np.array([index]), len(self.prompts), keys)[0])


def check(prompts: Prompts, sampler: Sampler, name: str) -> None:
    """Refuse conversations that cannot be answered within the window, or whose answer cannot be compared."""
    for number in range(len(prompts)):
        prompt, reference = prompts[number]
        if len(prompt) + 1 > sampler.seq_len:
            raise ValueError(
                f"{name}: the prompt of conversation {number} has {len(prompt):,} tokens, which leaves no "
                f"place for an answer in a window of {sampler.seq_len:,}; raise seq_len"
            )
        if last_number(reference) is None:
            raise ValueError(
                f"{name}: the answer of conversation {number}, {reference[:60]!r}, has no number, so no "
                f"answer to it can be rewarded; correct the data"
            )


class AnswerValidation:
    """Score sampled answers to held-out prompts: pass@1, the share that is correct, and pass@k, the share of
    prompts with at least one correct answer among k.

    The prompts and their seeds are the same at each validation.
    """

    def __init__(self, data: Path, sampler: Sampler, rank: int, world: int) -> None:
        shards = Shards(data, "validation")
        self.prompts = Prompts(shards)
        if rank == 0:
            check(self.prompts, sampler, shards.name)
        self._sampler = sampler
        count = min(len(self.prompts), sampler.rollouts.val_prompts)
        spread = np.linspace(0, len(self.prompts) - 1, count).round().astype(int).tolist()
        self._count = len(spread)
        self._own = spread[rank::world]

    def sums(self) -> dict[str, float]:
        """Return this process's share of the metrics; the sum over the processes is their value."""
        rewards = []
        for number in self._own:
            prompt, reference = self.prompts[number]
            answers = self._sampler.answers(prompt, "validation", number)
            rewards.append(self._sampler.rewards(answers, reference))
        samples = self._sampler.rollouts.samples
        return {
            "val/pass_1": float(sum(reward.mean() for reward in rewards)) / self._count,
            f"val/pass_{samples}": float(sum(reward.max() for reward in rewards)) / self._count,
        }
