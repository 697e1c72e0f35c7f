"""An exported folder in transformers gives the same logits and texts as in Spider."""

from __future__ import annotations

import copy
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spider.common import files
from spider.common.errors import CheckpointError
from spider.evaluation.generate import generate
from spider.hf.modeling import SpiderForCausalLM
from spider.model.interface import model_tensors
from spider.tokens import BYTES, IGNORED
from spider.tokens.turns import TURN
from tests.unit.hf.small_exports import BPE, WINDOW, exported, ids

FAMILIES = ["spider", "gpt", "golf", "bpe"]
PROMPTS = ["the cat", "of th", ""]


@pytest.fixture(scope="module")
def loaded(exports):
    return {name: AutoModelForCausalLM.from_pretrained(folder) for name, (_, folder) in exports.items()}


def written(ours, prompt, count, **how):
    how = {"context": WINDOW} | how
    return list(generate(ours, prompt, max_bytes=count, temperature=0, seed=0, **how))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_parameters_are_the_same_to_the_bit(exports, name, caplog):
    ours, folder = exports[name]
    with caplog.at_level(logging.WARNING):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is SpiderForCausalLM and not model.training and not caplog.records
    assert not any(info.values())
    for x in (ids(2, 40), torch.tensor([[*b"a b c d e f"]])):
        with torch.no_grad():
            assert torch.equal(model(x).logits, ours(x).logits)
            assert torch.equal(model(x, n_loops=1).logits, ours(x, n_loops=1).logits)
    assert model_tensors(model.model).keys() == model_tensors(ours).keys()
    assert model.model.parameter_groups() == ours.parameter_groups()
    assert model.model.tokens.digest == ours.tokens.digest


@pytest.mark.parametrize("name", ["spider", "bpe"])
def test_the_loss_is_of_the_shifted_labels(exports, loaded, name):
    ours, model, x = exports[name][0], loaded[name], ids(3, 20)
    labels = x.clone()
    labels[0, :5] = IGNORED
    after = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORED)], 1)
    output = model(x, labels=labels)
    assert torch.equal(output.loss, ours(x, after).metrics["cross_entropy"])
    assert torch.equal(output.logits, ours(x).logits)
    assert model(x, labels=labels, return_dict=False)[0] == output.loss
    torch.manual_seed(1)
    trained = copy.deepcopy(ours).train()(x, after).loss
    model.train()
    try:
        torch.manual_seed(1)
        loss = model(x, labels=labels).loss
        assert torch.equal(loss, trained)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    finally:
        model.eval()
        model.zero_grad()


