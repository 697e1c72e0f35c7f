"""The split: a property of each document, stable for ever, met in expectation."""

from __future__ import annotations

import pytest

from spider.data.split import hash_keys, split_masks, validation_mask
from tests.unit.small_datasets import document_key, is_validation

KEYS = [f"document-{i}".encode() for i in range(20_000)]
HASHES = hash_keys(KEYS)


def test_known_keys_never_change_their_split():
    """A change of hash would move documents between the splits of a data set that was encoded before."""
    assert [i for i in range(1000) if is_validation(f"document-{i}".encode(), 0.005)] == [
        304,
        378,
        400,
        422,
        436,
        449,
        655,
        832,
        892,
    ]


def test_mask_agrees_with_the_single_decision():
    mask = validation_mask(HASHES[:2000], 0.1)
    assert mask.tolist() == [is_validation(key, 0.1) for key in KEYS[:2000]]


@pytest.mark.parametrize("share", [0.005, 0.1, 0.5])
def test_share_is_met_in_expectation(share):
    taken = validation_mask(HASHES, share).mean()
    assert abs(taken - share) < 5 * (share * (1 - share) / len(KEYS)) ** 0.5


def test_larger_share_holds_every_document_of_a_smaller():
    small, large = validation_mask(HASHES, 0.02), validation_mask(HASHES, 0.2)
    assert not (small & ~large).any()


def test_share_zero_holds_nothing_out():
    assert not validation_mask(HASHES, 0.0).any()
    assert not is_validation(KEYS[0], 0.0)


def test_every_document_is_in_one_split_and_held_out_ones_do_not_depend_on_the_index():
    masks = split_masks(HASHES, 0.1, 0.6)
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()
    assert (masks["validation"] == validation_mask(HASHES, 0.1)).all()
    assert abs(masks["ngram"].mean() - 0.6) < 5 * (0.6 * 0.4 / len(KEYS)) ** 0.5
    larger = split_masks(HASHES, 0.1, 0.8)
    assert not (masks["ngram"] & ~larger["ngram"]).any() and not (larger["train"] & ~masks["train"]).any()


def test_without_an_index_all_other_documents_are_training_documents():
    masks = split_masks(HASHES, 0.1)
    assert (masks["train"] == ~validation_mask(HASHES, 0.1)).all() and not masks["ngram"].any()


def test_known_keys_never_move_into_or_out_of_the_index():
    masks = split_masks(HASHES[:1000], 0.005, 0.005)
    assert masks["ngram"].nonzero()[0].tolist() == [131, 153, 375, 444, 958]


def test_key_is_the_id_or_else_the_text():
    assert document_key("a", "text") == b"a"
    assert document_key(12, "text") == b"12"
    assert document_key(None, "té") == "té".encode()
    assert document_key("", b"t\xff") == b"t\xff"
