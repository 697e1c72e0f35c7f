"""Read the scored text with the scored model once more, by code that shares nothing with the evaluation's.

`spider.evaluation.bpb` is not used. Windows are a plain loop, and the nats are in float64.

Shapes: N ids of the text, B windows of a batch, T targets of a window, S scored targets, V ids of the
vocabulary, W bytes of a position's candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider.audit.claim import Claim
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Manifest
from spider.evaluation.records import Evaluation
from spider.evaluation.text import validation_stream
from spider.model import choose_kernels
from spider.model.interface import Model
from spider.model.layers import wide
from spider.model.reading import Scoring
from spider.ngram.candidates import history_of
from spider.processes.device import choose_tf32

#: Ids that a quick check reads, for each of the two figures.
_QUICK = 4096
#: Most bytes of the logits of a batch.
_LOGITS = 1 << 30


def reason_not_here(claim: Claim) -> str | None:
    """Return why this machine cannot score it again; None if it can."""
    if claim.evaluation.device.startswith("cuda") and not torch.cuda.is_available():
        return "the score was computed on a GPU, and torch can use none here"
    return None


class Window(NamedTuple):
    """Positions of a window's inputs: the first, the first whose successor is scored, and the end."""

    start: int
    scored: int
    end: int


def windows(tokens_N: np.ndarray, reading: Scoring, bos: int) -> list[Window]:
    """Return the windows of a text, in which each id but the first is scored once."""
    last = len(tokens_N) - 1
    begins = [0]
    if not reading.carry_over:
        begins += [at for at in np.flatnonzero(tokens_N[:last] == bos).tolist() if at]
    found = []
    for begin, end in zip(begins, [*begins[1:], last], strict=True):
        scored = begin
        while scored < end:
            start = max(begin, scored - (reading.seq_len - reading.stride))
            stop = min(start + reading.seq_len, end)
            found.append(Window(start, scored, stop))
            scored = stop
    return found


def open_checkpoint(claim: Claim) -> Checkpoint:
    """Return the checkpoint of a claim, with averaged weights only if the evaluation says so."""
    checkpoint = Checkpoint.at(claim.folder.receipt)
    if isinstance(checkpoint.manifest, Manifest) and not claim.evaluation.averaged:
        plain = checkpoint.manifest.model_copy(update={"averaged_weights": None})
        checkpoint = dataclasses.replace(checkpoint, manifest=plain)
    return checkpoint


