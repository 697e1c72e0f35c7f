import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spider.tokens import BYTES


@given(st.text())
def test_decoding_undoes_encoding_for_any_text(text):
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates cannot be encoded as UTF-8
    assert BYTES.decode(BYTES.encode(text)) == text


def test_a_document_is_bos_bytes_eos():
    assert BYTES.encode("aé").tolist() == [257, 97, 195, 169, 258]
    assert BYTES.encode(b"a\xff").tolist() == [257, 97, 255, 258]


def test_decoding_drops_specials_and_replaces_malformed_utf8():
    ids = [257, 104, 105, 0xFF, 259, 258]
    assert BYTES.decode(ids) == "hi\ufffd" and BYTES.raw(np.array(ids)) == b"hi\xff"


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.integers(1, 30))
def test_splicing_many_documents_equals_encoding_each(texts, size):
    joined = np.frombuffer(b"".join(texts), np.uint8)
    bounds = np.cumsum([0, *map(len, texts)])
    ids, begins = BYTES.splice(joined, bounds[:-1], bounds[1:], np.empty(size, np.uint16))
    expected = [BYTES.encode(text) for text in texts]
    assert ids.tolist() == np.concatenate(expected).tolist()
    assert begins.tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()
