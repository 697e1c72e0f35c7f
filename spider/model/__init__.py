"""Model families. `build_model` is the one way to make a model; all share the interface of
`spider.model.spider`."""

from __future__ import annotations

import logging

from kernels import switch
from spider.config import ModelConfig
from spider.model.spider import ModelOutput, Spider

__all__ = ["ModelOutput", "Spider", "build_model", "choose_kernels"]

log = logging.getLogger(__name__)


def choose_kernels(mode: switch.Mode) -> None:
    """Have every model of this process use our Triton kernels, or their twins in torch; the log says which,
    and why.

    Raises:
        ValueError: the kernels were asked for and cannot run here.
    """
    log.info("kernels: %s (%s)", *switch.choose(mode))


def build_model(config: ModelConfig) -> Spider:
    """A Spider with its weights set from the torch RNG.

    Under ``torch.device("meta")`` nothing is allocated; then ``model.to_empty(device=...)`` and
    ``model.reset_parameters()`` give what building on the device would have.
    """
    model = Spider(config)
    model.reset_parameters()
    return model
