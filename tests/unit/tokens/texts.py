"""Make texts of few words, to learn merges from."""

import random

WORDS = [
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
]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + ".\n" for _ in range(count)]
