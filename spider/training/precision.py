"""The precision of a run: the arithmetic of its matrix products, and why it was chosen.

``bf16`` runs matrix products under autocast. ``fp8`` is bf16 with torchao's Float8Linear: operands are
scaled, cast to 8 bits and multiplied, in forward and backward. The model family names the layers that stay
wide, because their output decides something discrete or is tiny. It also names the layers that it multiplies
in fp8 itself (`spider.model.interface.Fp8Parts`). One scale for a tensor (torchao's recipe `RECIPE`) has the
cheapest casts, but one outlier costs all other values their last bits.

``auto`` follows the warm-up's times of whole steps: fp32 or bf16 on a CPU, and on a GPU bf16 or fp8, the
latter in the large layers alone (`large_layers`). Without a warm-up it selects fp32 on a CPU and bf16 on a
GPU. ``fp8`` on a device without it is an error. Emulated fp8 (right numbers, but slow) is for tests, and only
code can request it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from spider.checkpoints.records import Kind, SavedPrecision, Warmup
from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.model.interface import Model
from spider.model.layers import compute_dtype
from spider.processes.parallel import is_sharded

log = logging.getLogger(__name__)

#: How torchao scales, one factor for a tensor.
RECIPE = "tensorwise"
#: Least inputs and outputs of a layer that `auto` runs in fp8. Below it casts cost more than fp8 gains.
_LARGE = 1024


@dataclass(frozen=True)
class Precision:
    """The arithmetic, the reason, and for fp8 the layers that use it (None: all eligible ones)."""

    kind: Kind
    reason: str
    layers: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})"

    def unless_began_as(self, before: SavedPrecision, device: torch.device) -> Precision:
        """Return the precision that a training began with, or self if they are equal; raise as `decide`."""
        layers = frozenset(before.layers) if before.layers else None
        if (before.kind, layers) == (self.kind, self.layers):
            return self
        decide(before.kind, device, None)
        return Precision(before.kind, "this stage began in it", layers)

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of matrix products outside fp8."""
        return torch.float32 if self.kind == "fp32" else torch.bfloat16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the matrix products of a forward pass."""
        narrow = self.kind != "fp32"
        return torch.autocast(device.type, dtype=self.compute) if narrow else contextlib.nullcontext()

    def prepare(self, model: Model, *, emulate: bool = False, sharded: bool = False) -> None:
        """Replace the chosen linear layers by Float8Linear and set the family's own parts to fp8, in place.

        Parameter names do not change. If FSDP will shard the weights (``sharded``), processes gather them in
        fp8: a quarter of the bytes for the same product.
        """
        if self.kind != "fp8":
            return
        linear = eligible(model) if self.layers is None else eligible(model) & self.layers
        to_fp8(model, linear, emulate=emulate, gather=sharded)
        own = model.fp8_parts()
        if own is None:
            return
        chosen = [part for name, part in own.layers.items() if self.layers is None or name in self.layers]
        device = next(model.parameters()).device
        if emulate or own.runs_on(device):
            for part in chosen:
                part.fp8 = True  # type: ignore[assignment]
        elif chosen:
            lacks = f"{device_name(device)} does not support their fp8"
            log.info("precision: %d parts of the model stay in bf16, %s", len(chosen), lacks)

    def after_update(self, model: nn.Module) -> None:
        """Compute the scales of all weights that are gathered in fp8 in a single exchange."""
        if self.kind == "fp8" and is_sharded(model):
            with quiet_torchao():
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies fp8 matrices: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_bf16(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def device_name(device: torch.device) -> str:
    """Return the device's name, such as ``NVIDIA H100 80GB HBM3``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def decide(requested: str, device: torch.device, warmup: Warmup | None) -> Precision:
    """Return the configured precision; ``auto`` follows a warm-up on the same kind of device.

    Raises:
        TrainingError: the device cannot compute in the requested precision.
    """
    name = device_name(device)
    if requested == "fp8" and not has_fp8(device):
        raise TrainingError(
            f"precision: fp8 cannot run on {name} (it needs compute capability 8.9, such as H100 or RTX 40); "
            "set precision: auto or bf16"
        )
    if requested == "bf16" and not has_bf16(device):
        raise TrainingError(f"precision: bf16 cannot run on {name}; set precision: fp32")
    if requested != "auto":
        return Precision(cast(Kind, requested), "configured")
    if warmup is not None and warmup.device == name:
        if warmup.precision == "fp8":
            return Precision("fp8", warmup.reason, frozenset(warmup.fp8_layers))
        return Precision(warmup.precision, warmup.reason)
    kind: Kind = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return Precision(kind, "not measured: no warm-up on this device")


