"""A model reads a text in the same way in any batch, and no batch has more logits than its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spider.evaluation import bpb
from spider.evaluation.tasks import score_rows, text_row
from spider.model.reading import Scoring
from spider.tokens import BYTES
from tests.unit.evaluation.toys import Bigram
from tests.unit.model import small, small_gpt
from tests.unit.ngram.small_index import *  # noqa: F403 (fixtures)
from tests.unit.ngram.small_index import SETTINGS

WINDOW = 96
#: The first texts have more words than a window as short as they are may have patches.
TEXTS = [
    (b"a b c d e f g", b" h i"),
    (b"a b c d e f g", b" a"),
    (b"The sea is", b" blue, and so on"),
    (b" One two three." * 5, b" Four five"),
    (b"x" * 40 + b" y z", b" w"),
]


FAMILIES = {f"spider {name}": small.SWITCHES[name] for name in ("everything", "overflow", "no_patches")}
FAMILIES |= {"spider with an index": {"ngram": SETTINGS}, "gpt golf": small_gpt.SWITCHES["golf"]}


def built(family, lookup):
    model = (small_gpt.build_gpt if family.startswith("gpt") else small.build)(**FAMILIES[family])
    model.lookup = lookup if "ngram" in FAMILIES[family] else None
    return model.double()


def nats(model, texts, batch):
    rows = [text_row(model, *pair, WINDOW) for pair in texts]
    return score_rows(model, rows, Scoring(WINDOW, batch=batch)).nats_R


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_of_a_text_depends_neither_on_its_neighbours_nor_on_the_size_of_the_batch(family, lookup):
    model = built(family, lookup)
    alone = np.concatenate([nats(model, [pair], 1) for pair in TEXTS])
    for batch in (2, len(TEXTS)):
        np.testing.assert_allclose(nats(model, TEXTS, batch), alone, rtol=1e-9)
    beside = nats(model, [TEXTS[0], (b"Four five " * 9, b"six")], 2)
    np.testing.assert_allclose(beside[0], alone[0], rtol=1e-9)


@pytest.mark.parametrize("family", ["spider everything", "spider overflow"])
def test_a_short_text_is_cut_like_the_beginning_of_a_window(family, lookup):
    """So the score of a question is that of its text in the measurement of bits per byte."""
    model = built(family, lookup)
    for context, choice in TEXTS:
        ids_N = BYTES.encode(context + choice)[:-1]
        by_target_S = bpb.score(model, ids_N, Scoring(WINDOW)).by_target_S
        (found,) = nats(model, [(context, choice)], 1)
        assert found == pytest.approx(by_target_S[-len(choice) :].sum(), rel=1e-6)
    assert not model.window, "the model is as it was"


@pytest.mark.parametrize("family", ["spider everything", "spider no_patches"])
def test_a_model_with_a_window_reads_and_continues_short_texts_as_its_beginning(family, lookup):
    model = built(family, lookup).eval()
    ids = BYTES.encode(b"a b c d e f g h")[:-1].astype(np.int64)
    padded = np.pad(ids, (0, WINDOW - len(ids)), constant_values=BYTES.pad)
    with torch.no_grad():
        whole = model(torch.from_numpy(padded)[None]).logits[0, : len(ids)]
        model.window = WINDOW
        short = model(torch.from_numpy(ids)[None]).logits[0]
        stream = model.incremental(2 * len(ids))
        pieces = torch.cat([stream.extend(ids[:5].tolist()), stream.extend(ids[5:].tolist())])
    torch.testing.assert_close(short, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("most", "batches"), [(1, 5), (70, 4), (500, 1)])
def test_rows_share_a_batch_only_as_far_as_their_logits_fit(most, batches, monkeypatch):
    """Such a bound is a number of targets here. A single row is read however long it is."""
    model = Bigram()
    expected = nats(model, TEXTS, 16)
    model.seen.clear()
    monkeypatch.setattr(bpb, "_LOGITS", most * 4 * BYTES.size)
    np.testing.assert_allclose(nats(model, TEXTS, 16), expected, rtol=1e-6)
    assert sum(rows for rows, _ in model.seen) == len(TEXTS) and len(model.seen) == batches
    assert all(rows == 1 or rows * length <= most for rows, length in model.seen)
