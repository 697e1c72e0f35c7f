"""Which source had each byte that came: shares add up, and a source that must have had it is named."""

import numpy as np
import pytest

from spider.data.shards import Shards
from spider.evaluation.proposed import by_source, byte_by_byte
from spider.tokens import BYTES


def test_shares_sum_to_one_and_costs_to_the_whole(shards, proposer):
    tokens = Shards(shards, "validation").read(0, Shards(shards, "validation").tokens)
    bits = np.random.default_rng(0).random(int(BYTES.bytes_of[tokens[1:]].sum()))
    rows = by_source(proposer, tokens, bits)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.share * (row.bpb or 0) for row in rows) == pytest.approx(bits.mean())


def test_each_source_is_named_for_what_it_alone_knows(shards, proposer):
    counted = BYTES.raw(Shards(shards, "memory").read(1, 60))  # the beginning of a document in the memory
    # Bytes that no document has, the second time known from the first.
    strange = bytes(range(1, 9)) * 2 + b"!"
    tokens = np.concatenate([BYTES.encode(counted), BYTES.encode(strange)])
    document, match, counts, nobody = (
        by_source(proposer, part, np.ones(int(BYTES.bytes_of[part[1:]].sum())))
        for part in (BYTES.encode(strange), tokens[:61], tokens[:8], BYTES.encode(strange[:8]))
    )
    assert document[0].share == pytest.approx(6 / 17)  # all after the first two of the second time
    assert match[1].share > 0.1 and match[3].share < 0.2
    assert counts[2].share > 0.5
    assert nobody[3].share == 1 and nobody[3].bpb == 1 and nobody[0].bpb is None


def test_bytes_are_shown_with_their_source_and_what_else_was_proposed(proposer):
    strange = "ab\n\x01ab\né".encode()
    tokens, bits = BYTES.encode(strange), np.arange(len(strange), dtype=float)
    shown = byte_by_byte(proposer, tokens, bits)
    assert [one.bits for one in shown] == bits.tolist()
    assert [one.pieces[0].text for one in shown] == ["a", "b", "↵", "\\x01", "a", "b", "↵", "\\xc3", "\\xa9"]
    assert shown[6].source == 0 and shown[6].proposed[0] == "↵", "the document has had it"
    assert shown[3].source == 3 and "\\x01" not in shown[3].proposed
    rows = by_source(proposer, tokens, bits)
    for number, row in enumerate(rows):
        assert row.share == pytest.approx(np.mean([one.source == number for one in shown]))
