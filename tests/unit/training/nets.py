"""Small nets with the contract's parameter groups, for tests of the optimizer."""

from __future__ import annotations

from torch import nn

from spider.model.interface import Model


class Net(Model):
    """A model of the given parameters and modules, under their names."""

    def __init__(self, **parts: nn.Parameter | nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def matrix(fan_in: int, fan_out: int) -> Net:
    """Return a net whose only parameter, ``weight``, starts as that of a linear layer."""
    return Net(weight=nn.Linear(fan_in, fan_out, bias=False).weight)