@pytest.mark.parametrize("name", ["spider", "golf"])
def test_padding_does_not_change_the_logits(exports, loaded, name):
    model, folder = loaded[name], exports[name][1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert batch.attention_mask[1, 0] == 0 and batch.input_ids[1, 0] == BYTES.pad
    logits = model(**batch).logits
    alone = [model(**tokenizer(prompt, return_tensors="pt"), labels=None) for prompt in PROMPTS]
    for row, one in zip(logits, alone, strict=True):
        assert torch.equal(row[-one.logits.shape[1] :], one.logits[0])
    behind = tokenizer(PROMPTS, padding=True, padding_side="right", return_tensors="pt")
    for row, one in zip(model(**behind).logits, alone, strict=True):
        torch.testing.assert_close(row[: one.logits.shape[1]], one.logits[0], rtol=1e-4, atol=1e-4)
    each = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    losses = [model(**one, labels=one.input_ids).loss * (one.input_ids.shape[1] - 1) for one in each[:2]]
    count = sum(one.input_ids.shape[1] - 1 for one in each)
    for padded in (batch, behind):
        loss = model(**padded, labels=padded.input_ids).loss
        torch.testing.assert_close(loss, sum(losses) / count, rtol=1e-4, atol=1e-5)
    model.train()
    model(**batch, labels=batch.input_ids).loss.backward()
    model.eval()
    model.zero_grad()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_the_same_beyond_the_window(exports, loaded, name):
    (ours, folder), model = exports[name], loaded[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    made = model.generate(**batch, max_new_tokens=30, do_sample=False)[:, batch.input_ids.shape[1] :]
    for prompt, row in zip(PROMPTS, made.tolist(), strict=True):
        expected = written(ours, prompt, 30)
        assert row[: len(expected)] == expected[:30]
        assert len(expected) > 10, "the model generates more than ten ids"
    again = model.generate(**batch, max_new_tokens=12, do_sample=False, use_cache=False)
    assert again[:, -12:].tolist() == made[:, :12].tolist()


def test_n_loops_is_an_option_of_loading_and_of_generating(exports, loaded):
    ours, folder = exports["golf"]
    x = torch.from_numpy(BYTES.encode("the")[None, :-1].astype("int64"))
    expected = written(ours, "the", 10, n_loops=1)
    once = AutoModelForCausalLM.from_pretrained(folder, n_loops=1)
    for model, options in ((loaded["golf"], {"n_loops": 1}), (once, {})):
        made = model.generate(x, max_new_tokens=10, do_sample=False, **options)
        assert made[0, 4:].tolist() == expected
    with pytest.raises(ValueError, match="n_loops: this model of family gpt has no loops"):
        loaded["gpt"](x, n_loops=3)


def test_beams_and_samples_are_the_same_without_the_cache(loaded):
    model, x = loaded["golf"], ids(2, 7)
    how = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert torch.equal(model.generate(x, **how), model.generate(x, use_cache=False, **how))
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(model.generate(x, max_new_tokens=30, do_sample=True, temperature=3.0, top_k=0))
    assert torch.equal(*drawn)
    special = set(BYTES.specials.values()) & set(drawn[0][:, 7:].flatten().tolist())
    assert special <= {BYTES.eos, BYTES.pad}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_context_takes_a_longer_prompt(exports, loaded, name):
    """The prompt fills the window twice, and the text the context; a new one then begins."""
    ours, x = exports[name][0], ids(1, 2 * WINDOW)
    expected = written(ours, x[0].numpy(), 40, context=50)
    for cached in (True, False):
        made = loaded[name].generate(x, max_new_tokens=30, do_sample=False, context=50, use_cache=cached)
        assert made[0, 2 * WINDOW :].tolist()[: len(expected)] == expected[:30] and len(expected) > 10


def test_a_prompt_longer_than_the_window_is_refused(loaded):
    x = ids(1, WINDOW + 1)
    for cached in (True, False):
        with pytest.raises(
            ValueError, match=r"the prompt is 25 ids and the model reads 24 at most: give only its"
        ):
            loaded["gpt"].generate(x, max_new_tokens=2, use_cache=cached)
    assert loaded["gpt"](x).logits.shape[1] == WINDOW + 1, "scoring has no such limit"


def test_a_model_of_conversations_ends_with_a_turn(exports, tmp_path):
    folder = exported(exports["gpt"][0], tmp_path / "chat", conversations="talks")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [BYTES.eos, TURN]
    assert TURN not in model.generation_config.suppress_tokens
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert made.generation_config.eos_token_id == [BYTES.eos, TURN]
    assert not any(p.is_meta for p in made.parameters())


# ------------------------------------------------------------------------------------ saving and loading


@pytest.mark.parametrize(("name", "size"), [("spider", "1GB"), ("bpe", "20KB")])
def test_a_saved_model_loads_again_whole_or_in_shards(exports, loaded, name, size, tmp_path):
    model, x, out = loaded[name], ids(1, 30), tmp_path / size
    model.save_pretrained(out, max_shard_size=size)
    AutoTokenizer.from_pretrained(exports[name][1]).save_pretrained(out)
    shards = sorted(out.glob("*.safetensors"))
    assert (len(shards) > 1) == (size == "20KB")
    named = {key: tensor for shard in shards for key, tensor in load_file(shard).items()}
    assert named.keys() == load_file(exports[name][1] / "model.safetensors").keys()
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and torch.equal(again(x).logits, model(x).logits)
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    expected = model.model.tokens.encode("the cat")[:-1].tolist()
    assert AutoTokenizer.from_pretrained(out)("the cat").input_ids == expected
    assert "files" not in files.read_json(out / "config.json"), "it has no digests of the exported files"


def test_a_folder_in_the_cache_of_the_hub_is_found_by_its_name(exports, tmp_path):
    ours, folder = exports["bpe"]
    cache = tmp_path / "models--acme--small"
    shutil.copytree(folder, cache / "snapshots" / ("1" * 40))
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("1" * 40)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained("acme/small", **options)
    x = ids(1, 9)
    assert torch.equal(model(x).logits, ours(x).logits) and model.model.tokens.digest == BPE.digest
    assert AutoTokenizer.from_pretrained("acme/small", **options)("the").input_ids == [BYTES.bos, 273]


def test_damaged_weights_are_refused(exports, tmp_path):
    folder = shutil.copytree(exports["gpt"][1], tmp_path / "gpt")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model.safetensors: SHA-256 differs"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_embeddings": "none"}, r"another architecture: this model has no blocks.1.attention.gate.w"),
        ({"hidden": 64}, r"another architecture: .* has shape \[.*\], and \[.*\] in this model"),
        ({"width": 64}, r"another version of Spider \(model.width"),
    ],
)
def test_a_config_of_another_architecture_is_refused(exports, tmp_path, change, message):
    folder = shutil.copytree(exports["gpt"][1], tmp_path / "gpt")
    plain = files.read_json(folder / "config.json")
    plain["model"] |= change
    files.write_json(folder / "config.json", plain)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_family_runs_in_bf16_or_is_refused_with_the_reason(exports):
    x = ids(1, 9)
    narrow = AutoModelForCausalLM.from_pretrained(exports["gpt"][1], dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and narrow(x).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"family spider do not run in torch.bfloat16 .*torch.autocast"):
        AutoModelForCausalLM.from_pretrained(exports["spider"][1], dtype=torch.bfloat16)
