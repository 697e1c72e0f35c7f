"""Which source had each byte that came: shares add up, and a source that must have had it is named."""

import numpy as np
import pytest

from spider.data.shards import Shards
from spider.evaluation.proposed import by_source
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
