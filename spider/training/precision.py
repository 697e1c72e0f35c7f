"""Which arithmetic a run computes in, and why.

Weights, gradients and optimizer state are fp32 always; precision is about the matrix products. ``bf16`` runs
them under autocast. ``fp8`` is bf16 whose linear layers are torchao's Float8Linear: operands scaled by one
dynamic factor a tensor, cast, multiplied, in forward and backward. It skips the layers whose output decides
something discrete or is tiny: boundary predictor, router, halting, loop embedding, Engram, embeddings, head,
norms (DESIGN section 6).

``auto`` follows the warm-up's measurements. On a CPU: fp32 or bf16, whichever made a whole step faster. On a
GPU: bf16, and fp8 for exactly the layers whose product was measured faster in it, casts included. Without a
warm-up: fp32 on a CPU, bf16 on a GPU. ``fp8`` on a device without it is an error. Emulated fp8 (right
numbers, slow) is for tests and for the warm-up on a CPU, and has to be asked for in code.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from spider.training.errors import TrainingError

Kind = Literal["fp32", "bf16", "fp8"]

_NEVER_FP8 = re.compile(r"boundar|router|halt|loop|engram|embed|head|norm|lora")


@dataclass(frozen=True)
class Precision:
    """A decision: the arithmetic, the reason, and which linear layers take part in fp8 (None: all eligible
    ones)."""

    kind: Kind
    reason: str
    layers: frozenset[str] | None = None

    @property
    def compute(self) -> torch.dtype:
        """Dtype of matrix products that are not fp8's."""
        return torch.float32 if self.kind == "fp32" else torch.bfloat16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and backward's matrix products."""
        if self.kind == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.compute)

    def prepare(self, model: nn.Module, *, emulate: bool = False) -> None:
        """Swap the chosen linear layers for Float8Linear, in place; parameter names stay as they are."""
        if self.kind == "fp8":
            to_fp8(model, self.layers, emulate=emulate)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices: Ada, Hopper and later (compute capability 8.9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_bf16(device: torch.device) -> bool:
    return device.type == "cpu" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def device_name(device: torch.device) -> str:
    """What a person calls the device, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def decide(asked: str, device: torch.device, warmup: dict[str, Any] | None) -> Precision:
    """Turn ``precision`` of the configuration into a decision for this device.

    Args:
        warmup: the warm-up's record; used by ``auto`` when it was measured on this kind of device.

    Raises:
        TrainingError: the device cannot do what was asked for.
    """
    name = device_name(device)
    if asked == "fp8" and not has_fp8(device):
        raise TrainingError(
            f"precision: fp8 cannot run on {name} (it needs compute capability 8.9, such as H100 or RTX 40); "
            "set precision: auto or bf16"
        )
    if asked == "bf16" and not has_bf16(device):
        raise TrainingError(f"precision: bf16 cannot run on {name}; set precision: fp32")
    if asked == "fp32":
        return Precision("fp32", "asked for")
    if asked == "bf16":
        return Precision("bf16", "asked for")
    if asked == "fp8":
        return Precision("fp8", "asked for")
    if warmup is not None and warmup["device"] == name:
        layers = frozenset(warmup["fp8_layers"])
        return Precision(
            warmup["precision"], warmup["reason"], layers if warmup["precision"] == "fp8" else None
        )
    why = "not measured: no warm-up on this device"
    if device.type == "cuda" and has_bf16(device):
        return Precision("bf16", why)
    return Precision("fp32", why)


def eligible(module: nn.Module, name: str) -> bool:
    """Whether a layer may run in fp8 at all (DESIGN section 6)."""
    return isinstance(module, nn.Linear) and _NEVER_FP8.search(name) is None


@contextlib.contextmanager
def quiet_torchao() -> Iterator[None]:
    """Importing torchao warns of its parts for other machines, which concern nobody here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_fp8(model: nn.Module, layers: Collection[str] | None = None, *, emulate: bool = False) -> None:
    """Swap eligible linear layers (only those named, where ``layers`` is given) for Float8Linear, in place.

    Tensorwise scaling; inner dimensions are padded to the multiple of 16 that the hardware wants.
    """
    with quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        module_filter_fn=lambda m, name: eligible(m, name) and (layers is None or name in layers),
        config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate),
    )
