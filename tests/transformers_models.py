"""Make folders of very small language models of transformers, each with a tokenizer learned from a text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import (
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

END = "<|endoftext|>"


def byte_level(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and merges, as GPT-2's, with one special token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)


def byt5(texts: Iterable[str]) -> ByT5Tokenizer:
    """Return ByT5's tokenizer, which needs no text. It has no BOS."""
    return ByT5Tokenizer()


def multilingual(texts: Iterable[str], *, fallback: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer as XGLM's: pieces of many languages. Among them are all characters that
    stand for a byte in GPT-2's. It keeps runs of blanks, but not a blank at the beginning.

    Args:
        fallback: add a piece for each byte, for characters without a piece.
    """
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = UnigramTrainer(vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*texts, " ".join(pre_tokenizers.ByteLevel.alphabet())], trainer)
    if fallback:
        plain = json.loads(tokenizer.to_str())
        plain["model"]["byte_fallback"] = True
        plain["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        plain["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, plain["decoder"]]}
        tokenizer = Tokenizer.from_str(json.dumps(plain))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def with_fallback(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as `multilingual`'s with a piece for each byte."""
    return multilingual(texts, fallback=True)


def with_blanks(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama's: a blank in front of each text, and byte tokens for other characters."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=380, special_tokens=special, limit_alphabet=30, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def lower_casing(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as BERT's, which changes a text: it has neither capitals nor runs of blanks."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[BOS]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[BOS]", unk_token="[UNK]")


def gpt2(folder: Path, tokenizer: PreTrainedTokenizerBase, context: int = 32) -> Path:
    """Write a small GPT-2 with this tokenizer into a folder, and return the folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=context,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
