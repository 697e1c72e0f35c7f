"""The split: a property of each document, stable for ever, met in expectation."""

from __future__ import annotations

import pytest

from spider.data.documents import hash_keys, split_masks

KEYS = [f"document-{i}".encode() for i in range(20_000)]
HASHES = hash_keys(KEYS)


def test_known_keys_never_change_their_split():
    """A change of hash would move documents between the splits of a data set that was encoded before."""
    masks = split_masks(HASHES[:1000], 0.005, 0.005)
    assert masks["validation"].nonzero()[0].tolist() == [304, 378, 400, 422, 436, 449, 655, 832, 892]
    assert masks["ngram"].nonzero()[0].tolist() == [131, 153, 375, 444, 958]


@pytest.mark.parametrize("share", [0, 0.005, 0.1, 0.45])
def test_shares_are_met_and_a_larger_share_holds_every_document_of_a_smaller(share):
    masks = split_masks(HASHES, share, 0.4)
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()
    for split, wanted in (("validation", share), ("ngram", 0.4)):
        assert abs(masks[split].mean() - wanted) <= 5 * (wanted * (1 - wanted) / len(KEYS)) ** 0.5
    larger = split_masks(HASHES, share + 0.1, 0.4)["validation"]
    assert not (masks["validation"] & ~larger).any()
    more = split_masks(HASHES, share, 0.45)
    assert (more["validation"] == masks["validation"]).all() and not (masks["ngram"] & ~more["ngram"]).any()
    assert not split_masks(HASHES, share)["ngram"].any()
