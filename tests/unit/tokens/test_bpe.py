"""Byte pairs: any bytes come back as they were, no text makes a special id, only what was learned merges."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.tokens import BYTES
from spider.tokens.bpe import BpeTokens

FIRST = BYTES.size
TH, THE, NEWLINES = FIRST, FIRST + 1, FIRST + 2
TOKENS = BpeTokens([(ord("t"), ord("h")), (TH, ord("e")), (10, 10)])


def test_pairs_are_merged_in_the_order_in_which_they_were_learned():
    assert TOKENS.encode("the thin").tolist() == [
        *(BYTES.bos, THE, ord(" "), TH, ord("i"), ord("n"), BYTES.eos)
    ]
    assert TOKENS.bytes_of[[TH, THE, NEWLINES]].tolist() == [2, 3, 2]
    assert TOKENS.size == FIRST + 3 and TOKENS.encode("the").dtype == np.uint16


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_any_bytes_come_back_and_their_lengths_add_up(raw):
    ids = TOKENS.encode(raw)
    assert TOKENS.raw(ids) == raw
    assert int(TOKENS.bytes_of[ids].sum()) == len(raw)
    assert not set(ids[1:-1].tolist()) & set(TOKENS.specials.values())


@given(st.binary(max_size=100))
def test_without_merges_it_is_the_alphabet_of_bytes(raw):
    none = BpeTokens([])
    assert none.encode(raw).tolist() == BYTES.encode(raw).tolist() and none.size == BYTES.size


@pytest.mark.parametrize(
    "text",
    ["<|bos|> <BOS> <|endoftext|>", "\0", "▁ \u2581", "a\r\n\tb\r", "👩‍👩‍👧", " " * 1_000_000, "\n" * 300_001,
     "a" * 1_000_000, "1" * 99_999],
)  # fmt: skip
def test_odd_texts_come_back(text):
    ids = TOKENS.encode(text)
    assert TOKENS.decode(ids) == text
    assert ids.min() >= 0 and (ids[1:-1] != BYTES.bos).all()


def test_bytes_that_are_no_utf8_are_their_own_ids_and_do_not_part_what_is():
    assert TOKENS.encode(b"the\xff\xfethe")[1:-1].tolist() == [THE, 0xFF, 0xFE, THE]
    assert TOKENS.encode("語".encode()[:2])[1:-1].tolist() == list("語".encode()[:2])


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([(FIRST, 97)], "merge 0, of 272 and 97: not two ids of text that come before it"),
        ([(97, BYTES.bos)], "merge 0, of 97 and 257: not two ids of text that come before it"),
        ([(97, -1)], "not two ids of text"),
        ([(97, 98), (97, 98)], "merge 1, of 97 and 98: its bytes are b'ab', which have an id already"),
        ([(97, 97), *((i, i) for i in range(FIRST, FIRST + 8))], "more than 255 bytes"),
    ],
)
def test_what_cannot_be_merged_is_refused(merges, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BpeTokens(merges)


def test_ids_fit_into_a_shard():
    pairs = [(i, j) for i in range(255) for j in range(256)][: 1 << 16]
    with pytest.raises(ValueError, match="shards hold 65,536"):
        BpeTokens(pairs)


def test_nothing_is_imported_before_something_is_encoded():
    code = (
        "import sys; from spider.tokens.bpe import BpeTokens; BpeTokens([(97, 98)]).decode([272]);"
        "assert not {'tiktoken', 'tokenizers', 'torch'} & set(sys.modules)"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)
