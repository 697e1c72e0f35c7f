"""Copies of a document are proposed and verified, and pages of a template are not."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from spider.data.cleaning.buckets import shared
from spider.data.cleaning.pairs import WHOLE, containment
from spider.data.cleaning.signatures import LEAST, MOST, bands, candidates
from spider.data.cleaning.words import MANY, Counts, lines, without, words

NO_LINES = np.empty(0, np.uint64)


class Writer:
    """Random documents of made-up words in lines of eight."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def words(self, count):
        return [
            "".join(self.random.choices("abcdefghijkl", k=self.random.randint(2, 7))) for _ in range(count)
        ]

    def edited(self, old, count):
        new = list(old)
        for place in self.random.sample(range(len(old)), count):
            new[place] = self.words(1)[0] + "."
        return new


def text(found):
    return "\n".join(" ".join(found[i : i + 8]) for i in range(0, len(found), 8))


def read(texts):
    return words(pa.array(texts, pa.large_string()), marks=True)


def contained(document, other, templates=NO_LINES):
    return float(containment(read([document]), read([other]), np.array([[0, 0]]), templates)[0])


def plain_containment(document, other):
    a, b = document.split(), other.split()
    grams = [tuple(a[i : i + 5]) for i in range(len(a) - 4)]
    there = {tuple(b[i : i + 5]) for i in range(len(b) - 4)}
    return sum(gram in there for gram in grams) / len(grams)


@pytest.mark.parametrize("edits", [0, 1, 4, 15])
def test_the_containment_is_the_share_of_sequences_of_five_words(edits):
    writer = Writer(1)
    old = writer.words(150)
    new = writer.edited(old, edits)
    longer = writer.words(90) + old + writer.words(60)
    for other in (old, longer):
        assert contained(text(new), text(other)) == pytest.approx(plain_containment(text(new), text(other)))
    assert contained(text(longer), text(old)) < 0.6


def test_pages_of_a_template_are_compared_by_their_own_text():
    writer = Writer(2)
    menu, page, other = writer.words(160), writer.words(2 * LEAST), writer.words(2 * LEAST)
    templates = np.unique(lines(read([text(menu)]))[0])
    first, second = (text(menu) + "\n" + text(one) for one in (page, other))
    copy = text(menu) + "\n" + text(writer.edited(page, 1))
    assert contained(first, second) > 0.7
    assert contained(first, second, templates) == 0
    assert 0.8 < contained(copy, first, templates) < contained(copy, first)


def test_a_document_with_little_text_of_its_own_is_compared_whole_and_more_strictly():
    writer = Writer(2)
    menu, title = writer.words(160), writer.words(LEAST - 1)
    templates = np.unique(lines(read([text(menu)]))[0])
    first, second = (text(menu + one) for one in (title, writer.words(LEAST - 1)))
    assert contained(first, second) > 0.8
    assert contained(first, second, templates) == 0
    copy = text(menu + writer.edited(title, 1))
    assert contained(copy, first, templates) == contained(copy, first) > WHOLE
    assert contained(text(title), text(title)) == 0


def test_a_line_of_a_template_occurs_in_many_documents_that_are_no_copies():
    pages = [f"Home  About us\ntext {i}\nHome About us" for i in range(MANY)]
    texts = [*pages, "often\n" * MANY, *["copied"] * MANY]
    new = np.array([True] * (MANY + 2) + [False] * (MANY - 1))
    counts = Counts()
    for part in (slice(0, 5), slice(5, None)):
        counts.add(read(texts[part]), new[part])
    templates = counts.templates(read(texts))
    assert len(templates) == 1
    assert np.diff(without(read(texts), templates).bounds_D).tolist() == [2] * MANY + [MANY] + [1] * MANY


def pairs_of(texts, begin=0, templates=NO_LINES):
    hashes = bands(read(texts), templates)
    bounds = np.array([begin, len(texts)])
    answers = [shared(hashes[:, :, b], bounds, b) for b in range(hashes.shape[2])]
    later, earlier = candidates(answers, begin, len(texts))
    return list(zip(later.tolist(), earlier.tolist(), strict=True))


def test_copies_are_candidates_whole_or_as_a_part_of_a_document_of_twice_the_length():
    writer = Writer(3)
    old = [writer.words(writer.random.choice([50, 100, 300])) for _ in range(400)]
    copies = [writer.edited(one, len(one) // 100) for one in old[:200]]
    parts = [one[len(one) // 4 : -len(one) // 4] for one in old[200:]]
    found = pairs_of([text(one) for one in [*old, *copies, *parts]])
    copied = {(400 + i, i) for i in range(200)}
    assert copied <= set(found)
    assert len({(600 + i, 200 + i) for i in range(200)} & set(found)) >= 196
    assert len(found) < 420


def test_many_pages_of_one_template_hide_no_original():
    writer = Writer(5)
    menu = writer.words(160)
    pages = [writer.words(40) for _ in range(2000)]
    copy = writer.edited(pages[1500], 1)
    texts = [text(menu + page) for page in [*pages, copy]]
    found = pairs_of(texts)
    assert (2000, 1500) in found
    assert len(found) <= MOST * 2001
    templates = np.unique(lines(read([text(menu)]))[0])
    assert (2000, 1500) in pairs_of(texts, templates=templates)
