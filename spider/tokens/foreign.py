"""Vocabulary of a tokenizer of transformers that others made, to score their models.

Its ids are its own, the special ones too. A document is BOS, its tokens and EOS. A tokenizer without BOS
begins a document with its EOS, as GPT-2's does with ``<|endoftext|>``.

A token stands for the bytes that it adds to a text. Its name is read by what the tokenizer is: characters
for bytes (GPT-2), Latin-1 (ByT5), or pieces, which the tokenizer itself turns into text, with or without
``<0x41>`` for a byte. The vocabulary does not tell which. One of many languages has all characters that stand
for a byte in GPT-2, and one of bytes may lack those that its own text did not need.
Some tokenizers put a blank in front of each text, which `text` removes. The caller checks whether the tokens
stand for exactly the bytes of a text (`spider.evaluation.foreign`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from spider.tokens import Tokens
from spider.tokens.stored import NOT_UTF8

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
        kind = _kind(tokenizer)
        special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        self.texts = list(_texts(tokenizer, kind, {*special, *ends}))
        self.size = len(self.texts)
        #: At least 1 for each token of text, so that the nats of all of them count.
        self.bytes_of = np.array([max(1, len(text)) for text in self.texts])
        self.bytes_of[ends] = 0
        self._of_bytes = {text[0]: i for i, text in enumerate(self.texts) if len(text) == 1}
        # The text of a piece may depend on its neighbours, that of a byte does not.
        self._joins = kind != "pieces"
        self._blank = b" " if self._read(self.encode("a")).startswith(b" ") else b""

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        ids = [self.bos]
        for i, run in enumerate(NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))):
            part = run.encode("utf-8", "surrogateescape")
            if i % 2 and self._of_bytes.keys() >= {*part}:
                ids += [self._of_bytes[byte] for byte in part]
            elif run:
                ids += self.tokenizer.encode(part.decode("utf-8", "replace"), add_special_tokens=False)
        if bound := {self.bos, self.eos}.intersection(ids[1:]):
            name = self.tokenizer.convert_ids_to_tokens(min(bound))
            raise ValueError(f"{name} stands inside of a document, so nothing tells where another begins")
        return np.array([*ids, self.eos], np.int64)

    def text(self, ids: np.ndarray) -> bytes:
        """Return the bytes of a document, without the blank that the tokenizer put in front of it."""
        return self._read(ids).removeprefix(self._blank)

    def _read(self, ids: np.ndarray) -> bytes:
        if self._joins:
            return self.raw(ids)
        names = [*self.tokenizer.convert_ids_to_tokens(ids[1:-1].tolist())]
        return self.tokenizer.convert_tokens_to_string(names).encode("utf-8", "replace")


def _kind(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how the names of tokens are read: byte level, latin-1, byte fallback or pieces."""
    from transformers import ByT5Tokenizer, PerceiverTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that is written in Python
        if isinstance(tokenizer, ByT5Tokenizer | PerceiverTokenizer):
            return "latin-1"
        return "byte level" if hasattr(tokenizer, "byte_decoder") else "pieces"
    described = backend.to_str()
    if '"type":"ByteLevel"' in described:
        return "byte level"
    falls_back = any(one in described for one in ('"type":"ByteFallback"', '"byte_fallback":true'))
    return "byte fallback" if falls_back else "pieces"


def _texts(tokenizer: PreTrainedTokenizerBase, kind: str, without: set[int]) -> Iterator[bytes]:
    """Yield the bytes of each id. Only an unknown word's token stands for its name, because it costs nats."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = {i: name for name, i in tokenizer.get_vocab().items()}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    if kind == "latin-1":
        byte_of = {chr(byte): byte for byte in range(256)}
    before = tokenizer.tokenize("a")
    start = len(tokenizer.convert_tokens_to_string(before))
    for i in range(max(names) + 1):
        name = names.get(i, "")
        if i in without or not name:
            yield b""
        elif kind in ("byte level", "latin-1"):
            written = i not in tokenizer.added_tokens_decoder and byte_of.keys() >= {*name}
            yield bytes(byte_of[character] for character in name) if written else name.encode()
        elif kind == "byte fallback" and (match := _BYTE.fullmatch(name)):
            yield bytes([int(match[1], 16)])
        else:
            yield tokenizer.convert_tokens_to_string([*before, name])[start:].encode()
