"""Test that a stream read piece by piece has the logits of one pass, for every prefix."""

from __future__ import annotations

import pytest
import small_gpt
import torch
from small import SWITCHES, pieces
from small_gpt import build_gpt, text

from spider.model.spider.model import Incremental
from spider.tokens import BYTES


def whole(model, ids: list[int], context: int, n_loops: int | None = None) -> torch.Tensor:
    """Return the logits of the ids from one forward pass over a window of ``context`` bytes."""
    window = torch.tensor([ids + [BYTES.pad] * (context - len(ids))])
    with torch.no_grad():
        return model(window, n_loops=n_loops).logits[0, : len(ids)]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("sizes", [[1], [7, 1, 1, 12]])
def test_every_prefix_has_the_logits_of_a_whole_forward_pass(make, tokens, switch, sizes):
    model = make(**SWITCHES[switch]).double().eval()
    n_loops = 5 if switch == "everything" else None  # not the trained ones
    for ids in tokens.tolist():
        stream = Incremental(model, context=48, n_loops=n_loops)
        got = torch.cat([stream.extend(piece) for piece in pieces(ids, sizes)])
        torch.testing.assert_close(got, whole(model, ids, 48, n_loops), rtol=1e-9, atol=1e-9)


def test_a_context_may_be_filled_but_not_exceeded(make, tokens):
    model = make().eval()
    stream = Incremental(model, context=10)
    stream.extend(tokens[0, :10].tolist())
    with pytest.raises(ValueError, match="cannot read 1 ids after 10 with a context of 10"):
        stream.extend([65])
    with pytest.raises(ValueError, match="cannot read 0 ids"):
        stream.extend([])


@pytest.mark.parametrize("switch", SWITCHES)
def test_streams_that_are_read_at_once_have_the_logits_of_each_alone(make, tokens, switch):
    """They close patches at different bytes. After the first piece some go on, one of them twice."""
    model = make(**SWITCHES[switch]).double().eval()
    rows, sizes = [1, 0, 1], [1, 4, *[1] * 26]
    together = Incremental(model, context=48)
    together.select([0, 0])
    first = together.extend_all(tokens[:, :9])
    together.select(rows)
    next_RT = tokens[[0, 1, 1], 9:]
    got = torch.cat([together.extend_all(ids) for ids in next_RT.split(sizes, 1)], dim=1)
    for row, ids, logits in zip(rows, next_RT.tolist(), got, strict=True):
        alone = Incremental(model, context=48)
        expected = [alone.extend(piece) for piece in (tokens[row, :9].tolist(), *pieces(ids, sizes))]
        torch.testing.assert_close(first[row], expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits, torch.cat(expected[1:]), rtol=1e-9, atol=1e-9)
    if switch == "everything":
        assert len(set(together.patches.filled_R)) > 1


def test_only_latents_and_one_rotated_key_are_kept_and_the_core_runs_only_where_a_patch_closes(make):
    model = make(boundary={"kind": "whitespace"}).eval()
    calls = []
    model.core.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    stream = Incremental(model, context=16)
    stream.select([0, 0])
    for pair in zip(b"abc efg ijk ", b"a c efghijk ", strict=True):
        stream.extend_all(torch.tensor(pair)[:, None])
    assert calls == [2, 1, 2, 1, 2]  # the null patches, and bytes 3, 7 and 11, of the other 1, 3 and 11
    attention = model.config.attention
    for cache in (stream.blocks[0], stream.core[1][0]):
        assert cache._buffer.shape[-1] == attention.kv_lora_rank + attention.rope_dim
    assert (stream.bytes.filled_R, stream.patches.filled_R) == ([12, 12], [4, 4])


# ------------------------------------------------------------------------------------------------- the GPT

NGRAM = {"contexts": [1, 2], "matches": [2], "hidden": 8, "state": 8}


@pytest.mark.parametrize("switch", small_gpt.SWITCHES)
@pytest.mark.parametrize("sizes", [[1], [7, 1, 1, 12]])
def test_every_cut_has_the_logits_of_a_whole_pass(switch, sizes):
    """The stream is eight times as long as the short window."""
    model, x = build_gpt(**small_gpt.SWITCHES[switch]).double().eval(), text(1, 40)
    n_loops = 5 if switch == "looped_skips" else None  # not the trained ones
    stream = model.incremental(48, n_loops)
    got = torch.cat([stream.extend(piece) for piece in pieces(x[0].tolist(), sizes)])
    with torch.no_grad():
        torch.testing.assert_close(got, model(x, n_loops=n_loops).logits[0], rtol=1e-9, atol=1e-9)


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
