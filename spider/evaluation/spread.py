"""Measure how sure a figure is: the interval of a bootstrap over documents."""

from __future__ import annotations

import numpy as np

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
