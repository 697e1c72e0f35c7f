"""A tokenizer.json is read as it was written; an edited or damaged one is an error with its path."""

import pytest

from spider.common.files import read_json, write_json
from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens, LearnedFrom, StoredTokens, read_tokens, tokens_in


@pytest.fixture
def path(tmp_path):
    tokens = BpeTokens([(97, 98), (BYTES.size, 99)])
    StoredTokens.of_merges(tokens, LearnedFrom(documents=2, bytes=10)).write(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_a_file_is_read_as_it_was_written(path):
    tokens = read_tokens(path)
    assert tokens.merges == ((97, 98), (BYTES.size, 99))
    assert tokens.encode("abc")[1:-1].tolist() == [BYTES.size + 1]
    assert tokens_in(path.parent, tokens.digest).digest == tokens.digest
    assert tokens_in(path.parent, None) is BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": ["97 98", "272 100"]}, "edited, its digest"),
        ({"pattern": r"\S+"}, "edited, its digest"),
        ({"merges": ["97 98", "97 98"]}, "damaged tokenizer .merge 1, of 97 and 98: another token has"),
        ({"merges": ["97 98", "x 99"]}, "damaged tokenizer .merge 'x 99' is not a pair of token ids"),
        ({"kind": "unigram"}, "not complete"),
        ({"format": 2}, "of format 2, this Spider reads 1"),
    ],
)
def test_an_edited_or_damaged_file_is_an_error(path, change, message):
    write_json(path, read_json(path) | change)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        read_tokens(path)


def test_a_truncated_and_a_missing_file_are_errors(path):
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="not valid JSON"):
        read_tokens(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        tokens_in(path.parent, "0" * 16)
