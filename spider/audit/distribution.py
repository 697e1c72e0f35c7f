"""Check that probabilities sum to one, and that the bytes which are counted are those of the text.

The probabilities are those that the evaluation takes for the model's, summed here in float64. The bytes of
each document are those of the raw file, where that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spider.audit.claim import Claim
from spider.data.shards import load_metadata

if TYPE_CHECKING:
    from spider.audit.scoring import Rescored

#: Largest deviation of the sum of a distribution from one.
TOLERANCE = 1e-4
#: Number of bytes before which the mixer's distribution is summed up, in a full and in a quick check.
_MIXED, _QUICK_MIXED = 2000, 200
#: Documents that a quick check looks for in the raw files, the first ones.
_QUICK_DOCUMENTS = 10


def examine(rescored: Rescored) -> tuple[list[str], str]:
    """Return what is wrong, and what was checked."""
    problems = [*_of_sums(rescored), *_of_mixer(rescored), *_of_bytes(rescored)]
    raw, of_raw = _of_documents(rescored)
    summed = sum(int((~np.isnan(one.deviation_N)).sum()) for one in rescored.passes.values())
    return problems + of_raw, (
        f"at {summed:,} positions the probabilities of all ids sum to one within {TOLERANCE}, and the "
        f"counted bytes are those of the decoded text{raw}"
    )


def _of_sums(rescored: Rescored) -> Iterator[str]:
    recorded = rescored.claim.evaluation.deviation
    if not recorded <= TOLERANCE:
        yield f"the evaluation records that probabilities sum to one only within {recorded:.1e}"
    for scored in rescored.passes.values():
        wrong = np.flatnonzero(scored.deviation_N > TOLERANCE)
        if len(wrong):
            most = np.nanmax(scored.deviation_N)
            yield (
                f"at {len(wrong):,} positions the probabilities of all ids do not sum to one; the first is "
                f"{wrong[0]}, and the largest deviation is {most:.1e}"
            )


def _of_mixer(rescored: Rescored) -> Iterator[str]:
    """Yield what is wrong with the distribution of the mixer, if there is one, at the text's beginning."""
    settings = rescored.claim.spec.evaluation.mixer
    if "mixer" not in rescored.claim.evaluation.results or settings is None:
        return
    from spider.evaluation.mixer import Mixer

    mixer = Mixer(rescored.model.tokens, settings.rate)
    left = _QUICK_MIXED if rescored.quick else _MIXED
    for batch, logits in rescored.batches(rescored.windows(0)[: left // rescored.alone.stride + 1], 0):
        for row, one in enumerate(batch):
            log_p_SV = logits[row, one.scored - one.start : one.end - one.start].double().log_softmax(-1)
            targets = rescored.tokens_N[one.scored + 1 : one.end + 1]
            for target, log_p_V in zip(targets, log_p_SV.cpu().numpy(), strict=True):
                mixed_V = mixer.log_p(log_p_V)
                mixer.read(target[None].astype(np.int64), log_p_V[None])
                if abs(np.exp(mixed_V).sum() - 1) > TOLERANCE:
                    yield f"the probabilities of the mixer sum to {np.exp(mixed_V).sum():.6f}"
                    return
                if abs(mixed_V[target] + mixer.nats[-1][0]) > TOLERANCE:
                    yield "the mixer's nats are not those of its distribution"
                    return


def _of_bytes(rescored: Rescored) -> Iterator[str]:
    """Yield ids that count for more or fewer bytes than they stand for."""
    counting, decoding = rescored.model.tokens, rescored.checkpoint.tokens
    used = np.unique(rescored.tokens_N)
    wrong = [i for i in used.tolist() if counting.bytes_of[i] != len(decoding.raw([i]))]
    for i in wrong[:3]:
        text = decoding.raw([i])
        yield f"the id {i} counts for {counting.bytes_of[i]} bytes, but stands for {text!r}"
    counted = int(counting.bytes_of[rescored.tokens_N].sum(dtype=np.int64))
    decoded = len(decoding.raw(rescored.tokens_N))
    if not counted == decoded == rescored.claim.evaluation.targets["byte"]:
        recorded = rescored.claim.evaluation.targets["byte"]
        yield f"{decoded:,} bytes of text count for {counted:,}, and the evaluation divides by {recorded:,}"


def _of_documents(rescored: Rescored) -> tuple[str, list[str]]:
    """Compare the scored documents with the raw ones; return what was compared, and what differs."""
    claim = rescored.claim
    metadata = load_metadata(claim.results.shards(claim.held_out))
    parts = [Path(shard.file) for shard in metadata.splits["validation"].shards]
    raw = claim.config.raw(claim.held_out)
    if metadata.imported or not metadata.lossless:
        return " (there is no raw text of published ids)", []
    if not all(claim.results.raw(raw, part.stem).exists() for part in parts):
        return " (the raw files are missing)", []
    tokens = rescored.checkpoint.tokens
    begins = np.flatnonzero(rescored.tokens_N == tokens.bos)
    parts_N = np.split(rescored.tokens_N, begins[1:])[: _QUICK_DOCUMENTS if rescored.quick else None]
    documents = map(tokens.raw, parts_N)
    texts = _raw_texts(claim, raw, parts)
    for number, document in enumerate(documents):
        # The scored documents are some of the raw ones, in their order. The last one may be cut.
        if not any(text.startswith(document) for text in texts):
            return "", [f"document {number} of the scored text is not in the raw files, in their order"]
    return f" and of {len(parts_N):,} raw documents", []


def _raw_texts(claim: Claim, raw: str, parts: list[Path]) -> Iterator[bytes]:
    """Yield the texts of all raw documents, in the order of the shards."""
    from spider.data import chat
    from spider.data.encode import read_documents, row_counts

    dataset = claim.config.dataset(claim.held_out)
    for part in parts:
        for found in read_documents(claim.results.raw(raw, part.stem), dataset, row_counts()):
            for text in found.texts.to_pylist():
                yield chat.plain(text) if dataset.format == "chat" else text.encode()
