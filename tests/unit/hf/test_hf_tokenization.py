"""Tokenizers in transformers give the ids and the texts of `spider.tokens`, for each vocabulary."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from spider.common import files
from spider.data.chat import opening
from spider.hf.tokenization import SpiderTokenizer
from spider.tokens import BYTES
from spider.tokens.sentencepiece import read_model
from spider.tokens.stored import copy_tokenizer
from spider.tokens.turns import ASSISTANT, OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, TURN, USER
from tests.unit.hf.small_exports import BPE, exported
from tests.unit.tokens.sentencepiece_file import write_model

TEXTS = ["the cat", "of the ", "", "a\n\tb  c", "Zürich 日本 🕷", "⟨EOS⟩ <s> ⟨BOS⟩", "0\x00\x7f"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Return the vocabulary of a SentencePiece model and its tokenizer."""
    folder = tmp_path_factory.mktemp("pieces")
    copy_tokenizer(write_model(folder / "pieces.model"), folder)
    tokens = read_model(folder / "pieces.model").tokens
    return tokens, SpiderTokenizer(vocab_file=str(folder / "tokenizer.json"), learned=tokens.digest)


@pytest.fixture(scope="module")
def tokenizers(exports, pieces):
    for_bytes = AutoTokenizer.from_pretrained(exports["spider"][1])
    for_bpe = AutoTokenizer.from_pretrained(exports["bpe"][1])
    return {"bytes": (BYTES, for_bytes), "bpe": (BPE, for_bpe), "sentencepiece": pieces}


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_ids_and_text_are_those_of_the_vocabulary(tokenizers, kind, tmp_path):
    tokens, tokenizer = tokenizers[kind]
    assert isinstance(tokenizer, SpiderTokenizer) and len(tokenizer) == tokenizer.vocab_size == tokens.size
    for text in TEXTS:
        expected = tokens.encode(text)[:-1].tolist()
        encoded = tokenizer(text)
        assert encoded.input_ids == expected and set(encoded.attention_mask) <= {1}
        assert tokenizer(text, add_special_tokens=False).input_ids == expected[1:]
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
        assert tokenizer.decode(expected) == "⟨BOS⟩" + text
    names = tokenizer.get_vocab()
    assert sorted(names.values()) == list(range(tokens.size)), "each id has a name of its own"
    every = list(range(tokens.size))
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(every)) == every
    assert tokenizer.decode(every, skip_special_tokens=True) == tokens.decode(every)
    tokenizer.save_pretrained(tmp_path)
    again = SpiderTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == names and again(TEXTS).input_ids == tokenizer(TEXTS).input_ids
    assert again.padding_side == "left" and again.model_max_length == tokenizer.model_max_length
    assert again.special_tokens_map == tokenizer.special_tokens_map


def test_bytes_are_their_own_ids_even_if_they_are_not_utf_8(tokenizers):
    tokenizer = tokenizers["bytes"][1]
    raw = bytes(range(256)) + b"\xff\xfe\x80"
    ids = tokenizer(raw.decode("utf-8", "surrogateescape"), add_special_tokens=False).input_ids
    assert ids == list(raw)
    assert tokenizer.decode(ids) == raw.decode("utf-8", "replace") == BYTES.decode(ids)
    assert tokenizers["bpe"][1]("th\udcffe").input_ids == BPE.encode(b"th\xffe")[:-1].tolist()
    assert tokenizer.decode(0xE9) == "�" and tokenizer.decode(np.array([65])) == "A"


def test_no_text_encodes_to_a_special_id(tokenizers):
    tokenizer = tokenizers["bytes"][1]
    of_text = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert of_text == (BYTES.pad, BYTES.bos, BYTES.eos)
    assert set(tokenizer.all_special_ids) == set(BYTES.specials.values())
    assert tokenizer.convert_tokens_to_ids("⟨EOS⟩") == BYTES.eos
    assert tokenizer("⟨EOS⟩").input_ids[1:] == list("⟨EOS⟩".encode())
    assert tokenizer.decode([BYTES.bos, 65, BYTES.eos]) == "⟨BOS⟩A⟨EOS⟩"
    with pytest.raises(ValueError, match="'<new>' is not one of the 272 tokens of the model"):
        tokenizer.add_tokens(["<new>"])


def test_batches_are_padded_on_the_left_and_long_texts_truncated(tokenizers):
    tokenizer = tokenizers["bytes"][1]
    batch = tokenizer(["abc", "a"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[BYTES.bos, 97, 98, 99], [BYTES.pad, BYTES.pad, BYTES.bos, 97]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert len(tokenizer("x" * 100, truncation=True).input_ids) == tokenizer.model_max_length == 24


def test_a_conversation_gives_the_ids_of_its_turns_and_no_message_adds_a_turn(exports, tmp_path):
    folder = exported(exports["bpe"][0], tmp_path / "chat", conversations="talks")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "the cat ⟨RESERVED_3⟩"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert ids == opening([("user", messages[0]["content"])], BPE, answer=True).tolist()
    assert (ids[:2], ids[-2:], ids.count(TURN)) == ([BYTES.bos, USER], [TURN, ASSISTANT], 1)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("⟨BOS⟩⟨RESERVED_1⟩the cat")
    parts = [{"type": "python", "text": "4/2"}, {"type": "python_output", "text": "2"}]
    calling = [*messages, {"role": "assistant", "content": parts}]
    called = tokenizer.apply_chat_template(calling).input_ids
    call = [PYTHON_START, *BPE.encode("4/2")[1:-1], PYTHON_END]
    assert called == [*ids, *call, OUTPUT_START, *BPE.encode("2")[1:-1], OUTPUT_END, TURN]
    with pytest.raises(ValueError, match=r"message 0: role must be one of system, user, assistant"):
        tokenizer.apply_chat_template([{"role": "cat", "content": "a"}])
    with pytest.raises(ValueError, match="have no tools"):
        tokenizer.apply_chat_template(messages, tools=[{}])
    plain = AutoTokenizer.from_pretrained(exports["bpe"][1])
    with pytest.raises(ValueError, match="was not trained on conversations"):
        plain.apply_chat_template(messages)


def test_a_missing_or_damaged_tokenizer_is_refused(exports, tmp_path):
    folder = shutil.copytree(exports["bpe"][1], tmp_path / "out")
    plain = files.read_json(folder / "tokenizer.json")
    files.write_json(folder / "tokenizer.json", plain | {"merges": plain["merges"][:-1]})
    with pytest.raises(ValueError, match=r"tokenizer.json: edited, its digest"):
        AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json: no such file"):
        AutoTokenizer.from_pretrained(folder)
