"""Measure how sure a figure is: its spread over groups of documents, and a bootstrap over documents."""

from __future__ import annotations

import math

import numpy as np

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import bits_by_byte
from spider.evaluation.result import ALONE, BITS, BYTES, CARRIED, SHARE, Number, Result, Row, Table
from spider.evaluation.subject import Subject
from spider.tokens import Tokens

#: Groups that have a row of their own in the table, the largest ones.
_ROWS = 20
_MODEL = f"this model, {ALONE}"
#: Resamples of a bootstrap.
RESAMPLES = 1000


def bootstrap_interval(bits_D: np.ndarray, bytes_D: np.ndarray) -> tuple[float, float] | None:
    """Return the 95% percentile interval of bits per byte over resampled documents.

    A resample draws as many documents as there are, with replacement, and divides the sum of their bits by
    the sum of their bytes. The draws depend on the number of documents alone, so two models on one text have
    the same resamples (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

    Args:
        bits_D: Bits that a model or a compressor spent on each document.
        bytes_D: Bytes of each document.

    Returns:
        The bounds in bits per byte; None for fewer than two documents.
    """
    if len(bits_D) < 2:
        return None
    random = np.random.default_rng(0)
    drawn = (random.integers(len(bits_D), size=len(bits_D)) for _ in range(RESAMPLES))
    low, high = np.percentile([bits_D[i_D].sum() / bytes_D[i_D].sum() for i_D in drawn], [2.5, 97.5])
    return float(low), float(high)


def intervals(
    nats_S: np.ndarray, tokens_N: np.ndarray, tokens: Tokens, bytes_D: np.ndarray | None = None
) -> dict[str, tuple[float, float]]:
    """Return the intervals of bpb and bpb_strict over documents, by name; none for a single document.

    Args:
        nats_S: Nats of each target, which are the ids of a stream after the first one.
        bytes_D: Bytes of each document (default: those that its ids stand for).
    """
    target_S = tokens_N[1:]
    document_S = np.cumsum(tokens_N == tokens.bos)[1:] - 1
    is_text_S = tokens.bytes_of[target_S] > 0
    if bytes_D is None:
        bytes_D = np.bincount(document_S, tokens.bytes_of[target_S])
    counted = {"bpb": is_text_S, "bpb_strict": is_text_S | np.isin(target_S, [tokens.bos, tokens.eos])}
    bits_S = nats_S / math.log(2)
    found = {
        name: bootstrap_interval(np.bincount(document_S, bits_S * counted_S), bytes_D)
        for name, counted_S in counted.items()
    }
    return {name: interval for name, interval in found.items() if interval is not None}


def document_bits(nats_S: np.ndarray, tokens_N: np.ndarray, tokens: Tokens) -> list[float]:
    """Return the bits of the text of each document. The arguments are those of `intervals`."""
    document_S = np.cumsum(tokens_N == tokens.bos)[1:] - 1
    bits_S = nats_S * (tokens.bytes_of[tokens_N[1:]] > 0) / math.log(2)
    return [round(bits, 3) for bits in np.bincount(document_S, bits_S).tolist()]


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the scores of each group of documents (``split_by``); None if the groups are not recorded."""
    if not subject.groups:
        return None
    count = len(subject.groups)
    names, group_D = np.unique(subject.groups, return_inverse=True)
    bytes_G = np.bincount(group_D, subject.text.lengths()[:count])
    order_G = np.argsort(-bytes_G, kind="stable")
    first_D = subject.text.bounds_D[:-1]
    by_document = {
        _MODEL: np.add.reduceat(subject.bits_B, first_D),
    }
    if subject.carried is not None:
        bits_B = bits_by_byte(subject.carried, subject.tokens_N, subject.model.tokens)
        by_document[f"this model, {CARRIED}"] = np.add.reduceat(bits_B, first_D)
    bits_G = {title: np.bincount(group_D, bits_D[:count]) for title, bits_D in by_document.items()}

    def row(label: str, chosen: np.ndarray) -> Row:
        size = bytes_G[chosen].sum()
        columns = {
            "bytes": Number(value=int(size), unit=BYTES),
            "share": Number(value=float(size / len(subject.text)), unit=SHARE),
        }
        for title, of_title_G in bits_G.items():
            columns[title] = Number(value=float(of_title_G[chosen].sum() / size), unit=BITS)
        alone = columns.pop(_MODEL)
        return Row(name=f"spread/{label}", label=label, value=alone.value, unit=BITS, columns=columns)

    rows = [row(names[group], np.array([group])) for group in order_G[:_ROWS].tolist()]
    if others := len(names[_ROWS:]):
        rows.append(row(f"{others} others", order_G[_ROWS:]))
    bpb_G = bits_G[_MODEL] / bytes_G
    largest = float(bytes_G.max() / len(subject.text))
    note = (
        f"{len(names)} groups are scored, at most {largest:.1%} of the bytes from one. Each document alone, "
        f"they have {bpb_G.min():.3f} to {bpb_G.max():.3f} bits per byte."
    )
    if len(subject.text.lengths()) > count:
        note += f" Only the groups of the first {count:,} documents are recorded."
    return Result(
        title="Spread",
        notes=[note],
        metrics={
            "spread/groups": len(names),
            "spread/largest_share": largest,
            "spread/lowest": float(bpb_G.min()),
            "spread/highest": float(bpb_G.max()),
        },
        figures=[Table(title="By group of documents", head="group", value=_MODEL, rows=rows)],
    )
