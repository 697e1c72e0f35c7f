"""Test that a GPT's logits of a stream do not depend on the pieces in which it is read."""

from __future__ import annotations

import pytest
import torch
from small import pieces
from small_gpt import SWITCHES, build_gpt, text

from spider.model.gpt.model import Incremental

NGRAM = {"contexts": [1, 2], "matches": [2], "hidden": 8, "state": 8}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("sizes", [[1], [7, 1, 1, 12]])
def test_every_cut_has_the_logits_of_a_whole_pass(switch, sizes):
    """The stream is eight times as long as the short window."""
    model, x = build_gpt(**SWITCHES[switch]).double().eval(), text(1, 40)
    stream = model.incremental(48)
    assert isinstance(stream, Incremental)
    got = torch.cat([stream.extend(piece) for piece in pieces(x[0].tolist(), sizes)])
    with torch.no_grad():
        torch.testing.assert_close(got, model(x).logits[0], rtol=1e-9, atol=1e-9)


def test_loops_of_a_stream_may_differ_from_the_trained_ones():
    model, x = build_gpt(**SWITCHES["looped_skips"]).double().eval(), text(1, 20)
    for n_loops in (1, 2, 5):
        stream = model.incremental(20, n_loops)
        got = torch.cat([stream.extend(piece) for piece in pieces(x[0].tolist(), [3, 1])])
        with torch.no_grad():
            whole = model(x, n_loops=n_loops).logits[0]
        torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-9)
        assert len(stream.caches) == 2 + 2 * n_loops


def test_short_layers_keep_what_they_show_and_others_the_context():
    stream = build_gpt().eval().incremental(40)
    for i in range(40):
        stream.extend([i])
    assert [cache._buffer.shape[3] for cache in stream.caches] == [11, 11, 11, 40]
    with pytest.raises(ValueError, match="cannot read 1 ids after 40 with a context of 40"):
        stream.extend([0])


def test_a_streams_proposals_are_read_with_their_ids():
    model, x = build_gpt(ngram=NGRAM).eval(), text(1, 12)
    known = torch.randint(0, 9, (1, 12, model.ngram.layout.width), dtype=torch.uint8)
    stream = model.incremental(12)
    got = torch.cat([stream.extend(x[0, a:b].tolist(), known[0, a:b]) for a, b in ((0, 5), (5, 6), (6, 12))])
    with torch.no_grad():
        whole = model(x, candidates_BTW=known).logits[0]
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)
