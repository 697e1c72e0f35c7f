"""Each byte is attributed to the source that predicted it, and shares add up."""

import numpy as np
import pytest

from spider.data.shards import Shards
from spider.evaluation.inside import by_source
from spider.evaluation.result import BITS
from spider.tokens import BYTES


def test_shares_sum_to_one_and_costs_to_the_whole(shards, lookup):
    tokens = Shards(shards, "validation").read(0, Shards(shards, "validation").tokens)
    bits = np.random.default_rng(0).random(int(BYTES.bytes_of[tokens[1:]].sum()))
    rows = by_source(lookup, tokens, bits)
    assert sum(row.value for row in rows) == pytest.approx(1)
    assert sum(row.value * (row.columns[BITS].value or 0) for row in rows) == pytest.approx(bits.mean())


def test_bytes_that_only_one_source_predicts_are_attributed_to_it(shards, lookup):
    counted = BYTES.raw(Shards(shards, "ngram").read(1, 60))  # the beginning of a document in the index
    # Bytes that are in no other document; the second time they follow from the first.
    strange = bytes(range(1, 9)) * 2 + b"!"
    tokens = np.concatenate([BYTES.encode(counted), BYTES.encode(strange)])
    document, match, counts, unseen = (
        by_source(lookup, part, np.ones(int(BYTES.bytes_of[part[1:]].sum())))
        for part in (BYTES.encode(strange), tokens[:61], tokens[:8], BYTES.encode(strange[:8]))
    )
    assert document[0].value == pytest.approx(6 / 17)  # all but the first two bytes of the repetition
    assert match[1].value > 0.1 and match[3].value < 0.2
    assert counts[2].value > 0.5
    assert unseen[3].value == 1 and unseen[3].columns[BITS].value == 1
    assert unseen[0].columns[BITS].value is None