class Reader:
    """A model and how it reads."""

    def __init__(self, claim: Claim, checkpoint: Checkpoint) -> None:
        evaluation, spec = claim.evaluation, claim.spec
        choose_kernels(spec.kernels)
        choose_tf32(spec.tf32)
        torch.set_num_threads(claim.config.run(claim.run).resources.threads)
        self.model: Model = checkpoint.model(evaluation.device)
        self.model.window = evaluation.seq_len
        self.device = torch.device(evaluation.device)
        size = 4 * evaluation.seq_len * self.model.tokens.size
        self.alone = Scoring(
            evaluation.seq_len,
            evaluation.overlap,
            max(1, min(spec.evaluation.batch, _LOGITS // size)),
            evaluation.n_loops,
            autocast=evaluation.precision == "bf16",
        )

    def logits(self, inputs_BT: np.ndarray, candidates_BTW: np.ndarray | None, *, exact: bool) -> Tensor:
        """Return the model's logits, in its own precision or, with ``exact``, without autocast."""
        candidates = None if candidates_BTW is None else torch.from_numpy(candidates_BTW).to(self.device)
        inputs = torch.from_numpy(inputs_BT).to(self.device)
        precision = contextlib.nullcontext() if exact else self.alone.precision(self.device)
        with torch.inference_mode(), precision:
            output = self.model(inputs, n_loops=self.alone.n_loops, candidates_BTW=candidates)
        assert output.logits is not None, "a call without labels returns logits"
        return output.logits

    def padded(self, rows: Sequence[np.ndarray], W: int = 0) -> np.ndarray:
        """Return rows of ids (B, T), or of candidates (B, T, W), padded to a window."""
        T = self.alone.seq_len
        shape = (len(rows), T, W) if W else (len(rows), T)
        out = np.full(shape, 0 if W else self.model.tokens.pad, np.uint8 if W else np.int64)
        for row, values in enumerate(rows):
            out[row, : len(values)] = values
        return out

    def read(
        self, tokens_N: np.ndarray, chosen: Sequence[Window], carry_over: int, *, exact: bool = False
    ) -> Tensor:
        """Return the logits of windows of a text, (B, T, V)."""
        inputs_BT = self.padded([tokens_N[one.start : one.end] for one in chosen])
        candidates_BTW = None
        if lookup := self.model.lookup:
            # Neighbouring windows share what they look back on, so they are looked up at once.
            first, end = chosen[0].start, chosen[-1].end
            if end - first <= inputs_BT.size:
                known_NW = lookup.after(tokens_N, first, end, carry_over)
                rows = [known_NW[one.start - first : one.end - first] for one in chosen]
            else:
                rows = [lookup.after(tokens_N, one.start, one.end, carry_over) for one in chosen]
            candidates_BTW = self.padded(rows, lookup.layout.width)
        return self.logits(inputs_BT, candidates_BTW, exact=exact)


class Scored(NamedTuple):
    """Result of a pass over the text; nats are NaN where a target was not read."""

    windows: list[Window]
    nats_N: np.ndarray
    """Nats of each id of the text."""
    deviation_N: np.ndarray
    """Distance of the sum of all probabilities from one, before each id."""


class Rescored(Reader):
    """A claim whose text is read again: all of it, or a random sample if ``quick``.

    The sample has whole documents where the evaluation records their scores and each is read alone, else
    windows.
    """

    def __init__(self, claim: Claim, quick: bool) -> None:
        self.claim, self.quick = claim, quick
        self.checkpoint = open_checkpoint(claim)
        super().__init__(claim, self.checkpoint)
        settings = claim.spec.evaluation
        self.tokens_N, _ = validation_stream(
            claim.results.shards(claim.held_out),
            settings.max_bytes,
            self.checkpoint.tokens,
            settings.largest_group,
        )
        self.random = np.random.default_rng([*claim.evaluation.weights.encode()])
        self.recorded_D = documents(claim.evaluation, int((self.tokens_N == self.model.tokens.bos).sum()))
        carried = [claim.evaluation.carry_over] if claim.evaluation.bpb_carried is not None else []
        self.passes = {carry_over: self._score(carry_over) for carry_over in [0, *carried]}

    def windows(self, carry_over: int) -> list[Window]:
        reading = dataclasses.replace(self.alone, carry_over=carry_over)
        return windows(self.tokens_N, reading, self.model.tokens.bos)

    def _score(self, carry_over: int) -> Scored:
        found = self.windows(carry_over)
        chosen = self._sample(found, carry_over) if self.quick else found
        nats_N, deviation_N = np.full((2, len(self.tokens_N)), np.nan)
        for batch, logits in self.batches(chosen, carry_over):
            for row, one in enumerate(batch):
                logits_SV = logits[row, one.scored - one.start : one.end - one.start]
                target_S = self.tokens_N[one.scored + 1 : one.end + 1].astype(np.int64)
                at = slice(one.scored + 1, one.end + 1)
                nats_N[at], deviation_N[at] = nats_of(logits_SV, target_S)
        return Scored(found, nats_N, deviation_N)

    def _sample(self, found: list[Window], carry_over: int) -> list[Window]:
        """Return a random sample of windows, those of whole documents if their scores are recorded."""
        most = max(1, _QUICK // self.alone.seq_len)
        if not carry_over and self.recorded_D is not None:
            begins_D = np.flatnonzero(self.tokens_N == self.model.tokens.bos)
            document_W = np.searchsorted(begins_D, [one.scored for one in found], side="right") - 1
            count_D = np.bincount(document_W, minlength=len(begins_D))
            order_D = self.random.permutation(np.flatnonzero(count_D <= most))
            chosen_D = order_D[np.cumsum(count_D[order_D]) <= most]
            if len(chosen_D):
                return [found[w] for w in np.flatnonzero(np.isin(document_W, chosen_D)).tolist()]
        count = min(len(found), most)
        return [found[w] for w in np.sort(self.random.choice(len(found), count, replace=False)).tolist()]

    def batches(self, chosen: Sequence[Window], carry_over: int) -> Iterator[tuple[Sequence[Window], Tensor]]:
        for first in range(0, len(chosen), self.alone.batch):
            batch = chosen[first : first + self.alone.batch]
            yield batch, self.read(self.tokens_N, batch, carry_over)


class Documents(NamedTuple):
    """The sizes and scores of documents in an evaluation."""

    bytes_D: np.ndarray
    bits_D: np.ndarray
    """Bits of the bytes, each document read alone."""


def documents(evaluation: Evaluation, count: int) -> Documents | None:
    """Return what an evaluation records of each of so many documents; None if it records it of others."""
    overlap = evaluation.results.get("overlap")
    recorded = overlap.details.get("by_document", []) if overlap else []
    if len(recorded) != count:
        return None
    bytes_D, bpb_D = (np.array([one[name] for one in recorded]) for name in ("bytes", "bpb"))
    return Documents(bytes_D, bytes_D * bpb_D)


def nats_of(logits_SV: Tensor, target_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nats of targets, and the distance of the sum of the probabilities from one.

    The nats are those of a distribution that sums to one. The sum is that of the probabilities which the
    evaluation takes for the model's.
    """
    total_S = wide(logits_SV).log_softmax(-1).double().exp().sum(-1).cpu().numpy()
    plain_SV = logits_SV.as_subclass(Tensor).double()
    label_S1 = torch.from_numpy(target_S)[:, None].to(plain_SV.device)
    nats_S = plain_SV.logsumexp(-1) - plain_SV.gather(-1, label_S1)[:, 0]
    return nats_S.cpu().numpy(), np.nan_to_num(np.abs(total_S - 1), nan=np.inf)


class Predictor:
    """A forked process that predicts what follows a prefix, and never holds the text after it.

    It opens the checkpoint itself. It gets rising prefixes, each after it has answered the one before.
    """

    def __init__(self, claim: Claim) -> None:
        """Fork the process; it must not have read the text yet."""
        context = multiprocessing.get_context("fork")
        self._asking, answering = context.Pipe()
        context.Process(target=_answer, args=(claim, answering, self._asking), daemon=True).start()
        answering.close()

    def log_p(self, prefix_N: np.ndarray, start: int, carry_over: int) -> np.ndarray:
        """Return the logarithms of the probabilities of all ids after a prefix, (V,).

        Args:
            start: Where the window of the model begins in the prefix.
        """
        self._asking.send((prefix_N, start, carry_over))
        answer: np.ndarray = self._asking.recv()
        return answer

    def ask(self, rescored: Rescored, carry_over: int, target: int) -> np.ndarray:
        """Return the prediction of the id at a position of a text, from what may be read before it."""
        one = next(one for one in rescored.windows(carry_over) if one.scored < target <= one.end)
        first = one.start
        if lookup := rescored.model.lookup:
            first = max(0, first - history_of(lookup.config, carry_over))
        prefix_N = rescored.tokens_N[first:target].copy()
        return self.log_p(prefix_N, one.start - first, carry_over)


def _answer(claim: Claim, answering: Connection, asking: Connection) -> None:
    """Answer until the process that asks has ended."""
    asking.close()
    reader = Reader(claim, open_checkpoint(claim))
    with contextlib.suppress(EOFError):
        while True:
            prefix_N, start, carry_over = answering.recv()
            ids = prefix_N[start:]
            candidates_BTW = None
            if lookup := reader.model.lookup:
                found_NW = lookup.stream(carry_over).extend(prefix_N)[start:]
                candidates_BTW = reader.padded([found_NW], lookup.layout.width)
            logits_BTV = reader.logits(reader.padded([ids]), candidates_BTW, exact=False)
            last_V = logits_BTV[0, len(ids) - 1].as_subclass(Tensor).double()
            answering.send((last_V - last_V.logsumexp(-1)).cpu().numpy())
