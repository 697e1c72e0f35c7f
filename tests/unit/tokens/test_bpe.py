"""BPE restores any bytes, encodes no text to a special token, and merges only learned pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens

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
def test_any_bytes_are_restored_and_their_lengths_add_up(raw):
    ids = TOKENS.encode(raw)
    assert TOKENS.raw(ids) == raw
    assert int(TOKENS.bytes_of[ids].sum()) == len(raw)
    assert not set(ids[1:-1].tolist()) & set(TOKENS.specials.values())


@pytest.mark.parametrize(
    "text",
    ["<|bos|> <BOS> <|endoftext|>", "\0", "▁ \u2581", "a\r\n\tb\r", "👩‍👩‍👧", " " * 100_000, "a" * 100_000],
)  # fmt: skip
def test_odd_texts_are_restored(text):
    ids = TOKENS.encode(text)
    assert TOKENS.decode(ids) == text
    assert ids.min() >= 0 and (ids[1:-1] != BYTES.bos).all()


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([(FIRST, 97)], "merge 0, of 272 and 97: both must be earlier tokens of text"),
        ([(97, BYTES.bos)], "merge 0, of 97 and 257: both must be earlier tokens of text"),
        ([(97, -1)], "both must be earlier tokens"),
        ([(97, 98), (97, 98)], "merge 1, of 97 and 98: another token has the same bytes, b'ab'"),
        ([(97, 97), *((i, i) for i in range(FIRST, FIRST + 8))], "more than 255 bytes"),
    ],
)
def test_impossible_merges_are_errors(merges, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BpeTokens(merges)


def test_more_tokens_than_a_shard_holds_are_an_error():
    pairs = [(i, j) for i in range(255) for j in range(256)][: 1 << 16]
    with pytest.raises(ValueError, match="shards hold at most 65,536"):
        BpeTokens(pairs)
