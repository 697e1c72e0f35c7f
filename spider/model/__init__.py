"""Model families. `build_model` is the one way to make a model; all share the interface of
`spider.model.spider`."""

from __future__ import annotations

from spider.config import ModelConfig
from spider.model.spider import ModelOutput, Spider

__all__ = ["ModelOutput", "Spider", "build_model"]


def build_model(config: ModelConfig) -> Spider:
    """A Spider with its weights set from the torch RNG.

    Under ``torch.device("meta")`` nothing is allocated; then ``model.to_empty(device=...)`` and
    ``model.reset_parameters()`` give what building on the device would have.
    """
    model = Spider(config)
    model.reset_parameters()
    return model
