"""A measurement: bits per byte with an online mixer over the distribution of a model of bytes.

A mixing compressor predicts the bits of a byte, the most significant bit first, so a byte is a path in a
binary tree of 255 nodes. At each node a logistic mixer combines the model's probability of a one with those
of adaptive counters (Mahoney, "Adaptive Weighing of Context Models for Lossless Data Compression", Florida
Tech. TR CS-2005-16, 2005; Mattern, "Mixing Strategies in Data Compression", DCC 2012)::

    x_i = ln(p_i / (1 - p_i))                 inputs: the model, a counter of each context, a match
    t_s = sum_i w_si x_i                      a set of weights for each selector s
    p   = 1 / (1 + exp(-mean_s t_s))          then two adaptive probability maps, a quarter of the result each
    w_si <- w_si + rate (bit - 1 / (1 + exp(-t_s))) x_i

The sum over the tree is computed at every 256th byte, because it costs as much as 30 bytes do otherwise.

Contexts are the orders 0 to 4 and 6, the current word with 0 to 2 words before it, and the column with the
byte above. A counter is a pair of numbers of zeros and ones in a hash table. An adaptive probability for each
pair turns it into an input, as in PAQ6. A match of 6 bytes or more expects the byte that followed the last
time. The selectors are the number of counters that were seen before, the node and the last byte.

Every byte is scored before anything is learned from it, so the sum of the nats is a code length. Special ids
keep the model's probability. A byte costs P(any byte) * mixed(byte), so all probabilities sum to one.

Weights, adaptive probabilities and maps may start from what they learned on the training text (`prime`).
Counters and matches always start empty.

Shape suffixes: S scored targets, V ids, B 256 bytes, C contexts, I inputs, K sets of weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from spider.config import Block
from spider.evaluation.bpb import check_deviation, score
from spider.evaluation.measures import Subject, split_lookup, train_stream
from spider.evaluation.overlap import MATCH_BYTES
from spider.evaluation.result import BITS, Number, Result, Row
from spider.evaluation.text import LearnedFrom, Text
from spider.tokens import Tokens
from spider_lab.mixing import (
    ABOVE,
    BEGIN,
    BYTE_VALUES,
    CLAIMED,
    LENGTH,
    LINE,
    SIZE,
    Learned,
    State,
    mix,
    read,
)


class Config(Block):
    """Settings of the measurement."""

    prime: Annotated[int, Field(ge=0)] = 100_000
    """Bytes of training text that the mixer's weights learn from first (0: none)."""
    rate: Annotated[float, Field(gt=0)] = 0.005
    """Learning rate of the mixer's weights."""


def measure(subject: Subject, config: Config) -> Result:
    """Return the score of the mixed distribution.

    Raises:
        ValueError: The model is not one of bytes, or its probabilities do not sum to one. Or the training
            text is unknown or smaller than the prime, or a document of the prime is scored.
    """
    tokens = subject.model.tokens
    check_tokens(tokens)
    start = None
    if config.prime:
        start = _primed(subject, config)
    began = time.perf_counter()
    mixers = [Mixer(tokens, config.rate, start, keeps_text=False, keeps_weights=False)]
    scored = score(subject.model, subject.tokens_N, subject.reading, consume=mixers[0].read)
    if subject.carried is not None:
        mixers.append(Mixer(tokens, config.rate, start))
        score(subject.model, subject.tokens_N, subject.carrying, consume=mixers[1].read)
    is_byte_S = subject.tokens_N[1:] < BYTE_VALUES
    numbers = []
    for mixer in mixers:
        nats_S = np.concatenate(mixer.nats)
        interval = replace(scored, by_target_S=nats_S).intervals().get("bpb")
        value = float(nats_S[is_byte_S].mean() / math.log(2))
        numbers.append(Number(value=value, unit=BITS, interval=interval))
    row = Row(
        name="mixer/bpb",
        label="with the mixer",
        value=numbers[0].value,
        interval=numbers[0].interval,
        carried=numbers[1] if subject.carried is not None else None,
        unit=BITS,
        better="lower",
        note="Bits per byte of the model's distribution, mixed with counters that learn from the text",
    )
    return Result(
        title="Online mixer",
        rows=[row],
        metrics={"mixer/deviation": max(mixer.deviation for mixer in mixers)},
        details={"seconds": time.perf_counter() - began, "settings": config.model_dump()},
    )


def _primed(subject: Subject, config: Config) -> Learned:
    """Return what a mixer learns from the training text if counters and matches forget each document.

    A model with an n-gram index reads the one without the train split, as in training. The other one holds
    the text that primes.
    """
    prime_N = prime_stream(subject.learned_from, config.prime, subject.text)
    mixer = Mixer(subject.model.tokens, config.rate, keeps_text=False)
    score(subject.model, prime_N, subject.reading, consume=mixer.read, lookup=split_lookup(subject))
    return mixer.state.learned


def prime_stream(learned_from: LearnedFrom, count: int, scored: Text) -> np.ndarray:
    """Return the first ``count`` bytes of the last stage's train split as a stream.

    Raises:
        ValueError: The training text is unknown or smaller, or one of its documents is a scored one. Either
            may be truncated. Documents of less than `MATCH_BYTES` bytes do not count.
    """
    key = "evaluation.measurements.spider_lab.mixer.prime"
    prime_N, prime, folder = train_stream(learned_from, count, key)
    for document in prime.documents():
        for other in scored.documents():
            shared = min(len(document), len(other))
            if shared >= MATCH_BYTES and document[:shared] == other[:shared]:
                raise ValueError(
                    f"{key}: a document of the scored text is among the first {count:,} bytes of the train "
                    f"split of {folder}: {document[:MATCH_BYTES]!r}. The score would know the text; hold "
                    "that document out of the training text, or set the key to 0"
                )
    return prime_N


