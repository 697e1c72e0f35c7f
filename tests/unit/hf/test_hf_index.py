"""A model that reads an n-gram index reads it in transformers too."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spider
from spider.data.ngram.store import open_index
from spider.evaluation.generate import generate
from tests.unit.hf.small_exports import exported
from tests.unit.model.small_gpt import build_gpt
from tests.unit.ngram.small_index import CONFIG

PROMPT = "the cat sat on a mat and then "


@pytest.fixture(scope="module")
def folder(indexes, tmp_path_factory):
    model = build_gpt(ngram=CONFIG.model_dump(mode="json"))
    digest = open_index(indexes["full"]).description.digest
    out = tmp_path_factory.mktemp("exported") / "out"
    return exported(model, out, window=48, index=indexes["full"], full_index=digest)


def test_logits_and_texts_are_the_same_as_in_spider(folder, tmp_path):
    original, _ = spider.load_model(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer([PROMPT, "and"], padding=True, return_tensors="pt")
    ids = batch.input_ids[:1]
    candidates = torch.from_numpy(original.lookup.after(ids[0].numpy(), 0, ids.shape[1]))[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, original(ids, candidates_BTW=candidates).logits)
        assert torch.equal(model(**batch).logits[0], logits[0])
        assert not torch.equal(logits, original(ids, candidates_BTW=torch.zeros_like(candidates)).logits)
    made = model.generate(**batch, max_new_tokens=12, do_sample=False)
    for row, prompt in zip(made[:, ids.shape[1] :].tolist(), [PROMPT, "and"], strict=True):
        written = list(
            generate(original, prompt, max_bytes=12, temperature=0, seed=0, context=model.config.window)
        )
        assert row[: len(written)] == written
    for _ in range(2):
        model.save_pretrained(tmp_path / "saved")
        tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, logits)
