"""Compare the scores that lm-evaluation-harness computes from an export with ours."""

import numpy as np
import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from spider.evaluation.generate import generate, stream_text
from spider.evaluation.tasks import score_rows, text_row
from spider.model.reading import Scoring
from tests.unit.hf.small_exports import exported, models

#: Ids of a window, which hold every text below.
WINDOW = 64


@pytest.mark.parametrize("name", ["spider", "bpe"])
def test_the_likelihoods_and_texts_of_an_export_are_those_of_its_model(name, tmp_path):
    model = models()[name]
    model.window = WINDOW
    folder = exported(model, tmp_path / name, window=WINDOW)
    options = {"dtype": "float32", "device": "cpu", "batch_size": 2, "trust_remote_code": True}
    harness = HFLM(pretrained=str(folder), **options)
    pairs = [("the value of the", text) for text in (" list", " the cat", " naïve function")]
    found = harness.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    rows = [text_row(model, context.encode(), text.encode(), WINDOW) for context, text in pairs]
    ours = score_rows(model, rows, Scoring(seq_len=WINDOW, batch=2))
    np.testing.assert_allclose([nats for nats, _ in found], -ours.nats_R, atol=1e-3)
    assert [greedy for _, greedy in found] == ours.greedy_R.tolist() and not ours.truncated

    asked = Instance("generate_until", {}, ("the value", {"until": ["\n"], "max_gen_toks": 12}), 0)
    (text,) = harness.generate_until([asked])
    ids_N = model.tokens.encode(b"the value")[:-1]
    written = generate(model, ids_N, max_bytes=100, max_ids=12, temperature=0.0, seed=0, context=WINDOW)
    assert text == "".join(stream_text(written, model.tokens)).partition("\n")[0]
