"""Texts to learn pairs of bytes from, made up of few words."""

import random

WORDS = (
    "the",
    "then",
    "there",
    "tokens",
    "token",
    "of",
    "bytes",
    "byte",
    "und",
    "Straße",
    "naïve",
    "語",
    "1024",
)


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + ".\n" for _ in range(count)]
