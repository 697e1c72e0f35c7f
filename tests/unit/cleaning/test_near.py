"""Copies of a document are proposed and verified; pages of a template and documents that differ in figures are not."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from spider.cleaning.lines import MANY, Counts, lines, without
from spider.cleaning.minhash import FIRST, LEAST, MOST, bands, candidates
from spider.cleaning.verify import containment, own_words
from spider.cleaning.words import words

NO_LINES = np.empty(0, np.uint64)


def array(texts):
    return pa.array(texts, pa.large_string())


class Writer:
    """Random documents of made-up words in lines of eight."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def words(self, count):
        return ["".join(self.random.choices("abcdefghijkl", k=self.random.randint(2, 7))) for _ in range(count)]

    def edited(self, old, count):
        new = list(old)
        for place in self.random.sample(range(len(old)), count):
            new[place] = self.words(1)[0] + "."
        return new


def text(found):
    return "\n".join(" ".join(found[i : i + 8]) for i in range(0, len(found), 8))


def contained(document, other, templates=NO_LINES):
    pair = np.array([[0, 0]])
    return float(containment(own_words(array([document]), templates), own_words(array([other]), templates), pair)[0])


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


def test_punctuation_and_numbers_tell_documents_apart():
    code = "\n".join(f"x{i} = left + right * scale_{i} - offset" for i in range(20))
    assert contained(code, code.replace("\n", "\n\n    ")) == 1
    assert contained(code, code.replace("*", "/")) < 0.2
    page = "the station of the town reported a mean of {} degrees and {} hours of sun in the whole month of May, "
    page += "as in most of the years before, said the officer who reads all the instruments in the early morning"
    assert contained(page.format(17, 204), page.format(19, 188)) == 0.5
    assert contained(page.format(17, 204), page.format(17, 188)) > 0.8


def test_a_document_with_little_text_of_its_own_is_no_copy():
    writer = Writer(2)
    menu, page = writer.words(80), writer.words(LEAST)
    templates = np.unique(lines(words(array([text(menu)]), marks=True))[0])
    whole = text(menu) + "\n" + text(page)
    assert contained(whole, whole, templates) == 1
    short = text(menu) + "\n" + text(page[:-1])
    assert contained(short, short) == 1
    assert contained(short, short, templates) == 0
    assert contained(text(page[:-1]), text(page)) == 0


def test_a_line_of_a_template_occurs_in_many_documents_that_are_no_copies():
    pages = [f"Home  About us\ntext {i}\nHome About us" for i in range(MANY)]
    found = words(array([*pages, "often\n" * MANY, *["copied"] * MANY]), marks=True)
    new = np.array([True] * (MANY + 2) + [False] * (MANY - 1))
    counts = Counts()
    for part in (slice(0, 5), slice(5, None)):
        counts.add(words(array([*pages, "often\n" * MANY, *["copied"] * MANY][part]), marks=True), new[part])
    templates = counts.templates(found)
    assert len(templates) == 1
    assert np.diff(without(found, templates).bounds_D).tolist() == [2] * MANY + [MANY] + [1] * MANY


def pairs_of(texts, begin=0):
    hashes = bands(own_words(array(texts), NO_LINES))
    later, earlier = candidates([hashes[:, b] for b in range(hashes.shape[1])], begin)
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


def test_only_documents_from_the_beginning_of_the_part_on_are_paired_with_earlier_ones():
    writer = Writer(4)
    same = [text(writer.edited(writer.words(0) or ["same"] * 40, 0))] * 3
    assert pairs_of([*same, "short", *same[:2]], begin=4) == [
        (4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2), (5, 4)
    ]  # fmt: skip


def test_many_pages_of_one_template_hide_no_original():
    writer = Writer(5)
    menu = writer.words(160)
    pages = [writer.words(40) for _ in range(2000)]
    copy = writer.edited(pages[1500], 1)
    found = pairs_of([text(menu + page) for page in [*pages, copy]])
    of_copy = [earlier for later, earlier in found if later == 2000]
    assert of_copy[0] == 1500
    assert len(of_copy) <= MOST
    assert len(found) <= MOST * 2001
    assert max(earlier for later, earlier in found) > FIRST


def test_the_pairs_of_a_part_are_the_same_with_or_without_later_documents():
    writer = Writer(6)
    base = [writer.words(60) for _ in range(30)]
    texts = [text(writer.edited(writer.random.choice(base), 2)) for _ in range(300)]
    found = pairs_of(texts)
    assert [pair for pair in found if pair[0] >= 200] == pairs_of(texts, begin=200)
    few = pairs_of(texts[:200])
    assert {pair[0] for pair in few} <= {pair[0] for pair in found}
