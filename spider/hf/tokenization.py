"""The vocabulary (`spider.tokens.Tokens`) with the interface of a tokenizer of transformers.

Bytes are the ids 0 to 255 in every vocabulary. The ids of a text begin with BOS, as in
`spider.evaluation.generate`. No text gives a special id: ``"⟨EOS⟩"`` is nine bytes. Bytes that are not UTF-8
are given as ``raw.decode("utf-8", "surrogateescape")``, and are decoded as U+FFFD.

transformers also needs a string for each id. It is the bytes of the id as printable characters, by the table
of GPT-2. In that table ``Ġ`` is a space.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import BatchEncoding
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_python import PreTrainedTokenizer

from spider.common import files
from spider.data.chat import message, opening
from spider.publish.transformers_files import REMOTE, TOKENIZER_MAP, named, remote, special_tokens
from spider.tokens import Tokens
from spider.tokens.stored import TOKENIZER, tokens_in

#: The suffix of the string of an id that has the same bytes as another id, such as a piece of one byte.
_SECOND = "′"


class SpiderTokenizer(PreTrainedTokenizer):
    """A tokenizer of bytes or of a learned vocabulary.

    Args:
        vocab_file: the ``tokenizer.json`` of an exported folder with a learned vocabulary.
        learned: the digest of that file, or None for bytes.
        conversations: the dataset of conversations that the model was trained on. Without it a chat
            template is refused.

    Raises:
        ValueError: the file is missing, damaged, or has another digest.
    """

    vocab_files_names = {"vocab_file": TOKENIZER}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        learned: str | None = None,
        conversations: str | None = None,
        **kwargs: Any,
    ) -> None:
        folder = Path(vocab_file).parent if vocab_file else Path(kwargs.get("name_or_path", ""))
        self.vocabulary: Tokens = tokens_in(folder, learned)
        self.stored = (folder / TOKENIZER).read_bytes() if learned else None
        self.conversations = conversations
        self._names = _names(self.vocabulary)
        self._ids = {name: i for i, name in enumerate(self._names)}
        options = {**special_tokens(), "special_tokens_pattern": "bos", "auto_map": TOKENIZER_MAP, **kwargs}
        super().__init__(learned=learned, conversations=conversations, vocab_file=vocab_file, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: exported folders hold `REMOTE` instead of the module of this class."""

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        if unknown := [str(token) for token in new_tokens or () if str(token) not in self._ids]:
            raise ValueError(
                f"{unknown[0]!r} is not one of the {self.vocabulary.size:,} tokens of the model; the "
                "vocabulary cannot grow"
            )
        return super()._add_tokens(new_tokens, special_tokens)

    # ------------------------------------------------------------------------------------- text and ids

    def tokenize(self, text: str, **_: Any) -> list[str]:  # type: ignore[override]
        """Return the strings of a text's ids; raise `ValueError` if the vocabulary cannot encode it."""
        ids = self.vocabulary.encode(text.encode("utf-8", "surrogateescape"))[1:-1]
        return [self._names[i] for i in ids]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self._decode([self._ids[token] for token in tokens])

    def _decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:  # type: ignore[override]
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        shown = {} if skip_special_tokens else {i: name.encode() for i, name in named().items()}
        raw = b"".join(shown[i] if i in shown else self.vocabulary.raw([i]) for i in ids)
        return raw.decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------ conversations

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: Any = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Any = None,
        return_dict: bool = True,
        **_: Any,
    ) -> Any:
        """Return the ids of a conversation, as `spider.tokens.turns` defines them.

        The ids are built without a text template, so a message cannot pretend to be another turn.

        Raises:
            ValueError: the model was not trained on conversations, a message is malformed, or an option is
                not supported: tools, documents, a template, or a message to continue.
        """
        if self.conversations is None:
            raise ValueError("this model was not trained on conversations (docs/gpt.md); give it a text")
        if tools or documents or chat_template or continue_final_message or truncation:
            raise ValueError(
                "conversations with Spider's models have no tools, documents, templates or messages to "
                "continue, and are not truncated: leave these options out"
            )
        batch = bool(conversation) and not isinstance(conversation[0], dict)
        conversations = [
            [message(number, plain) for number, plain in enumerate(getattr(one, "messages", one))]
            for one in (conversation if batch else [conversation])
        ]
        rows = [opening(one, self.vocabulary, answer=add_generation_prompt).tolist() for one in conversations]
        if not tokenize:
            texts = [self._decode(row) for row in rows]
            return texts if batch else texts[0]
        padded = self.pad({"input_ids": rows}, padding=padding, max_length=max_length)
        plain = padded if batch or return_tensors else {key: value[0] for key, value in padded.items()}
        encoded = BatchEncoding(dict(plain), tensor_type=return_tensors)
        return encoded if return_dict else encoded["input_ids"]

    # ------------------------------------------------------------------------------------------- saving

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write ``tokenizer.json`` and the code that reads it."""
        content = {REMOTE: remote()} | ({} if self.stored is None else {TOKENIZER: self.stored})
        written = []
        for name, raw in content.items():
            path = Path(save_directory) / name
            with files.replacing(path) as beside:
                beside.write_bytes(raw)
            written.append(str(path))
        return tuple(written)


def _names(vocabulary: Tokens) -> list[str]:
    """Return a different string for each id."""
    printable = bytes_to_unicode()
    special = named()
    names: dict[str, None] = {}
    for i in range(vocabulary.size):
        name = special.get(i) or "".join(printable[byte] for byte in vocabulary.raw([i]))
        while name in names:
            name += _SECOND
        names[name] = None
    return list(names)
