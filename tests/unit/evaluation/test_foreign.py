"""Score models of transformers with tokenizers of their own on encoded text."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    PreTrainedConfig,
    RobertaConfig,
)

import spider.hf  # noqa: F401 (registers the classes)
from spider.config import load_config
from spider.evaluation.bpb import score
from spider.evaluation.foreign import evaluate_foreign
from spider.evaluation.text import Text, validation_stream
from spider.model.reading import Scoring
from spider.tokens import BYTES
from tests.transformers_models import (
    byt5,
    byte_level,
    gpt2,
    lower_casing,
    multilingual,
    with_blanks,
    with_fallback,
)
from tests.unit.hf.small_exports import exported, models
from tests.unit.small_datasets import encoded, questions

TEXTS = [
    f"Sentence number {i} says that {i * i} is the square of {i}. Größe {i % 7}, as readers may check."
    for i in range(120)
]
MAX_BYTES = 1500
#: Tokenizers that keep these texts.
LOSSLESS = (byte_level, byt5, with_blanks, with_fallback, multilingual)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Encode English sentences, half of them held out."""
    return encoded(tmp_path_factory.mktemp("data") / "text", TEXTS, validation=0.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a GPT-2 with each tokenizer."""
    root = tmp_path_factory.mktemp("foreign")
    made = (*LOSSLESS, lower_casing)
    return {make: gpt2(root / make.__name__, make(TEXTS)) for make in made}


def spec(**evaluation):
    run = {
        "data": "sentences",
        "model": "tiny",
        "stages": [{"name": "main", "max_steps": 20}],
        "evaluation": {"max_bytes": MAX_BYTES, "batch": 8, **evaluation},
    }
    sentences = {"source": {"kind": "pydocs"}, "validation": 0.5}
    return load_config({"datasets": {"sentences": sentences}, "runs": {"demo": run}}).stage("demo", "main")


def scored(folder, data, output, like=None):
    return evaluate_foreign("other", folder, like or spec(), data, output, device="cpu")


def documents(data):
    return Text.of(validation_stream(data, MAX_BYTES)[0], BYTES).documents()


def nats_by_hand(folder, documents, context, overlap=0.5):
    """Return the nats of all documents by transformers alone, one window after the other."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total, stride = 0.0, context - int(context * overlap)
    for document in documents:
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ids = [begin, *tokenizer.encode(document.decode(), add_special_tokens=False)]
        done = 1
        for start in range(0, len(ids), stride):
            window = torch.tensor([ids[start : start + context]])
            with torch.inference_mode():
                log_p = model(window).logits[0].double().log_softmax(-1)
            for at in range(max(done, start + 1), min(len(ids), start + context + 1)):
                total -= float(log_p[at - start - 1, ids[at]])
                done = at + 1
    return total


@pytest.mark.parametrize("make", LOSSLESS)
def test_bits_per_byte_are_the_nats_of_all_tokens_by_transformers_alone(make, folders, data, tmp_path):
    texts = documents(data)
    whole = [texts[0], *texts[1:-1]]  # the last one is cut, perhaps in the middle of a character
    size = sum(map(len, whole))
    found = scored(folders[make], data, tmp_path, spec(max_bytes=size))
    assert found.bytes == size and found.documents == len(whole) and found.lossless
    assert found.seq_len == 32 and found.context == "16 to 32 ids"
    by_hand = nats_by_hand(folders[make], whole, context=32) / (math.log(2) * size)
    assert found.bpb == pytest.approx(by_hand, abs=1e-6)
    assert found.bpb_carried is not None and found.bpb_carried != found.bpb
    low, high = found.intervals["bpb"]
    assert low < found.bpb < high
    assert json.loads((tmp_path / "evaluation.json").read_text())["bpb"] == found.bpb


def test_the_text_is_that_of_the_runs_and_the_record_says_what_the_model_is(folders, data, tmp_path):
    asked = spec(tasks={"mine": questions(tmp_path / "q.jsonl", 8)})
    found = scored(folders[byte_level], data, tmp_path, asked)
    assert len(b"".join(documents(data))) == found.bytes == MAX_BYTES
    details = found.results["foreign"].details
    assert details["architecture"] == "GPT2LMHeadModel" and details["tokenizer"] == "TokenizersBackend"
    assert (details["context"], details["window"]) == (32, 32)
    (row,) = found.results["tasks"].rows
    assert row.name == "tasks/mine" and 0 <= row.value <= 1
    again = scored(folders[with_blanks], data, tmp_path)
    assert again.text_sha256 == found.text_sha256 and again.weights != found.weights


@pytest.mark.parametrize(("name", "precision"), [("bpe", "fp32"), ("gpt", "bf16")])
def test_an_exported_model_of_ours_has_its_own_score_in_the_precision_of_its_checkpoint(
    name, precision, data, tmp_path
):
    model = models()[name]
    folder = exported(model, tmp_path / name, precision=precision)
    found = scored(folder, data, tmp_path / "out", spec(carry_over=0))
    tokens_N, _ = validation_stream(data, MAX_BYTES, model.tokens)
    own = score(model, tokens_N, Scoring(seq_len=found.seq_len, autocast=precision == "bf16"))
    assert found.precision == precision
    assert found.bpb == pytest.approx(own.bpb, abs=1e-7) and found.lossless
    assert found.bpb_strict == pytest.approx(own.bpb_strict, abs=1e-4)


def test_special_tokens_that_a_text_spells_are_text(folders, data, tmp_path):
    texts = [f"{i} <|endoftext|> </s> <s>  \t\n{'x' * i}" for i in range(40)]
    shards = encoded(tmp_path / "text", texts, validation=0.5)
    for make in (byte_level, with_blanks):
        found = scored(folders[make], shards, tmp_path / make.__name__)
        assert found.lossless and found.documents == len(documents(shards)), make


def test_a_tokenizer_that_changes_the_text_is_refused(folders, data, tmp_path):
    with pytest.raises(ValueError, match=r"Document 0 has b'S.*tokens stand for b's.*a tokenizer of bytes"):
        scored(folders[lower_casing], data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_ends_inside_of_a_character_is_scored_up_to_there(folders, data, tmp_path):
    raw = b"".join(documents(data))
    inside = raw.index("ö".encode()) + 1
    with pytest.raises(ValueError, match=rf"ends inside of a character.*max_bytes to {inside - 1}$"):
        scored(folders[multilingual], data, tmp_path / "out", spec(max_bytes=inside))
    for make, size in ((multilingual, inside - 1), (with_fallback, inside), (byt5, inside)):
        found = scored(folders[make], data, tmp_path / make.__name__, spec(max_bytes=size))
        assert found.lossless and found.bytes == size, make


ROBERTA = {**SMALL, "intermediate_size": 16, "max_position_embeddings": 34, "is_decoder": True}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (RobertaConfig(**ROBERTA), 32),
        (MambaConfig(hidden_size=16, num_hidden_layers=1), None),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else str(value),
)
def test_a_model_is_read_in_windows_of_its_context(config, context, folders, data, tmp_path):
    torch.manual_seed(0)
    folder = shutil.copytree(folders[byte_level], tmp_path / "model")
    config.vocab_size = 320
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    found = scored(folder, data, tmp_path / "out", spec(max_bytes=600))
    assert found.results["foreign"].details["context"] == context
    assert found.seq_len == (context or 2048) and found.bytes == 600 and np.isfinite(found.bpb)


def test_folders_without_a_causal_model_are_refused(folders, data, tmp_path):
    def refused(folder, message):
        with pytest.raises(ValueError, match=f"(?i){message}"):
            scored(folder, data, tmp_path / "out")

    def copied(name):
        return shutil.copytree(folders[byte_level], tmp_path / name)

    refused(tmp_path / "gpt2", r"gpt2: no such folder; Spider downloads no model")
    bert = BertConfig(vocab_size=320, initializer_range=0.3, intermediate_size=16, **SMALL)
    BertLMHeadModel(bert).save_pretrained(copied("bert"))
    refused(tmp_path / "bert", "bert: a prediction depends on later tokens")

    path = copied("coded") / "config.json"
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    path.with_name("code.py").write_text("raise SystemExit('this ran')")
    refused(tmp_path / "coded", "without code of the folder")

    small = gpt2(tmp_path / "small", byte_level(TEXTS[:3]))
    for path in folders[byte_level].glob("tokenizer*"):
        shutil.copy(path, small)
    refused(small, r"small: the tokenizer gives id \d+, the model has \d+ ids")
