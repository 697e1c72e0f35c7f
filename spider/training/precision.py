"""Which arithmetic a run computes in, and why.

That of the matrix products: ``bf16`` runs them under autocast. ``fp8`` is bf16 whose linear layers are
torchao's Float8Linear: operands scaled, cast to 8 bits, multiplied, in forward and backward. The family says
which it keeps wide, because their output decides something discrete or is tiny, and what it multiplies in fp8
itself (`spider.model.interface.Fp8Parts`), which has one way of scaling whatever the recipe.

A *recipe* says what shares a scale (docs/training.md). ``tensorwise``: the cheapest casts, but one outlier
costs all others their last bits. ``rowwise``: closer, and slower to cast, since an operand needs other scales
for each product it enters. ``rowwise_with_gw_hp`` leaves the weight gradient, whose errors add up over steps,
in bf16: two of three products are narrow.

``auto`` follows the warm-up's measurements. On a CPU: fp32 or bf16, whichever made a whole step faster. On a
GPU: bf16, and fp8 for exactly the layers whose product was measured faster in it, casts included. Without a
warm-up: fp32 on a CPU, bf16 on a GPU. ``fp8`` on a device without it is an error. Emulated fp8 (right
numbers, slow) is for tests, and has to be asked for in code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from spider.checkpoints.records import SavedPrecision
from spider.config import Fp8Recipe, StageSpec
from spider.errors import TrainingError
from spider.model.interface import Model
from spider.model.layers import compute_dtype
from spider.processes.parallel import is_sharded
from spider.training.measurements import Kind, Warmup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """The arithmetic and the reason; of fp8 also which layers take part (None: all eligible ones)."""

    kind: Kind
    reason: str
    layers: frozenset[str] | None = None
    recipe: Fp8Recipe | None = None

    def __str__(self) -> str:
        what = f"{self.kind} {self.recipe}" if self.recipe else self.kind
        return f"{what} ({self.reason})"

    def unless_began_as(self, before: SavedPrecision, device: torch.device) -> Precision:
        """What a training goes on with that began so; raises as `decide`."""
        layers = frozenset(before.layers) if before.layers else None
        if (before.kind, layers, before.recipe) == (self.kind, self.layers, self.recipe):
            return self
        decide(before.kind, before.recipe or "tensorwise", device, None)
        return Precision(before.kind, "this stage began so", layers, before.recipe)

    @property
    def compute(self) -> torch.dtype:
        """Dtype of matrix products that are not fp8's."""
        return torch.float32 if self.kind == "fp32" else torch.bfloat16

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and backward's matrix products."""
        narrow = self.kind != "fp32"
        return torch.autocast(device.type, dtype=self.compute) if narrow else contextlib.nullcontext()

    def prepare(self, model: Model, *, emulate: bool = False, sharded: bool = False) -> None:
        """Swap the chosen linear layers for Float8Linear and set the family's own parts to fp8, in place;
        parameter names stay as they are. Where the weights are going to be ``sharded`` by FSDP and one factor
        scales a whole weight, processes gather it in fp8, a quarter of the bytes for the same product."""
        if self.kind != "fp8":
            return
        assert self.recipe is not None
        linear = eligible(model) if self.layers is None else eligible(model) & self.layers
        to_fp8(model, self.recipe, linear, emulate=emulate, gather=sharded)
        if (own := model.fp8_parts()) is None:
            return
        chosen = [part for name, part in own.layers.items() if self.layers is None or name in self.layers]
        device = next(model.parameters()).device
        if emulate or own.runs_on(device):
            for part in chosen:
                part.fp8 = True  # type: ignore[assignment]
        elif chosen:
            lacks = f"{device_name(device)} lacks their fp8"
            log.info("precision: %d parts of the model stay in bf16, %s", len(chosen), lacks)

    def after_update(self, model: nn.Module) -> None:
        """Find the scales of all weights that are gathered in fp8 in one exchange, not one for each."""
        if self.recipe == "tensorwise" and is_sharded(model):
            with quiet_torchao():
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_bf16(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def device_name(device: torch.device) -> str:
    """``NVIDIA H100 80GB HBM3`` or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def decide(asked: str, recipe: Fp8Recipe, device: torch.device, warmup: Warmup | None) -> Precision:
    """The configuration's choice, or `TrainingError` where this device cannot do what is asked for; ``auto``
    goes by a warm-up on this kind of device."""
    name = device_name(device)
    cannot = f"precision: {asked} cannot run on {name}"
    if asked == "fp8" and not has_fp8(device):
        needs = "it needs compute capability 8.9, such as H100 or RTX 40"
        raise TrainingError(f"{cannot} ({needs}); set precision: auto or bf16")
    if asked == "bf16" and not has_bf16(device):
        raise TrainingError(f"{cannot}; set precision: fp32")
    if asked != "auto":
        return Precision(cast(Kind, asked), "asked for", recipe=recipe if asked == "fp8" else None)
    if warmup is not None and warmup.device == name:
        fp8 = (frozenset(warmup.fp8_layers), recipe) if warmup.precision == "fp8" else ()
        return Precision(warmup.precision, warmup.reason, *fp8)
    kind: Kind = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return Precision(kind, "not measured: no warm-up on this device")


def compiles(spec: StageSpec, kind: Kind, device: torch.device) -> bool:
    """Whether a stage's model is compiled there in that arithmetic; `TrainingError` where it is asked for and
    cannot be. A GPU that is to compile and does not says why."""
    if problems := spec.model.problems(kind, spec.compile):
        where = f"precision: {spec.precision} comes to {kind} on {device_name(device)}"
        raise TrainingError(f"{where}, and {'; '.join(problems)}; or leave compile out")
    compiled = spec.compiled_on(device.type, kind)
    if device.type == "cuda" and spec.compile is None and not compiled:
        log.info("not compiled: in %s, %s", kind, "; ".join(spec.model.problems(kind, True)))
    return compiled


def eligible(model: Model) -> frozenset[str]:
    """Names of the linear layers that may run in fp8: the family lets them, and the hardware can."""
    # Each side of a weight is an outer dimension of one of the three products, and those have to be multiples
    # of 16. The rows of a batch are only ever summed over, or come first, and are padded.
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    fit = (name for name, m in linear if not (m.in_features % 16 or m.out_features % 16))
    return frozenset(name for name in fit if not model.keeps_wide(name))


def fp8_layers(model: Model) -> str:
    """Return a phrase that counts the layers of a prepared model that are multiplied in fp8."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    swapped = sum(type(module).__name__ == "Float8Linear" for module in linear)  # needs no import of torchao
    told = f"{swapped} of {len(linear)} linear layers"
    if own := model.fp8_parts():
        narrow = sum(bool(part.fp8) for part in own.layers.values())
        told += f", {narrow} of {len(own.layers)} other layers"
    return told


@contextlib.contextmanager
def quiet_torchao() -> Iterator[None]:
    """Importing torchao warns of its parts for other machines, which concern nobody here."""
    loggers = map(logging.getLogger, ("torchao", "torchao.kernel.intmm", "torch.utils._pytree"))
    levels = {logger: logger.level for logger in loggers}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def to_fp8(
    model: nn.Module, recipe: Fp8Recipe, names: Container[str], *, emulate: bool = False, gather: bool = False
) -> None:
    """Swap the linear layers of these names for Float8Linear, in place."""
    with quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        pad_inner_dim=True,
        emulate=emulate,
        enable_fsdp_float8_all_gather=gather and recipe == "tensorwise",
    )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    for module in model.modules() if emulate else ():
        if isinstance(module, Float8Linear):
            # It casts its input under a GPU's autocast, and knows of no other.
            module.register_forward_pre_hook(lambda _, args: tuple(x.to(compute_dtype(x)) for x in args))
