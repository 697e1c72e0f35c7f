"""Three checks that read the scored text again (`spider_trust.rescored`).

*score*: all windows, read by a plain loop, must have the recorded figures. Then a process that never holds
the text after a position predicts the ids at random positions. Its nats must be those of the windows.

*distribution*: the probabilities that the evaluation takes for the model's must sum to one, and the bytes
that it counts must be those of the decoded text.

*causality*: no prediction may depend on a byte after it. All ids after a random position are replaced by
random ones, those of later windows and of the n-gram index's text too. The model reads the windows up to that
position again, and its logits up to there must be the same. Rounding could feign a difference, because a
mixture of experts multiplies matrices whose sizes depend on all rows of a batch. So the model computes in
float64, or without autocast if it has parts in float32 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import numpy as np

from spider.checkpoints.load import Checkpoint
from spider.evaluation.text import Text
from spider.model.interface import model_tensors
from spider.verify.claim import Claim, Finding
from spider.verify.score import AGAIN, TOLERANCE, differing, obstacle, of_documents, of_text, of_weights
from spider_trust.rescored import Predictor, Rescored, Window

#: Largest difference of the nats of one target between two batches of other sizes, by precision.
_NATS = {"fp32": 1e-3, "bf16": 0.1}
#: Positions that are predicted from their prefix for each figure, and in a quick check.
_PREFIXES = (64, 2)
#: Positions after which all ids are replaced for each figure, and windows that are read up to each.
_CUTS, _WINDOWS = (32, 2), (4, 2)
#: Largest difference of a logit, in float64 and in float32.
_LOGIT, _LOGIT_FP32 = 1e-6, 1e-4


def checks(claim: Claim, quick: bool) -> Mapping[str, Callable[[], Finding]]:
    """Return the three checks by name. The text is read once, in the first of them."""
    predictor = Predictor(claim)  # before the text is read
    rescored = cache(partial(Rescored, claim, quick))
    return {
        "distribution": partial(_examined, claim, rescored, distribution),
        "score": partial(_examined, claim, rescored, partial(score, predictor=predictor)),
        "causality": partial(_examined, claim, rescored, causality),  # makes the model float64
    }


def _examined(
    claim: Claim, rescored: Callable[[], Rescored], examine: Callable[[Rescored], tuple[list[str], str]]
) -> Finding:
    if reason := obstacle(claim):
        return Finding("skipped", reason)
    try:
        return Finding.of(*examine(rescored()))
    except ValueError as error:
        return Finding("failed", f"the score cannot be computed again: {error}")


# -------------------------------------------------------------------------------------------------- score


def score(again: Rescored, predictor: Predictor) -> tuple[list[str], str]:
    """Return what is wrong with the score, and what was checked."""
    claim, evaluation = again.claim, again.claim.evaluation
    text = Text.of(again.tokens_N, again.tokens)
    problems = [*of_text(evaluation, text, again.data_digest), *of_weights(claim, again.model)]
    problems += of_documents(evaluation, again.bits_D)
    if claim.compressed and (alike := _likeness(again)) < 0.5:
        problems.append(f"the compressed weights are not near those of the stage (cosine {alike:.2f})")
    marks_N = (again.tokens_N == again.tokens.bos) | (again.tokens_N == again.tokens.eos)
    asked = 0
    for carry_over, nats_N in again.nats.items():
        for name, counted_N in (("bpb", again.bytes_N > 0), ("bpb_strict", (again.bytes_N > 0) | marks_N)):
            value = float(np.nansum(nats_N[counted_N])) / math.log(2) / int(again.bytes_N.sum())
            if again.whole:
                problems += differing(evaluation, f"{name}{'_carried' * bool(carry_over)}", value, AGAIN)
        known = np.flatnonzero(~np.isnan(nats_N))
        count = min(len(known), _PREFIXES[again.quick])
        for target in np.sort(again.random.choice(known, count, replace=False)).tolist():
            nats = -predictor.ask(again, carry_over, target)[again.tokens_N[target]]
            asked += 1
            if not abs(nats - nats_N[target]) <= _NATS[evaluation.precision]:
                problems.append(
                    f"the id at position {target} costs {nats_N[target]:.4f} nats in its window, and "
                    f"{nats:.4f} when nothing after its prefix is in memory"
                )
    what = f"all of the text gives the recorded score within {TOLERANCE}"
    if not again.whole:
        read, of = int((~np.isnan(again.bits_D)).sum()), len(again.bits_D)
        what = f"{read} of {of} documents have their recorded scores"
    return problems, f"{what}, and {asked} positions have the same prediction from their prefix alone"


def _likeness(again: Rescored) -> float:
    """Return the cosine between the matrices of a compressed model and those of its stage."""
    whole = model_tensors(Checkpoint.at(again.claim.trained.receipt).model())
    own = model_tensors(again.model)
    pairs = [(one.double().cpu(), whole[name].double()) for name, one in own.items() if one.ndim > 1]
    product = sum(float((a * b).sum()) for a, b in pairs)
    squares = [sum(float(one.square().sum()) for one in side) for side in zip(*pairs, strict=True)]
    return product / math.sqrt(math.prod(squares))


# ------------------------------------------------------------------------------------------- distribution


def distribution(again: Rescored) -> tuple[list[str], str]:
    """Return where probabilities do not sum to one or bytes are counted wrongly, and what was checked."""
    summed = sum(int((~np.isnan(one)).sum()) for one in again.deviation.values())
    return [*_of_sums(again), *_of_bytes(again)], (
        f"at {summed:,} positions the probabilities of all ids sum to one within {TOLERANCE}, and the "
        "counted bytes are those of the decoded text"
    )


def _of_sums(again: Rescored) -> Iterator[str]:
    if not (recorded := again.claim.evaluation.deviation) <= TOLERANCE:
        yield f"the evaluation records that probabilities sum to one only within {recorded:.1e}"
    for deviation_N in again.deviation.values():
        wrong = np.flatnonzero(deviation_N > TOLERANCE)
        if len(wrong):
            yield (
                f"at {len(wrong):,} positions the probabilities of all ids do not sum to one; the first is "
                f"{wrong[0]}, and the largest deviation is {np.nanmax(deviation_N):.1e}"
            )


def _of_bytes(again: Rescored) -> Iterator[str]:
    """Yield ids that count for more or fewer bytes than they stand for."""
    counting, decoding = again.model.tokens, again.tokens
    used = np.unique(again.tokens_N).tolist()
    for i in [i for i in used if counting.bytes_of[i] != len(decoding.raw([i]))][:3]:
        yield f"the id {i} counts for {counting.bytes_of[i]} bytes, but stands for {decoding.raw([i])!r}"
    counted = int(counting.bytes_of[again.tokens_N].sum(dtype=np.int64))
    decoded, recorded = len(decoding.raw(again.tokens_N)), again.claim.evaluation.targets["byte"]
    if not counted == decoded == recorded:
        yield f"{decoded:,} bytes of text count for {counted:,}, and the evaluation divides by {recorded:,}"


# ---------------------------------------------------------------------------------------------- causality


def causality(again: Rescored) -> tuple[list[str], str]:
    """Return what depends on later bytes, and what was checked. The model may be in float64 afterwards."""
    most = _LOGIT if _in_float64(again) else _LOGIT_FP32
    problems, count = [], 0
    for carry_over in again.nats:
        windows = again.windows(carry_over)
        for _ in range(_CUTS[again.quick]):
            cut = int(again.random.integers(len(again.tokens_N) - 1))
            count += 1
            if differing := _changed(again, cut, carry_over, windows, most):
                problems.append(
                    f"{differing:,} predictions of the ids up to position {cut + 1} change if other bytes "
                    f"come after position {cut}"
                )
    return problems, (
        f"all ids after each of {count} positions were replaced, and no prediction up to there changed by "
        f"more than {most}"
    )


def _in_float64(again: Rescored) -> bool:
    """Turn the model into float64, unless a part of it cannot compute so."""
    again.model.double()
    try:
        again.read(again.tokens_N, again.windows(0)[:1], 0, exact=True)
    except RuntimeError:
        again.model.float()
        return False
    return True


def _changed(again: Rescored, cut: int, carry_over: int, windows: list[Window], most: float) -> int:
    """Return how many predictions up to a position change if all ids after it do."""
    at = next(i for i, one in enumerate(windows) if one.scored <= cut < one.end)
    chosen = windows[max(0, at + 1 - _WINDOWS[again.quick]) : at + 1]
    texts = np.flatnonzero(again.model.tokens.bytes_of)
    other_N = again.tokens_N.copy()
    other_N[cut + 1 :] = again.random.choice(texts, len(other_N) - cut - 1)
    # The document that holds the position does not end any more. Both batches have one shape.
    last = chosen[-1]._replace(end=min(chosen[-1].start + again.reading.seq_len, len(other_N) - 1))
    before = again.read(again.tokens_N, chosen, carry_over, exact=True)
    after = again.read(other_N, [*chosen[:-1], last], carry_over, exact=True)
    changed_BT = ((before - after).abs() > most).any(-1) | ~before.isfinite().all(-1)
    return sum(
        int(changed_BT[row, : min(one.end, cut + 1) - one.start].sum()) for row, one in enumerate(chosen)
    )
