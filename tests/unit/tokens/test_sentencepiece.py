"""A SentencePiece model is read as its library reads it, and text is encoded without normalization."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.common.files import read_json, write_json
from spider.tokens import BYTES
from spider.tokens.sentencepiece import read_model
from spider.tokens.stored import StoredTokens, copy_tokenizer, read_tokens, tokens_in
from tests.unit.tokens.sentencepiece_file import (
    CONTROL,
    JOINED,
    NORMAL,
    PIECES,
    SPECIAL,
    USER_DEFINED,
    in_pieces,
    model_bytes,
    write_model,
)

LETTERS = " the of in tT日本é🙂\n\0x"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return read_model(write_model(tmp_path_factory.mktemp("model") / "m.model"))


def positions(model, *names):
    return [model.names.index(name) for name in names]


def test_byte_pieces_and_special_tokens_have_the_ids_of_all_vocabularies(model):
    ids = model.ids_P[
        positions(model, "<0x00>", "<0xFF>", "<s>", "</s>", "<pad>", "<unk>", JOINED[0], JOINED[1])
    ]
    first = BYTES.size
    assert ids.tolist() == [0, 255, BYTES.bos, BYTES.eos, BYTES.pad, -1, first, first + 1]
    tokens = model.tokens
    assert (
        tokens.size == BYTES.size + sum(piece_type == NORMAL for _, piece_type in PIECES) and tokens.fallback
    )
    assert (tokens.pad, tokens.bos, tokens.eos) == (BYTES.pad, BYTES.bos, BYTES.eos)


@given(st.text(alphabet=LETTERS, max_size=40))
def test_text_is_encoded_like_the_model_encodes_it(model, text):
    assert model.tokens.encode(text)[1:-1].tolist() == model.ids_P[in_pieces(text)].tolist()


@given(st.one_of(st.binary(max_size=60), st.text(alphabet="a ▁\u2581\0\r\n🙂", max_size=30).map(str.encode)))
def test_any_bytes_are_restored(model, raw):
    ids = model.tokens.encode(raw)
    assert model.tokens.raw(ids) == raw and (ids[0], ids[-1]) == (BYTES.bos, BYTES.eos)


def test_user_defined_pieces_are_never_joined(tmp_path):
    pieces = [*PIECES, ("the", USER_DEFINED), ("▁the▁", USER_DEFINED)]
    model = read_model(write_model(tmp_path / "m.model", pieces))
    tokens = model.tokens
    the, wider = tokens.size - 2, tokens.size - 1
    assert [i for i in tokens.encode("of the in the")[1:-1].tolist() if i in (the, wider)] == [wider, the]
    assert tokens.raw(tokens.encode("of the in the")) == b"of the in the"


def test_a_character_without_a_piece_is_an_error_without_byte_pieces(tmp_path):
    pieces = [piece for piece in PIECES if not piece[0].startswith("<0x")]
    tokens = read_model(write_model(tmp_path / "m.model", pieces)).tokens
    assert tokens.raw(tokens.encode("the of")) == b"the of"
    for text in ("a🙂", "▁", b"\xff"):
        with pytest.raises(ValueError, match="has no piece in this SentencePiece model, which has no byte"):
            tokens.encode(text)


@pytest.mark.parametrize(
    ("settings", "lossless"), [({}, True), ({"normalizer": "nmt_nfkc"}, False), ({"squeeze": True}, False)]
)
def test_a_model_that_normalizes_is_lossy(tmp_path, settings, lossless):
    assert read_model(write_model(tmp_path / "m.model", **settings)).tokens.lossless is lossless


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (model_bytes(prefix=True), r"adds a blank before every text; export it with add_dummy_prefix=False"),
        (model_bytes(kind=1), "is of type unigram, only bpe is supported"),
        (model_bytes([p for p in PIECES if p not in SPECIAL]), "has no <s>, with which documents begin"),
        (model_bytes([*PIECES, ("x", 1)]), "two equal pieces"),
        (model_bytes([*PIECES, ("y" * 300, 1)]), "has 300 bytes; the most is 255"),
        (model_bytes()[:-3], "this SentencePiece model cannot be used"),
        (b"PK\x03\x04" + bytes(60), "this SentencePiece model cannot be used"),
        (b"", "it holds no pieces"),
    ],
)
def test_an_unusable_model_is_an_error_with_its_reason(tmp_path, raw, message):
    (path := tmp_path / "m.model").write_bytes(raw)
    with pytest.raises(ValueError, match=rf"m\.model: .*({message})"):
        read_model(path)


def test_a_stored_model_is_the_same_and_an_edited_one_is_an_error(tmp_path):
    path = write_model(
        tmp_path / "m.model", [*PIECES, ("whole", USER_DEFINED), ("<x>", CONTROL)], normalizer="nmt"
    )
    copy_tokenizer(path, tmp_path)
    tokens, stored = read_tokens(path), read_tokens(tmp_path / "tokenizer.json")
    assert stored.digest == tokens.digest and not stored.lossless
    assert (
        tokens_in(tmp_path, tokens.digest).encode("of the whole").tolist()
        == tokens.encode("of the whole").tolist()
    )
    assert np.array_equal(stored.bytes_of, tokens.bytes_of)
    written = StoredTokens.read(tmp_path / "tokenizer.json")
    for change in ({"lossless": True}, {"whole": []}, {"pieces": [*written.pieces[:-1], "other"]}):
        write_json(tmp_path / "tokenizer.json", written.plain() | change)
        with pytest.raises(ValueError, match="edited, its digest"):
            read_tokens(tmp_path / "tokenizer.json")
    write_json(tmp_path / "tokenizer.json", written.plain() | {"scores": written.scores[:-1]})
    with pytest.raises(ValueError, match="a damaged tokenizer"):
        read_tokens(tmp_path / "tokenizer.json")
    assert read_json(tmp_path / "tokenizer.json")["kind"] == "sentencepiece"
