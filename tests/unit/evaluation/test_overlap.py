"""Compare the matches with a search by brute force."""

import numpy as np
import pytest

from spider.evaluation.overlap import StringMatches
from spider.evaluation.text import Text
from spider.tokens import BYTES


def text(*documents: bytes) -> Text:
    return Text.of(np.concatenate([BYTES.encode(d) for d in documents]), BYTES)


def brute(held_out: list[bytes], training: list[bytes], length: int) -> list[bool]:
    """Return which bytes lie in a string that a training document holds."""
    covered = []
    for document in held_out:
        places = range(len(document) - length + 1)
        held = [any(document[i : i + length] in other for other in training) for i in places]
        covered += [any(held[max(0, i - length + 1) : i + 1]) for i in range(len(document))]
    return covered


@pytest.mark.parametrize("length", [4, 12])
def test_matches_equal_those_of_a_search_by_brute_force(length):
    rng = np.random.default_rng(length)
    words = [bytes(rng.integers(97, 103, size=n)) for n in (3, 5, 8, 13) for _ in range(4)]

    def documents(count: int) -> list[bytes]:
        return [b" ".join(words[i] for i in rng.integers(0, len(words), 12)) for _ in range(count)]

    held_out, training = [*documents(6), b"ab", b"x"], documents(9)
    matches = StringMatches(text(*held_out), length)
    for i in range(0, 9, 3):
        matches.search(text(*training[i : i + 3]))
    covered = brute(held_out, training, length)
    assert matches.covered().tolist() == covered and any(covered) and not all(covered)


def test_a_string_across_two_documents_does_not_match():
    half, other = b"the first half of it ", b"and the second half."
    matches = StringMatches(text(half + other), len(half) + 4)
    matches.search(text(half, other))
    assert not matches.covered().any()
    matches.search(text(half + other))
    assert matches.covered().all()


def test_extreme_bytes_and_texts_shorter_than_a_string():
    zeros = StringMatches(text(bytes(30), bytes([255] * 30)), 12)
    zeros.search(text(bytes(12)))
    assert zeros.covered().tolist() == [True] * 30 + [False] * 30
    short = StringMatches(text(b"abc"), 12)
    short.search(text(b"abcdefghijklmnop"))
    assert not short.covered().any()
