"""Read the scored text with the scored model once more, by code that shares nothing with the evaluation's.

`spider.evaluation.bpb` is not used. Windows are a plain loop, and the nats are in float64.

Shapes: N ids of the text, D documents, B windows of a batch, T targets of a window, S scored targets, V ids
of the vocabulary, W bytes of a position's candidates.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider.checkpoints.load import Checkpoint
from spider.data.ngram.candidates import history_of
from spider.evaluation.text import validation_stream
from spider.model import choose_kernels
from spider.model.layers import wide
from spider.model.reading import Scoring
from spider.processes.device import choose_tf32
from spider.verify.claim import Claim
from spider.verify.score import recorded, sample

#: Most bytes of the logits of a batch.
_LOGITS = 1 << 30


class Window(NamedTuple):
    """Positions of a window's inputs: the first, the first whose successor is scored, and the end."""

    start: int
    scored: int
    end: int


class Reader:
    """The model of a claim, and how it reads."""

    def __init__(self, claim: Claim) -> None:
        evaluation, spec = claim.evaluation, claim.spec
        choose_kernels(spec.kernels)
        choose_tf32(spec.tf32)
        torch.set_num_threads(claim.config.run(claim.run).resources.threads)
        self.claim, self.checkpoint = claim, Checkpoint.at(claim.folder.receipt)
        self.tokens = self.checkpoint.tokens
        self.model = self.checkpoint.model(evaluation.device)
        self.model.window = evaluation.seq_len
        size = 4 * evaluation.seq_len * self.model.tokens.size
        self.reading = Scoring(
            evaluation.seq_len,
            evaluation.overlap,
            max(1, min(spec.evaluation.batch, _LOGITS // size)),
            evaluation.n_loops,
            autocast=evaluation.precision == "bf16",
        )

    def logits(self, rows: Sequence[np.ndarray], looked_up: Sequence[np.ndarray], *, exact: bool) -> Tensor:
        """Return the logits of rows of ids, each padded to a window: (B, T, V).

        Args:
            looked_up: Candidates (T, W) of each row; nothing for a model without an n-gram index.
            exact: Compute without autocast.
        """
        device, shape = torch.device(self.claim.evaluation.device), (len(rows), self.reading.seq_len)
        inputs_BT = np.full(shape, self.model.tokens.pad, np.int64)
        candidates = None
        for row, ids in enumerate(rows):
            inputs_BT[row, : len(ids)] = ids
        if looked_up:
            candidates_BTW = np.zeros((*shape, looked_up[0].shape[1]), np.uint8)
            for row, values in enumerate(looked_up):
                candidates_BTW[row, : len(values)] = values
            candidates = torch.from_numpy(candidates_BTW).to(device)
        precision = contextlib.nullcontext() if exact else self.reading.precision(device)
        with torch.inference_mode(), precision:
            inputs = torch.from_numpy(inputs_BT).to(device)
            output = self.model(inputs, n_loops=self.reading.n_loops, candidates_BTW=candidates)
        assert output.logits is not None, "a call without labels returns logits"
        return output.logits


class Rescored(Reader):
    """A claim whose text is read again: all of it, or a sample of its documents if ``quick``."""

    def __init__(self, claim: Claim, quick: bool) -> None:
        super().__init__(claim)
        settings, evaluation = claim.spec.evaluation, claim.evaluation
        shards = claim.results.shards(claim.held_out)
        self.quick = quick
        self.tokens_N, self.data_digest = validation_stream(
            shards, settings.max_bytes, self.tokens, settings.largest_group
        )
        self.bytes_N = np.array([len(self.tokens.raw([i])) for i in range(self.tokens.size)])[self.tokens_N]
        self.random = np.random.default_rng([*evaluation.weights.encode()])
        begins_D = np.flatnonzero(self.tokens_N == self.tokens.bos)
        chosen_D = np.arange(len(begins_D))
        if quick and recorded(evaluation, len(begins_D)):
            chosen_D = sample(evaluation, np.diff(np.append(begins_D, len(self.tokens_N))))
        self.whole = len(chosen_D) == len(begins_D)
        """Whether all of the text was read."""
        self.nats: dict[int, np.ndarray] = {}
        """Nats of each id by the bytes that are carried over, NaN where it was not read: (N,)."""
        self.deviation: dict[int, np.ndarray] = {}
        """Distance of the sum of all probabilities from one, before each id: (N,)."""
        carried = [evaluation.carry_over] if evaluation.bpb_carried is not None and self.whole else []
        for carry_over in [0, *carried]:
            windows = self.windows(carry_over)
            of_W = np.searchsorted(begins_D, [one.scored for one in windows], side="right") - 1
            read_W = np.full(len(windows), True) if self.whole else np.isin(of_W, chosen_D)
            self._score([windows[w] for w in np.flatnonzero(read_W).tolist()], carry_over)
        self.bits_D = np.add.reduceat(np.where(self.bytes_N > 0, self.nats[0], 0), begins_D) / math.log(2)

    def windows(self, carry_over: int) -> list[Window]:
        """Return windows in which each id of the text but the first is scored once."""
        last = len(self.tokens_N) - 1
        begins = np.flatnonzero(self.tokens_N[:last] == self.tokens.bos).tolist() if not carry_over else [0]
        found = []
        for begin, end in zip(begins, [*begins[1:], last], strict=True):
            scored = begin
            while scored < end:
                start = max(begin, scored - (self.reading.seq_len - self.reading.stride))
                stop = min(start + self.reading.seq_len, end)
                found.append(Window(start, scored, stop))
                scored = stop
        return found

    def read(
        self, tokens_N: np.ndarray, windows: Sequence[Window], carry_over: int, *, exact: bool = False
    ) -> Tensor:
        """Return the logits of windows of a text: (B, T, V)."""
        looked_up = []
        if lookup := self.model.lookup:
            first, end = windows[0].start, windows[-1].end
            if end - first <= len(windows) * self.reading.seq_len:
                # Neighbouring windows share what they look back on, so they are looked up at once.
                known_NW = lookup.after(tokens_N, first, end, carry_over)
                looked_up = [known_NW[one.start - first : one.end - first] for one in windows]
            else:
                looked_up = [lookup.after(tokens_N, one.start, one.end, carry_over) for one in windows]
        return self.logits([tokens_N[one.start : one.end] for one in windows], looked_up, exact=exact)

    def _score(self, windows: Sequence[Window], carry_over: int) -> None:
        """Score windows of the text. The nats are those of a distribution that sums to one."""
        nats_N, deviation_N = np.full((2, len(self.tokens_N)), np.nan)
        for batch, logits in self._batches(windows, carry_over):
            for row, one in enumerate(batch):
                at = slice(one.scored + 1, one.end + 1)
                logits_SV = logits[row, one.scored - one.start : one.end - one.start]
                # The sum is that of the probabilities which the evaluation takes for the model's.
                total_S = wide(logits_SV).log_softmax(-1).double().exp().sum(-1)
                deviation_N[at] = np.nan_to_num(np.abs(total_S.cpu().numpy() - 1), nan=np.inf)
                plain_SV = logits_SV.as_subclass(Tensor).double()
                label_S1 = torch.from_numpy(self.tokens_N[at].astype(np.int64))[:, None].to(plain_SV.device)
                nats_N[at] = (plain_SV.logsumexp(-1) - plain_SV.gather(-1, label_S1)[:, 0]).cpu().numpy()
        self.nats[carry_over], self.deviation[carry_over] = nats_N, deviation_N

    def _batches(
        self, windows: Sequence[Window], carry_over: int
    ) -> Iterator[tuple[Sequence[Window], Tensor]]:
        for first in range(0, len(windows), self.reading.batch):
            batch = windows[first : first + self.reading.batch]
            yield batch, self.read(self.tokens_N, batch, carry_over)


class Predictor:
    """A forked process that predicts what follows a prefix, and never holds the text after it.

    It opens the checkpoint itself, when it is asked first. It gets rising prefixes, each after it has
    answered the one before.
    """

    def __init__(self, claim: Claim) -> None:
        """Fork the process; this one must not have read the text yet."""
        context = multiprocessing.get_context("fork")
        self._asking, answering = context.Pipe()
        context.Process(target=_answer, args=(claim, answering, self._asking), daemon=True).start()
        answering.close()

    def ask(self, rescored: Rescored, carry_over: int, target: int) -> np.ndarray:
        """Return the logarithms of the probabilities of all ids at a position, by its prefix: (V,)."""
        one = next(one for one in rescored.windows(carry_over) if one.scored < target <= one.end)
        first = one.start
        if lookup := rescored.model.lookup:
            first = max(0, first - history_of(lookup.config, carry_over))
        self._asking.send((rescored.tokens_N[first:target].copy(), one.start - first, carry_over))
        answer: np.ndarray = self._asking.recv()
        return answer


def _answer(claim: Claim, answering: Connection, asking: Connection) -> None:
    """Answer until the process that asks has ended."""
    asking.close()
    reader = None
    with contextlib.suppress(EOFError):
        while True:
            prefix_N, start, carry_over = answering.recv()
            reader = reader or Reader(claim)
            looked_up = []
            if lookup := reader.model.lookup:
                looked_up = [lookup.stream(carry_over).extend(prefix_N)[start:]]
            logits_BTV = reader.logits([prefix_N[start:]], looked_up, exact=False)
            last_V = logits_BTV[0, len(prefix_N) - start - 1].as_subclass(Tensor).double()
            answering.send((last_V - last_V.logsumexp(-1)).cpu().numpy())
