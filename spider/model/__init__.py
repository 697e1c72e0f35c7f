"""Families of models, a folder each; `build_model` is the one way to make a model of any.

    interface.py   what the rest of Spider asks of a model
    layers.py      the small parts that families share
    candidates.py  the head that prices what an n-gram index proposes, for any family
    spider/        the byte-level recurrent-depth transformer with learned patches
    gpt/           a transformer over ids, bytes or tokens, of two seeds' parts

Importing this package, or a family's ``config``, imports no torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from spider.config.block import ConfigError
from spider.config.model import ModelConfig, family_module

if TYPE_CHECKING:
    from spider.model.interface import Model
    from spider.tokens import Tokens

log = logging.getLogger(__name__)


def choose_kernels(mode: Literal["auto", "triton", "torch"]) -> None:
    """Have every model of this process use our Triton kernels, or their twins in torch; the log says which,
    and why.

    Raises:
        ValueError: the kernels were asked for and cannot run here.
    """
    from kernels import switch

    log.info("kernels: %s (%s)", *switch.choose(mode))


def build_model(config: ModelConfig, tokens: Tokens | None = None) -> Model:
    """A model of the configuration's family with its weights set from the torch RNG, of so many ids as that
    says; ``tokens`` are what they stand for, which whoever only measures may leave out.

    Under ``torch.device("meta")`` nothing is allocated; then ``model.to_empty(device=...)`` and
    ``model.reset_parameters()`` give what building on the device would have.

    Raises:
        ConfigError: the family's model cannot be imported, or the vocabulary is not of so many ids.
    """
    made = getattr(family_module(config.family, "model"), "Model", None)
    if made is None:
        raise ConfigError(
            f"family {config.family!r}: its model.py defines no Model, a spider.model.interface.LanguageModel"
        )
    model: Model = made(config)
    if config.ngram is not None and model.ngram is None:
        raise ConfigError(f"model.ngram: the family {config.family!r} reads no n-gram index; leave it out")
    if tokens is not None:
        if tokens.size != (size := config.vocab_size or model.tokens.size):
            raise ConfigError(f"model.vocab_size: is {size:,}, and the tokenizer has {tokens.size:,} ids")
        model.tokens = tokens
    model.reset_parameters()
    return model
