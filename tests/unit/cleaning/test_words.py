"""The compiled loops find the words, hashes and sequences that plain Python finds."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from spider.data.cleaning.words import sequences, text_hashes, words

TEXTS = st.lists(st.text(st.sampled_from("aB1 \n\t.-é\u0301\xa0ß世’"), max_size=40), max_size=8)


def array(texts):
    return pa.array(texts, pa.large_string())


def exact(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


@given(TEXTS)
def test_hashes_are_equal_exactly_where_the_exact_forms_are(texts):
    found = [tuple(pair) for pair in text_hashes(array(texts)).tolist()]
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            assert (found[i] == found[j]) == (exact(text) == exact(other))


def plain_words(text):
    text = unicodedata.normalize("NFC", re.sub("[\xa0’]", " ", text.lower()))
    return re.findall(rb"[a-z0-9\x80-\xff]+", text.encode())


@given(TEXTS, st.integers(1, 4))
def test_words_and_sequences_are_those_of_plain_python(texts, length):
    found = words(array(texts))
    expected = [plain_words(text) for text in texts]
    assert np.diff(found.bounds_D).tolist() == [len(one) for one in expected]
    named = [word for one in expected for word in one]
    pairs = zip(found.begin_W, named, strict=True)
    assert [bytes(found.data[begin : begin + len(w)]).lower() for begin, w in pairs] == named
    assert len(set(zip(found.hash_W.tolist(), named, strict=True))) == len(set(named))
    assert len(set(found.hash_W.tolist())) == len(set(named))
    hashes, firsts = sequences(found, length)
    pieces = [tuple(one[i : i + length]) for one in expected for i in range(len(one) - length + 1)]
    assert (
        len(set(zip(hashes.tolist(), pieces, strict=True))) == len(set(pieces)) == len(set(hashes.tolist()))
    )
    assert [named[first] for first in firsts.tolist()] == [piece[0] for piece in pieces]


def test_a_slice_of_an_array_has_the_hashes_of_its_documents():
    whole = array(["one", "two é", "three words here"])
    assert (text_hashes(whole[1:]) == text_hashes(whole)[1:]).all()
    assert len(words(whole[2:]).hash_W) == 3
