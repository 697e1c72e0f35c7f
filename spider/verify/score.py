"""Score again, with the checkpoint and the text that are here now.

A quick check reads a random sample of whole documents, and compares each with the score that the evaluation
records for it. All recorded documents together must have the recorded score, so a changed score is found
unless those that were not read were changed as well. A full check, and one of an evaluation that records no
documents, compares the figures of all of the text.

Shapes: N ids of the text, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.evaluation.bpb import score
from spider.evaluation.evaluate import HeldOut
from spider.evaluation.records import Evaluation
from spider.evaluation.text import Text
from spider.model.interface import Model, model_tensors, weights_digest
from spider.verify.claim import Claim, Finding

#: Largest difference of bits per byte from the record, and that of one document, by precision.
TOLERANCE = 1e-4
_DOCUMENT = {"fp32": TOLERANCE, "bf16": 0.02}
#: Figures of an evaluation that a full check computes again.
FIGURES = ("bpb", "bpb_strict", "bpb_carried", "bpb_strict_carried")
AGAIN = "but if it is computed again"
#: Ids that a quick check reads at most, and at least one document.
_QUICK = 4096


def check(claim: Claim, quick: bool) -> Finding:
    """Score the text of a claim, or a sample of it, again."""
    if reason := obstacle(claim):
        return Finding("skipped", reason)
    try:
        return _scored(claim, quick)
    except ValueError as error:
        return Finding("failed", f"the score cannot be computed again: {error}")


def obstacle(claim: Claim) -> str | None:
    """Return why the score cannot be computed again here; None if it can."""
    needed = [claim.folder.path / claim.evaluation.checkpoint, claim.results.shards(claim.held_out)]
    for path in needed:
        if not path.exists():
            return f"the score cannot be computed again, because {path} is missing"
    if claim.evaluation.device.startswith("cuda") and not torch.cuda.is_available():
        return "the score was computed on a GPU, and torch can use none here"
    return None


def _scored(claim: Claim, quick: bool) -> Finding:
    evaluation, receipt = claim.evaluation, Receipt.read(claim.folder.receipt)
    checkpoint, shards = Checkpoint.at(claim.folder.receipt), claim.results.shards(claim.held_out)
    held_out = HeldOut.of(claim.spec, shards, checkpoint.tokens, evaluation.device)
    model, text_N = checkpoint.model(held_out.device), held_out.tokens_N
    reading = held_out.reading(receipt)
    begins_D = np.flatnonzero(text_N == model.tokens.bos)
    problems = [*of_text(evaluation, held_out.text, held_out.data_digest), *of_weights(claim, model)]
    if not quick or recorded(evaluation, len(begins_D)) is None:
        scored, carried = held_out.score(model, reading)
        again = held_out.measured(model, reading, scored, carried)
        problems += [line for name in FIGURES for line in differing(evaluation, name, again[name])]
        return Finding.of(problems, f"all of the text gives the recorded score within {TOLERANCE}")
    ids_D = np.diff(np.append(begins_D, len(text_N)))
    chosen_D = sample(evaluation, ids_D)
    bits_D = np.full(len(begins_D), np.nan)
    for d in chosen_D.tolist():
        one = score(model, text_N[begins_D[d] : begins_D[d] + ids_D[d]], reading)
        bits_D[d] = one.nats["byte"] / math.log(2)
    problems += of_documents(evaluation, bits_D)
    return Finding.of(problems, f"{len(chosen_D)} of {len(ids_D)} documents have their recorded scores")


def of_text(evaluation: Evaluation, text: Text, data_digest: str) -> Iterator[str]:
    """Yield what an evaluation says of its text that is not so of the text that the settings give."""
    if evaluation.bytes < (size := len(text)):
        yield f"{evaluation.bytes:,} of {size:,} held-out bytes were scored, as of a cropped held-out text"
    for name, value in {"bytes": size, "text_sha256": text.sha256, "data_digest": data_digest}.items():
        if (was := getattr(evaluation, name)) != value:
            yield f"{name}: {was} in the evaluation, {value} in the held-out text that the settings give"


def of_weights(claim: Claim, model: Model) -> Iterator[str]:
    """Yield what shows that an evaluation is of other weights, or names other figures than its nats give."""
    evaluation, found = claim.evaluation, weights_digest(model_tensors(model))
    if found != evaluation.weights:
        yield f"the evaluation is of the weights {evaluation.weights}, but the checkpoint has {found}"
    for name, kinds in (("bpb", ("byte",)), ("bpb_strict", ("byte", "eos", "bos"))):
        value = sum(evaluation.nats[kind] for kind in kinds) / math.log(2) / evaluation.bytes
        yield from differing(evaluation, name, value, "but its nats and bytes give")


def of_documents(evaluation: Evaluation, bits_D: np.ndarray) -> Iterator[str]:
    """Yield documents with other scores than these bits, which are NaN for documents that were not read."""
    if (known := recorded(evaluation, len(bits_D))) is None:
        return
    bytes_D, was_D = known
    yield from differing(evaluation, "bpb", was_D.sum() / bytes_D.sum(), "but its documents have")
    most_D = _DOCUMENT[evaluation.precision] * np.maximum(1, bytes_D)
    for d in np.flatnonzero(np.abs(bits_D - was_D) > most_D).tolist():
        was, now = (bits[d] / max(1, bytes_D[d]) for bits in (was_D, bits_D))
        yield f"document {d}: {was:.6f} bits per byte in the evaluation, {now:.6f} if it is computed again"


def differing(evaluation: Evaluation, name: str, value: float | None, found: str = AGAIN) -> Iterator[str]:
    """Yield a sentence if a figure of an evaluation is another one than was found."""
    was = getattr(evaluation, name)
    alike = was is value if None in (was, value) else abs(was - value) <= TOLERANCE
    if not alike:
        was, now = (None if one is None else f"{one:.6f}" for one in (was, value))
        yield f"{name}: {was} in the evaluation, {found} {now}"


def recorded(evaluation: Evaluation, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the recorded bytes and bits of each of so many documents; None if others are recorded."""
    overlap = evaluation.results.get("overlap")
    found = overlap.details.get("by_document", []) if overlap else []
    bytes_D, bpb_D = (np.array([one[name] for one in found]) for name in ("bytes", "bpb"))
    return (bytes_D, bytes_D * bpb_D) if len(found) == count else None


def sample(evaluation: Evaluation, ids_D: np.ndarray) -> np.ndarray:
    """Return the numbers of some documents, drawn at random; ``ids_D`` are the sizes of all."""
    random = np.random.default_rng([*evaluation.weights.encode()])
    order_D = random.permutation(np.flatnonzero(ids_D <= max(_QUICK, ids_D.min())))
    return order_D[: max(1, int((np.cumsum(ids_D[order_D]) <= _QUICK).sum()))]
