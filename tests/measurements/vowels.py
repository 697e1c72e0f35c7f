"""Measure the cost of vowels in the held-out text: a complete measurement in one file."""

from __future__ import annotations

from spider.config.block import Block
from spider.evaluation.result import BITS, SHARE, Histogram, Result, Row


class Config(Block):
    letters: str = "aeiou"
    """Bytes that count as vowels."""


def measure(subject, settings: Config) -> Result:
    """Return the model's bits per byte on vowels, and their share of the text."""
    import numpy as np

    vowel_B = np.isin(subject.text.bytes_N, np.frombuffer(settings.letters.encode(), np.uint8))
    counts = [int((subject.text.bytes_N == byte).sum()) for byte in settings.letters.encode()]
    return Result(
        title="Letters counted",
        rows=[
            Row(
                name="vowels/bpb",
                label="on vowels",
                value=float(subject.bits_B[vowel_B].mean()),
                unit=BITS,
                better="lower",
            ),
            Row(name="vowels/share", label="share of vowels", value=float(vowel_B.mean()), unit=SHARE),
        ],
        notes=[f"Vowels are {settings.letters}."],
        figures=[Histogram(title="Vowels", unit="letter", things="vowels", counts=[0, *counts])],
    )
