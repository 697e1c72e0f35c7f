"""Compare bits per byte with the definition, for models whose nats are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spider.evaluation.bpb import bootstrap_interval, check_deviation, clip_stream, score, windows
from spider.model.reading import Scoring
from spider.tokens import BYTES, IGNORED
from tests.unit.evaluation.toys import Bigram, Pairs, Positional

PAD, BOS, EOS = BYTES.pad, BYTES.bos, BYTES.eos


def stream(*documents: str) -> np.ndarray:
    return np.concatenate([BYTES.encode(d) for d in documents])


TOKENS = stream("The quick brown fox", "jumps over", "", "the lazy dog, größer than before. " * 9)


@settings(max_examples=100)
@given(
    length=st.integers(2, 300),
    seq_len=st.integers(1, 64),
    overlap=st.floats(0, 0.99),
    batch=st.integers(1, 5),
)
def test_every_target_after_the_first_token_is_scored_exactly_once_in_order(length, seq_len, overlap, batch):
    tokens_N = (np.arange(length) % 250).astype(np.uint16)
    scored, context = [], int(seq_len * overlap)
    for number, (_, inputs_BT, labels_BT) in enumerate(windows(tokens_N, Scoring(seq_len, overlap, batch))):
        assert inputs_BT.shape == labels_BT.shape and inputs_BT.shape[1] == seq_len
        for row, (inputs_T, labels_T) in enumerate(zip(inputs_BT, labels_BT, strict=True)):
            at = np.flatnonzero(labels_T != IGNORED)
            assert len(at), "every window scores a target"
            assert at[0] == (0 if number == row == 0 else context)
            # Each label is the id after its input, and each input but padding is the real left context.
            for t in at:
                position = len(scored) + 1
                assert labels_T[t] == tokens_N[position]
                np.testing.assert_array_equal(inputs_T[: t + 1], tokens_N[position - 1 - t : position])
                scored.append(labels_T[t])
            assert set(inputs_T[at[-1] + 1 :]) <= {PAD}
    np.testing.assert_array_equal(scored, tokens_N[1:])


@pytest.mark.parametrize("seq_len,overlap,batch", [(1000, 0.5, 4), (16, 0.75, 1), (7, 0.5, 64)])
def test_bpb_follows_the_definition_for_any_windows(seq_len, overlap, batch):
    model = Bigram()
    result = score(model, TOKENS, Scoring(seq_len=seq_len, overlap=overlap, batch=batch))

    table = torch.log_softmax(model.table_VV.detach().double(), -1).numpy()
    nats = -table[TOKENS[:-1].astype(int), TOKENS[1:].astype(int)]
    is_byte = TOKENS[1:] < 256
    assert result.bpb == pytest.approx(nats[is_byte].sum() / math.log(2) / is_byte.sum(), rel=1e-6)
    assert result.bpb_strict == pytest.approx(nats.sum() / math.log(2) / is_byte.sum(), rel=1e-6)
    assert result.counts == {"byte": is_byte.sum(), "eos": 4, "bos": 3, "other": 0}
    assert result.bpb_strict > result.bpb and 0 < result.deviation < 1e-5


def test_probabilities_that_do_not_sum_to_one_are_refused():
    with pytest.raises(ValueError, match=r"sum to one only within 2\.0e-03"):
        check_deviation(2e-3, "the mixer")


def test_the_model_is_scored_in_evaluation_mode_and_its_mode_is_restored():
    model = Bigram().train()
    result = score(model, TOKENS, Scoring(seq_len=32, batch=2, n_loops=3))
    assert result.metrics == {"mode": 0.0, "loops": 3.0}
    assert model.training


def test_a_diverged_model_is_reported_with_the_position():
    model = Bigram()
    with torch.no_grad():
        model.table_VV[ord("q")] = float("nan")
    with pytest.raises(ValueError, match="token 6 of the stream is not finite"):
        score(model, TOKENS, Scoring(seq_len=8))


def test_clipping_counts_raw_bytes_not_ids():
    clipped = clip_stream(stream("ab", "cd", "ef"), 3)
    assert clipped.tolist() == [BOS, 97, 98, EOS, BOS, 99]
    assert clip_stream(stream("ab"), 100).tolist() == stream("ab").tolist()
    # The first byte of a stream that starts inside a document becomes a target.
    assert clip_stream(np.array([97, 98, EOS], np.uint16), 100).tolist() == [BOS, 97, 98, EOS]


def test_bits_per_byte_count_the_bytes_that_ids_stand_for_whatever_the_alphabet():
    model = Positional()
    model.tokens = Pairs()
    tokens_N = np.array([BOS, 272, 101, EOS, BOS, 272], np.uint16)  # "the", "th"
    result = score(model, tokens_N, Scoring(seq_len=8))
    assert result.counts == {"byte": 5, "eos": 1, "bos": 1, "other": 0}
    assert result.bpb == pytest.approx((10 + 11 + 10) / (math.log(2) * 5))  # each document begins anew
    crossing = score(model, tokens_N, Scoring(seq_len=8, carry_over=1))
    assert crossing.bpb == pytest.approx((10 + 11 + 14) / (math.log(2) * 5))
    assert clip_stream(tokens_N, 4, model.tokens).tolist() == tokens_N.tolist()
    assert clip_stream(tokens_N, 3, model.tokens).tolist() == [BOS, 272, 101]
    with pytest.raises(ValueError, match="token 1 of the stream is 300, outside the vocabulary of 273"):
        score(model, np.array([BOS, 300], np.uint16), Scoring(seq_len=8))


def test_each_document_is_read_alone_or_with_what_came_before():
    first, second = stream("something before"), stream("the same text twice")
    tokens_N = np.concatenate([first, second])
    reading = Scoring(seq_len=16, overlap=0.5, batch=2)
    alone = score(Positional(), tokens_N, reading).by_target_S
    np.testing.assert_allclose(alone[len(first) :], score(Positional(), second, reading).by_target_S)
    crossing = score(Positional(), tokens_N, replace(reading, carry_over=1)).by_target_S
    assert crossing[len(first)] > alone[len(first)]


def test_an_interval_is_that_of_resampled_documents():
    random = np.random.default_rng(1)
    bytes_D = random.integers(100, 16_000, size=92)
    bits_D = bytes_D * random.normal(1.2, 0.3, size=92)
    # The same in another way: counts of each document instead of its number.
    counts_RD = random.multinomial(92, np.full(92, 1 / 92), size=20_000)
    low, high = np.percentile(counts_RD @ bits_D / (counts_RD @ bytes_D), [2.5, 97.5])
    assert bootstrap_interval(bits_D, bytes_D) == pytest.approx((low, high), abs=0.1 * (high - low))
    assert bootstrap_interval(np.array([1.0, 8000.0]), np.array([100, 1000])) == (0.01, 8.0)
    assert bootstrap_interval(np.array([5.0]), np.array([3])) is None
