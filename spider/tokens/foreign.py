"""Vocabulary of a tokenizer of transformers that others made, to score their models.

Its ids are its own, the special ones too. A document is BOS, its tokens and EOS. A tokenizer without BOS
begins a document with its EOS, as GPT-2's does with ``<|endoftext|>``.

A token stands for the bytes that it adds to a text. Three kinds of names are read: printable characters for
bytes (GPT-2), ``<0x41>`` for a byte, and pieces that the tokenizer itself turns into text.
Some tokenizers put a blank in front of each text, which `text` removes. The caller checks whether the tokens
stand for exactly the bytes of a text (`spider.evaluation.foreign`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from spider.tokens.bpe import NOT_UTF8
from spider.tokens.bytes import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class ForeignTokens(Tokens):
    """The vocabulary of a tokenizer that splits special tokens in a text like other text.

    Raises:
        ValueError: The tokenizer has neither BOS nor EOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ends = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
        if not ends:
            raise ValueError(
                "the tokenizer has neither BOS nor EOS, so nothing predicts the first token of a document; "
                "set bos_token in its tokenizer_config.json"
            )
        self.bos, self.eos = ends[0], ends[-1]
        self.pad = self.bos
        self.tokenizer = tokenizer
        self.texts = list(_texts(tokenizer, {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}, ends))
        self.size = len(self.texts)
        #: At least 1 for each token of text, so that the nats of all of them count.
        self.bytes_of = np.array([max(1, len(text)) for text in self.texts])
        self.bytes_of[ends] = 0
        self._of_bytes = {text[0]: i for i, text in enumerate(self.texts) if len(text) == 1}
        self._blank = self.raw(self.encode("a")).startswith(b" ")

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        ids = [self.bos]
        for i, run in enumerate(NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))):
            part = run.encode("utf-8", "surrogateescape")
            if i % 2 and self._of_bytes.keys() >= {*part}:
                ids += [self._of_bytes[byte] for byte in part]
            elif run:
                ids += self.tokenizer.encode(part.decode("utf-8", "replace"), add_special_tokens=False)
        return np.array([*ids, self.eos], np.int64)

    def text(self, ids: np.ndarray) -> bytes:
        """Return the bytes of a document, without the blank that the tokenizer put in front of it."""
        return self.raw(ids).removeprefix(b" " if self._blank else b"")


def _texts(tokenizer: PreTrainedTokenizerBase, special: set[int], ends: list[int]) -> Iterator[bytes]:
    """Yield the bytes of each id. Only an unknown word's token stands for its name, because it costs nats."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.get_vocab()
    names = {i: name for name, i in vocabulary.items()}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    has_byte_names = "<0x41>" in vocabulary
    is_byte_level = byte_of.keys() <= vocabulary.keys() and not has_byte_names
    before = tokenizer.tokenize("a")
    start = len(tokenizer.convert_tokens_to_string(before))
    for i in range(max(names) + 1):
        name = names.get(i, "")
        if i in special or i in ends or not name:
            yield b""
        elif has_byte_names and (match := _BYTE.fullmatch(name)):
            yield bytes([int(match[1], 16)])
        elif is_byte_level:
            written = i not in tokenizer.added_tokens_decoder and byte_of.keys() >= {*name}
            yield bytes(byte_of[character] for character in name) if written else name.encode()
        else:
            yield tokenizer.convert_tokens_to_string([*before, name])[start:].encode()