def compiles(spec: StageSpec, kind: Kind, device: torch.device) -> bool:
    """Return whether a stage's model is compiled on this device in this precision.

    On a GPU the log gives the reason for not compiling.

    Raises:
        TrainingError: ``compile: true`` is set and the model cannot be compiled in this precision.
    """
    problems = spec.model.problems(kind, spec.compile)
    if problems:
        raise TrainingError(
            f"precision: {spec.precision} selects {kind} on {device_name(device)}, and "
            f"{'; '.join(problems)}; or leave compile out"
        )
    compiled = spec.compiled_on(device.type, kind)
    if device.type == "cuda" and spec.compile is None and not compiled:
        log.info("not compiled: in %s, %s", kind, "; ".join(spec.model.problems(kind, True)))
    return compiled


def eligible(model: Model) -> frozenset[str]:
    """Return the names of the linear layers that family and hardware allow to run in fp8."""
    # Each side of a weight is an outer dimension of one of the three products, and must be a multiple of 16.
    # The rows of a batch are summed over or come first, and are padded.
    return frozenset(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.in_features % 16 == layer.out_features % 16 == 0
        and not model.keeps_wide(name)
    )


def large_layers(model: Model, device: torch.device) -> list[str]:
    """Return the names of the layers that ``auto`` runs in fp8 if that makes a step faster; none without fp8.

    They are the eligible linear layers that are large, and the family's own parts where the device has them.
    """
    if not has_fp8(device):
        return []
    names = eligible(model)
    large = {
        n for n, m in model.named_modules() if n in names and min(m.in_features, m.out_features) >= _LARGE
    }
    own = model.fp8_parts()
    return sorted(large.union(own.layers if own is not None and own.runs_on(device) else ()))


def fp8_layers(model: Model) -> str:
    """Return a phrase that counts the layers of a prepared model that run in fp8."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    swapped = sum(type(module).__name__ == "Float8Linear" for module in linear)  # needs no import of torchao
    phrase = f"{swapped} of {len(linear)} linear layers"
    own = model.fp8_parts()
    if own:
        narrow = sum(bool(part.fp8) for part in own.layers.values())
        phrase += f", {narrow} of {len(own.layers)} other layers"
    return phrase


@contextlib.contextmanager
def quiet_torchao() -> Iterator[None]:
    """Silence torchao's warnings about its parts for other machines during the import."""
    loggers = map(logging.getLogger, ("torchao", "torchao.kernel.intmm", "torch.utils._pytree"))
    levels = {logger: logger.level for logger in loggers}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def to_fp8(model: nn.Module, names: Container[str], *, emulate: bool = False, gather: bool = False) -> None:
    """Replace the linear layers of these names by Float8Linear, in place."""
    with quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(RECIPE),
        pad_inner_dim=True,
        emulate=emulate,
        enable_fsdp_float8_all_gather=gather,
    )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            if not gather:
                module.quantize, module.cast_once = _quantize, partial(_cast_once, module)
            if emulate:
                # Float8Linear casts its input only under a GPU's autocast.
                module.register_forward_pre_hook(lambda _, args: tuple(x.to(compute_dtype(x)) for x in args))


def _cast_once(layer: Any, weight: Tensor) -> Tensor:
    """Return the weight of a Float8Linear in fp8, for several calls; its gradient is that of ``weight``.

    The layer neither scales nor casts it again, in no forward or backward pass: a tensorwise scale serves all
    products.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    made = *layer.quantize(weight.detach()), weight.dtype, layer.linear_mm_config, GemmInputRole.WEIGHT
    return cast(Tensor, _InPlaceOf.apply(weight, Float8TrainingTensor(*made)))


class _InPlaceOf(torch.autograd.Function):
    """Return the second argument, and pass the gradient to the first."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        return cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` in e4m3 and its scale, as torchao computes them."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(weight, torch.float8_e4m3fn)
    return to_fp8_saturated(weight.float() * scale, torch.float8_e4m3fn), scale
