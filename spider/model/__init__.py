"""Families of models, one folder each; `build_model` builds a model of any family.

    interface.py   The base class `Model`: the contract between a family and the rest of Spider.
    layers.py      The small parts that families share, and what a backward pass computes again.
    reading.py     How a model reads a text that it scores, and texts that it continues.
    ngram_head.py  The head that scores the candidates of an n-gram index, for any family.

    spider/        The byte-level recurrent-depth transformer with learned patches.
    gpt/           A transformer over bytes or tokens, with the parts of nanochat and of the parameter golf.

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
    """Choose between the Triton kernels and their torch twins for every model of this process, and log the
    choice with its reason.

    Raises:
        ValueError: ``mode`` is ``triton`` and the kernels cannot run here.
    """
    from kernels import switch

    choice = switch.choose(mode)
    log.info("kernels: %s (%s)", choice.implementation, choice.reason)


def build_model(config: ModelConfig, tokens: Tokens | None = None) -> Model:
    """Return a model of the configuration's family, its weights set from the torch RNG.

    Under ``torch.device("meta")`` no memory is allocated. ``model.to_empty(device=...)`` and
    ``model.reset_parameters()`` then give the same model as building it on the device.

    Args:
        tokens: the vocabulary (default: bytes). It may be left out where only sizes matter.

    Raises:
        ConfigError: the family's model cannot be imported. Or it lacks an n-gram head although the
            configuration has ``ngram``. Or the vocabulary does not have the configured size.
    """
    family = getattr(family_module(config.family, "model"), "Model", None)
    if family is None:
        raise ConfigError(
            f"family {config.family!r}: its model.py defines no Model; derive a class of that name from "
            "spider.model.interface.Model"
        )
    model: Model = family(config)
    if config.ngram is not None and model.ngram is None:
        raise ConfigError(f"model.ngram: the family {config.family!r} reads no n-gram index; leave it out")
    if tokens is not None:
        size = config.vocab_size or model.tokens.size
        if tokens.size != size:
            raise ConfigError(f"model.vocab_size: is {size:,}, and the tokenizer has {tokens.size:,} ids")
        model.tokens = tokens
    model.reset_parameters()
    return model
