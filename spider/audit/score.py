"""Check bits per byte by computing them again, in a fresh process and by another path.

All windows of the text are read by a plain loop (`spider.audit.scoring`), and the sums must equal the record
within `TOLERANCE`. Then a process that never holds the text after a position predicts the ids at a random
sample of positions. Its nats must be those of the windows.

A quick check reads a random sample of documents. Each must have the score that the evaluation records for it,
and all recorded documents together must have the recorded score. With what came before, and where an
evaluation records no documents, it reads a sample of the windows. Then it can only say whether the recorded
score is within the sampling error of their mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from spider.audit.claim import Claim
from spider.data.shards import load_metadata
from spider.results import CompressedFolder

if TYPE_CHECKING:
    from torch import Tensor

    from spider.audit.scoring import Predictor, Rescored, Scored

#: Largest difference of bits per byte from the record.
TOLERANCE = 1e-4
#: Largest difference of the nats of one target between two batches of other sizes, by precision.
_NATS = {"fp32": 1e-3, "bf16": 0.1}
#: Largest difference of the bits per byte of one document, by precision.
_DOCUMENT = {"fp32": TOLERANCE, "bf16": 0.02}
#: Positions that are predicted from their prefix, for each of the two figures.
_POSITIONS, _QUICK_POSITIONS = 64, 2
#: Standard errors of the mean of a sample within which the recorded score must be.
_ERRORS = 6.0


def examine(rescored: Rescored, predictor: Predictor) -> tuple[list[str], str]:
    """Return what is wrong with the score, and what was checked."""
    count, of_documents = _of_documents(rescored)
    problems = [*_of_model(rescored), *_of_text(rescored), *_of_scores(rescored), *of_documents]
    asked, differing = _from_prefixes(rescored, predictor)
    what = f"all of the text gives the recorded score within {TOLERANCE}"
    if rescored.quick:
        what = "a sample of the windows has the recorded score within its error"
        of = rescored.claim.evaluation.documents
        what = f"{count} of {of} documents have their recorded scores" if count else what
    passed = f"{what}, and {asked} positions have the same prediction from their prefix alone"
    return problems + differing, passed


def _of_model(rescored: Rescored) -> Iterator[str]:
    """Yield what shows that the scored weights are not those of the run."""
    from spider.model.interface import model_tensors, weights_digest

    claim, evaluation = rescored.claim, rescored.claim.evaluation
    found = weights_digest(model_tensors(rescored.model))
    if found != evaluation.weights:
        yield f"the evaluation is of the weights {evaluation.weights}, but the checkpoint has {found}"
    stage, manifest = claim.receipt, rescored.checkpoint.manifest
    if (manifest.run, manifest.stage, manifest.identity) != (stage.run, stage.stage, stage.identity):
        named = f"{manifest.run}/{manifest.stage} ({manifest.identity})"
        yield f"the checkpoint is of {named}, not of {stage.run}/{stage.stage} ({stage.identity})"
    if not claim.compressed and evaluation.averaged != bool(stage.averaged_weights):
        yield f"the evaluation says averaged: {evaluation.averaged}, but the stage ended otherwise"
    for name in claim.datasets:
        digest = load_metadata(claim.results.shards(name)).vocabulary.digest
        if digest != rescored.model.tokens.digest:
            yield f"the model has the tokenizer {rescored.model.tokens.digest}, and {name} has {digest}"
    if isinstance(claim.folder, CompressedFolder):
        likeness = _likeness(claim, model_tensors(rescored.model))
        if likeness < 0.5:
            yield f"the compressed weights are not near those of the stage (cosine {likeness:.2f})"


def _likeness(claim: Claim, compressed: dict[str, Tensor]) -> float:
    """Return the cosine between the matrices of a compressed model and those of its stage."""
    from spider.checkpoints.load import Checkpoint
    from spider.model.interface import model_tensors

    whole = model_tensors(Checkpoint.at(claim.results.stage(claim.run, claim.stage).receipt).model())
    pairs = [(one.double().cpu(), whole[name].double()) for name, one in compressed.items() if one.ndim > 1]
    product = sum(float((a * b).sum()) for a, b in pairs)
    return product / math.sqrt(
        sum(float(a.square().sum()) for a, _ in pairs) * sum(float(b.square().sum()) for _, b in pairs)
    )


def _of_text(rescored: Rescored) -> Iterator[str]:
    """Yield recorded numbers of the text that are not those of the text."""
    evaluation, tokens_N = rescored.claim.evaluation, rescored.tokens_N
    tokens = rescored.checkpoint.tokens
    text = tokens.raw(tokens_N)
    sha256 = hashlib.sha256(text).hexdigest()
    if sha256 != evaluation.text_sha256:
        yield f"the held-out text has the SHA-256 {sha256}, the evaluation's is {evaluation.text_sha256}"
    targets = {
        "byte": len(text),
        "eos": int((tokens_N[1:] == tokens.eos).sum()),
        "bos": int((tokens_N[1:] == tokens.bos).sum()),
    }
    found = {"bytes": len(text), "documents": int((tokens_N == tokens.bos).sum())}
    found |= {f"targets.{kind}": count for kind, count in targets.items()}
    recorded = {"bytes": evaluation.bytes, "documents": evaluation.documents}
    recorded |= {f"targets.{kind}": evaluation.targets[kind] for kind in targets}
    for name, count in found.items():
        if count != recorded[name]:
            yield f"{name}: {recorded[name]:,} in the evaluation, {count:,} in the text"


def _of_scores(rescored: Rescored) -> Iterator[str]:
    """Yield recorded scores that differ from those of the windows."""
    evaluation, tokens_N = rescored.claim.evaluation, rescored.tokens_N
    tokens, count = rescored.checkpoint.tokens, math.log(2) * evaluation.bytes
    nats = evaluation.nats
    of_nats = {"bpb": nats["byte"] / count, "bpb_strict": (nats["byte"] + nats["eos"] + nats["bos"]) / count}
    for name, value in of_nats.items():
        if abs(value - getattr(evaluation, name)) > TOLERANCE:
            yield f"{name}: {getattr(evaluation, name):.4f}, but its nats and bytes give {value:.4f}"
    bytes_N = np.array([len(tokens.raw([i])) for i in range(tokens.size)])[tokens_N]
    marks_N = (tokens_N == tokens.bos) | (tokens_N == tokens.eos)
    for carry_over, scored in rescored.passes.items():
        if rescored.quick and not carry_over and rescored.recorded_D is not None:
            continue  # the documents are compared instead
        for strict in (False, True):
            name = f"bpb{'_strict' * strict}{'_carried' * bool(carry_over)}"
            recorded = getattr(evaluation, name)
            value, error = _mean(scored, bytes_N, bytes_N > 0 if not strict else (bytes_N > 0) | marks_N)
            if not abs(value - recorded) <= TOLERANCE + _ERRORS * error:
                margin = f" within {_ERRORS * error:.4f}" if error else ""
                yield f"{name}: {recorded:.6f} in the evaluation, {value:.6f}{margin} if it is computed again"


def _of_documents(rescored: Rescored) -> tuple[int, list[str]]:
    """Return how many documents were read in full, and which of their recorded scores differ."""
    evaluation, tokens_N, recorded = rescored.claim.evaluation, rescored.tokens_N, rescored.recorded_D
    if recorded is None:
        return 0, []
    problems = []
    tokens = rescored.checkpoint.tokens
    length_V = np.array([len(tokens.raw([i])) for i in range(tokens.size)])
    begins_D = np.flatnonzero(tokens_N == tokens.bos)
    bytes_N, nats_N = length_V[tokens_N], rescored.passes[0].nats_N
    bytes_D = np.add.reduceat(bytes_N, begins_D)
    bits_D = np.add.reduceat(np.where(bytes_N > 0, nats_N, 0), begins_D) / math.log(2)
    if not np.array_equal(bytes_D, recorded.bytes_D):
        wrong = int((bytes_D != recorded.bytes_D).sum())
        problems.append(f"{wrong:,} documents have another number of bytes than in the evaluation")
    total = recorded.bits_D.sum() / recorded.bytes_D.sum()
    if not abs(total - evaluation.bpb) <= TOLERANCE:
        problems.append(f"bpb: {evaluation.bpb:.6f} in the evaluation, but its documents have {total:.6f}")
    read_D = ~np.isnan(bits_D)
    differs_D = np.abs(bits_D - recorded.bits_D) > _DOCUMENT[evaluation.precision] * np.maximum(1, bytes_D)
    for d in np.flatnonzero(read_D & differs_D).tolist():
        was, now = recorded.bits_D[d] / max(1, bytes_D[d]), bits_D[d] / max(1, bytes_D[d])
        problems.append(
            f"document {d}: {was:.6f} bits per byte in the evaluation, {now:.6f} if it is computed again"
        )
    return int(read_D.sum()), problems


def _mean(scored: Scored, bytes_N: np.ndarray, counted_N: np.ndarray) -> tuple[float, float]:
    """Return bits per byte of the windows that were read, and its standard error (0: all were read)."""
    first_W = np.array([one.scored + 1 for one in scored.windows])
    nats_W = np.add.reduceat(np.where(counted_N, scored.nats_N, 0)[first_W[0] :], first_W - first_W[0])
    read_W = ~np.isnan(scored.nats_N[first_W])
    nats_W, bytes_W = nats_W[read_W], np.add.reduceat(bytes_N[first_W[0] :], first_W - first_W[0])[read_W]
    ratio = nats_W.sum() / bytes_W.sum()
    left = 1 - len(nats_W) / len(first_W)
    error = math.sqrt(left * len(nats_W)) * float(np.std(nats_W - ratio * bytes_W)) / bytes_W.sum()
    return float(ratio / math.log(2)), float(error / math.log(2))


def _from_prefixes(rescored: Rescored, predictor: Predictor) -> tuple[int, list[str]]:
    """Return how many positions were predicted from their prefixes, and which of them differ."""
    most = _NATS[rescored.claim.evaluation.precision]
    asked, problems = 0, []
    for carry_over, scored in rescored.passes.items():
        known = np.flatnonzero(~np.isnan(scored.nats_N))
        count = min(len(known), _QUICK_POSITIONS if rescored.quick else _POSITIONS)
        for target in np.sort(rescored.random.choice(known, count, replace=False)).tolist():
            nats = -predictor.ask(rescored, carry_over, target)[rescored.tokens_N[target]]
            asked += 1
            if not abs(nats - scored.nats_N[target]) <= most:
                problems.append(
                    f"the id at position {target} costs {scored.nats_N[target]:.4f} nats in its window, and "
                    f"{nats:.4f} when nothing after its prefix is in memory"
                )
    return asked, problems
