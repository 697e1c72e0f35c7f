"""Rewards of an answer, made from the reference answer of the same conversation.

    last_number   1 if the last number of the answer equals the last number of the reference
    exact         1 if the answer equals the reference, apart from white space at both ends

A number may have commas between its digits, a sign and decimals: ``1,200.50`` equals ``1200.5``.
"""

from __future__ import annotations

import re
from decimal import Decimal

from spider.config import RolloutConfig

NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


class Reward:
    """The reward of a configuration."""

    def __init__(self, config: RolloutConfig) -> None:
        self.kind = config.reward

    def key(self, text: str) -> str | Decimal | None:
        """Return what is compared of a text; None if the text does not have it."""
        return text.strip() if self.kind == "exact" else last_number(text)

    def __call__(self, answer: str, reference: str) -> float:
        """Return 1.0 for a correct answer, else 0.0."""
        key = self.key(answer)
        return float(key is not None and key == self.key(reference))
