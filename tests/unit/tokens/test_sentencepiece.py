"""A SentencePiece model is read as its library reads it, and text is written in its pieces as it is."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.files import read_json, write_json
from spider.tokens import BYTES
from spider.tokens.sentencepiece import read_model
from spider.tokens.stored import StoredPieces, lay_beside, read_tokens, tokens_in
from tests.unit.tokens.sentencepiece_file import (
    CONTROL,
    MADE,
    PIECES,
    SIGNS,
    WHOLE,
    in_pieces,
    message,
    model_bytes,
    number,
    write_model,
)

LETTERS = " the of in tT日本é🙂\n\0x"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return read_model(write_model(tmp_path_factory.mktemp("model") / "m.model"))


def theirs(model, *names):
    return [model.names.index(name) for name in names]


def test_bytes_signs_and_text_have_the_ids_that_all_alphabets_have(model):
    ids = model.ids_P[theirs(model, "<0x00>", "<0xFF>", "<s>", "</s>", "<pad>", "<unk>", MADE[0], MADE[1])]
    first = BYTES.size
    assert ids.tolist() == [0, 255, BYTES.bos, BYTES.eos, BYTES.pad, -1, first, first + 1]
    tokens = model.tokens
    assert tokens.size == BYTES.size + sum(sort == 1 for _, sort in PIECES) and tokens.fallback
    assert (tokens.pad, tokens.bos, tokens.eos) == (BYTES.pad, BYTES.bos, BYTES.eos)


def test_a_blank_inside_a_piece_is_one_byte(model):
    (of_the,) = model.ids_P[theirs(model, "of▁the")]
    assert model.tokens.raw([of_the]) == b"of the" and model.tokens.bytes_of[of_the] == 6


def test_ids_stand_for_the_bytes_that_they_decode_to_in_a_thousand_documents(model):
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(LETTERS, k=draw.randrange(60)))
        ids = model.ids_P[in_pieces(text)]
        assert model.tokens.raw(ids) == text.encode()
        assert int(model.tokens.bytes_of[ids].sum()) == len(text.encode())


@given(st.text(alphabet=LETTERS, max_size=40))
def test_text_is_written_as_the_model_writes_it(model, text):
    assert model.tokens.encode(text)[1:-1].tolist() == model.ids_P[in_pieces(text)].tolist()


@given(st.one_of(st.binary(max_size=60), st.text(alphabet="a ▁\u2581\0\r\n🙂", max_size=30).map(str.encode)))
def test_whatever_is_written_comes_back_to_the_byte(model, raw):
    ids = model.tokens.encode(raw)
    assert model.tokens.raw(ids) == raw and (ids[0], ids[-1]) == (BYTES.bos, BYTES.eos)


def test_words_that_are_known_are_written_as_when_they_were_new(tmp_path):
    """Where no piece has a blank inside, words are looked up, each with the blanks before it."""
    pieces = [piece for piece in PIECES if "▁" not in piece[0].lstrip("▁")]
    tokens = read_model(write_model(tmp_path / "m.model", pieces))
    text = "the in  the the   in the  "
    for _ in range(2):
        assert tokens.tokens.encode(text)[1:-1].tolist() == tokens.ids_P[in_pieces(text, pieces)].tolist()


def test_what_is_taken_out_whole_is_joined_to_nothing(tmp_path):
    pieces = [*PIECES, ("the", WHOLE), ("▁the▁", WHOLE)]
    model = read_model(write_model(tmp_path / "m.model", pieces))
    tokens = model.tokens
    the, wider = tokens.size - 2, tokens.size - 1
    assert [i for i in tokens.encode("of the in the")[1:-1].tolist() if i in (the, wider)] == [wider, the]
    assert tokens.raw(tokens.encode("of the in the")) == b"of the in the"


def test_a_character_without_a_piece_is_refused_where_there_are_none_of_bytes(tmp_path):
    pieces = [piece for piece in PIECES if not piece[0].startswith("<0x")]
    tokens = read_model(write_model(tmp_path / "m.model", pieces)).tokens
    assert tokens.raw(tokens.encode("the of")) == b"the of"
    for text in ("a🙂", "▁", b"\xff"):
        with pytest.raises(ValueError, match="has no piece in this SentencePiece model, which has none of"):
            tokens.encode(text)


@pytest.mark.parametrize(
    ("settings", "lossless"),
    [({}, True), ({"normalizer": "nmt_nfkc"}, False), ({"squeeze": True}, False)],
)
def test_a_model_that_normalises_is_lossy(tmp_path, settings, lossless):
    assert read_model(write_model(tmp_path / "m.model", **settings)).tokens.lossless is lossless


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (model_bytes(prefix=True), r"puts a blank before every text; export it with add_dummy_prefix=False"),
        (message(1, message(1, b"a")) + message(2, number(3, 2)), "add_dummy_prefix=False"),
        (model_bytes(kind=1), "is of type unigram, and only bpe is known here"),
        (model_bytes([p for p in PIECES if p not in SIGNS]), "has no <s>, with which documents begin"),
        (model_bytes([*PIECES, ("x", 1)]), "two equal pieces"),
        (model_bytes([*PIECES, ("", 1)]), "or an empty one"),
        (model_bytes([*PIECES, ("y" * 300, 1)]), "of 300 bytes; 255 at most"),
        (model_bytes()[:-3], "it ends in the middle, at byte"),
        (b"\xff" * 9, "not a SentencePiece model"),
        (b"PK\x03\x04" + bytes(60), "no protocol buffer|it holds no pieces"),
        (b"", "it holds no pieces"),
    ],
)
def test_a_model_that_cannot_be_read_with_says_why(tmp_path, raw, message):
    (path := tmp_path / "m.model").write_bytes(raw)
    with pytest.raises(ValueError, match=rf"m\.model: .*({message})"):
        read_model(path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.model: No such file.*give the SentencePiece model"):
        read_model(tmp_path / "none.model")


def test_fields_that_we_do_not_know_are_passed_by(tmp_path):
    unknown = (
        b"\x99\x02" + struct.pack("<d", 1.0) + b"\x95\x02" + struct.pack("<f", 1.0) + number(40, 1 << 40)
    )
    (tmp_path / "m.model").write_bytes(unknown + model_bytes())
    (tmp_path / "n.model").write_bytes(model_bytes())
    one, two = read_model(tmp_path / "m.model").tokens, read_model(tmp_path / "n.model").tokens
    assert one.digest == two.digest


def test_stored_it_is_the_same_and_what_was_edited_is_refused(tmp_path):
    path = write_model(tmp_path / "m.model", [*PIECES, ("whole", WHOLE), ("<x>", CONTROL)], normalizer="nmt")
    lay_beside(path, tmp_path)
    tokens, stored = read_tokens(path), read_tokens(tmp_path / "tokenizer.json")
    assert stored.digest == tokens.digest and not stored.lossless
    assert (
        tokens_in(tmp_path, tokens.digest).encode("of the whole").tolist()
        == tokens.encode("of the whole").tolist()
    )
    assert np.array_equal(stored.bytes_of, tokens.bytes_of)
    written = StoredPieces.read(tmp_path / "tokenizer.json")
    for change in ({"lossless": True}, {"whole": []}, {"pieces": [*written.pieces[:-1], "other"]}):
        write_json(tmp_path / "tokenizer.json", written.plain() | change)
        with pytest.raises(ValueError, match="edited since it was written"):
            read_tokens(tmp_path / "tokenizer.json")
    write_json(tmp_path / "tokenizer.json", written.plain() | {"scores": written.scores[:-1]})
    with pytest.raises(ValueError, match="a tokenizer that is damaged"):
        read_tokens(tmp_path / "tokenizer.json")
    assert read_json(tmp_path / "tokenizer.json")["kind"] == "sentencepiece"
