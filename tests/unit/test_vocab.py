from hypothesis import given
from hypothesis import strategies as st

from spider import vocab


@given(st.text())
def test_decoding_undoes_encoding_for_any_text(text):
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates have no UTF-8
    assert vocab.decode(vocab.encode(text)) == text


def test_a_document_is_bos_bytes_eos():
    assert vocab.encode("aé") == [257, 97, 195, 169, 258]


def test_decoding_drops_specials_and_replaces_malformed_utf8():
    assert vocab.decode([257, 104, 105, 0xFF, 259, 258]) == "hi\ufffd"


def test_special_ids_are_distinct_above_the_bytes_and_inside_the_vocabulary():
    ids = sorted(vocab.SPECIAL_IDS.values())
    assert ids == list(range(256, vocab.VOCAB_SIZE))