def check_tokens(tokens: Tokens) -> None:
    """Raise `ValueError` if a token stands for several bytes.

    The probability of a byte is then a sum over all sequences of tokens that stand for the bytes so far. One
    pass of the model does not give it.
    """
    if tokens.bytes_of.max() > 1:
        raise ValueError(
            "the mixer needs a model over bytes: tokens of this model stand for several bytes, and it does "
            "not give the exact probability of each byte; train a model over bytes, or leave the mixer out"
        )


class Mixer:
    """Mixes a model's distribution with counters, and learns from each byte after it was scored.

    Args:
        tokens: The model's vocabulary.
        rate: Learning rate of the weights.
        start: What the mixer has learned before, which stays unchanged (None: nothing).
        keeps_text: Whether counters and matches outlast a document.
        keeps_weights: Whether weights, adaptive probabilities and maps outlast a document.

    Raises:
        ValueError: The vocabulary has tokens of several bytes.
    """

    def __init__(
        self,
        tokens: Tokens,
        rate: float,
        start: Learned | None = None,
        *,
        keeps_text: bool = True,
        keeps_weights: bool = True,
    ) -> None:
        check_tokens(tokens)
        self.tokens = tokens
        self.rate = rate
        self.keeps_text = keeps_text
        self.keeps_weights = keeps_weights
        self.start = start or Learned.nothing()
        self.state = State.empty(Learned(*(array.copy() for array in self.start)))
        self.nats: list[np.ndarray] = []
        """Nats of the targets that were read, (S,) for each call of `read`."""
        self.deviation = 0.0
        """Largest deviation from one of the sum of all probabilities, where it was computed."""

    def read(self, target_S: np.ndarray, log_p_SV: np.ndarray) -> None:
        """Score the next targets, given the logarithms of the model's probabilities, and learn from them.

        Raises:
            ValueError: The model's probabilities do not sum to one, or one is not a number.
        """
        byte_SB, bytes_S, deviation = _bytes(log_p_SV)
        nats_S = -log_p_SV[np.arange(len(target_S)), target_S].astype(np.float64)
        begins = np.flatnonzero(target_S == self.tokens.bos).tolist()
        at = 0
        for end in [*begins, len(target_S)]:
            is_byte_S = target_S[at:end] < BYTE_VALUES
            chosen_S = at + np.flatnonzero(is_byte_S)
            mixed_S = np.empty(len(chosen_S))
            self._make_room(len(chosen_S))
            mixed_deviation = read(self.state, byte_SB[chosen_S], target_S[chosen_S], self.rate, mixed_S)
            nats_S[chosen_S] = mixed_S - np.log(bytes_S[chosen_S])
            deviation = max(deviation, mixed_deviation)
            if end < len(target_S):
                self._begin_document()
            at = end
        check_deviation(deviation, "the mixer")
        self.deviation = max(self.deviation, deviation)
        self.nats.append(nats_S)

    def log_p(self, log_p_V: np.ndarray) -> np.ndarray:
        """Return the logarithms of the mixed probabilities of the next target, (V,) float64.

        Raises:
            ValueError: As `read`.
        """
        byte_SB, bytes_S, _ = _bytes(log_p_V[None])
        mixed_B = np.empty(BYTE_VALUES)
        mix(self.state, byte_SB[0], mixed_B)
        log_mixed_V = log_p_V.astype(np.float64)
        log_mixed_V[:BYTE_VALUES] = np.log(mixed_B * bytes_S[0])
        return log_mixed_V

    def _make_room(self, count: int) -> None:
        """Let `State.text` hold so many more bytes."""
        text = self.state.text
        if self.state.places[SIZE] + count > len(text):
            more = np.zeros(max(count, len(text)), np.uint8)
            self.state = self.state._replace(text=np.concatenate([text, more]))

    def _begin_document(self) -> None:
        """Begin a document, and forget what does not outlast one."""
        places = self.state.places
        learned = self.state.learned
        if not self.keeps_weights:
            learned.chances[:] = self.start.chances
            learned.weights[:] = self.start.weights
            # Only the maps of bytes that were read have changed, so a reset costs no more than the document.
            read_B = np.unique(self.state.text[places[BEGIN] : places[SIZE]])
            changed = [0, BYTE_VALUES, *read_B.tolist()]
            learned.maps[changed] = self.start.maps[changed]
        if not self.keeps_text:
            self.state.slots[self.state.claimed[: places[CLAIMED]]] = 0
            places[[CLAIMED, BEGIN, LENGTH]] = 0, places[SIZE], 0
        places[[LINE, ABOVE]] = places[SIZE], -1
        self.state.recent[:] = 0


def _bytes(log_p_SV: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the probabilities of the bytes (S, B), their sums (S,), and the deviation of all from one."""
    p_SV = np.exp(log_p_SV)
    byte_SB = p_SV[:, :BYTE_VALUES]
    bytes_S = byte_SB.sum(1, dtype=np.float64)
    total_S = bytes_S + p_SV[:, BYTE_VALUES:].sum(1, dtype=np.float64)
    deviation = float(np.abs(np.nan_to_num(total_S, nan=math.inf) - 1).max(initial=0))
    check_deviation(deviation, "the model")
    return byte_SB, bytes_S, deviation
