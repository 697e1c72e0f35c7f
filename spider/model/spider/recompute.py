"""How a layer is run: with which weights, what of it is kept for the backward pass, and what is computed once
more there.

    none        keep everything
    selective   keep what costs most to make, the outputs of matrix products and of attention; compute norms,
                rotations, SwiGLU and Engram's reading again, which moves bytes and multiplies little
    full        keep the layer's input alone

Nothing in a layer draws random numbers or changes a buffer, so a recomputation repeats it exactly.

Compiled, `run` is one graph for all layers of a kind, however many there are and however often they run. Each
call would cast the weights that it multiplies, so those of layers that run more than once are cast before
(`narrowed`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spider.model.layers import compute_dtype
from spider.model.spider.config import Recompute
from spider.model.spider.moe import Experts

#: Ops whose outputs the selective way keeps.
_COSTLY = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "spider::grouped_mm_fp8"),
    *(f"aten::_scaled_dot_product_{way}_attention" for way in ("flash", "efficient", "cudnn")),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"),
}


def narrowed(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The weights of a layer that products with ``x`` would cast, cast, by name; none without autocast. A
    router's are kept wide, and what Engram multiplies with does so once."""
    cast: dict[str, Tensor] = {}
    if (dtype := compute_dtype(x)) == x.dtype:
        return cast
    for name, part in layer.named_modules():
        if isinstance(part, Experts):
            cast |= {f"{name}.{of}": made for of, made in part.casts(dtype).items()}
        elif isinstance(part, nn.Linear) and name.startswith(("attention.", "ffn.shared.")):
            cast[f"{name}.weight"] = part.weight.to(dtype)
    return cast


def run(layer: nn.Module, recompute: Recompute, weights: dict[str, Tensor], x: Tensor, *given: Any) -> Any:
    """``layer(x, *given)`` with these ``weights`` in place of its own; in training, of its activations no
    more is kept than ``recompute`` leaves."""
    called = partial(_with, layer, weights) if weights else layer
    if recompute == "none" or not (layer.training and torch.is_grad_enabled()):
        return called(x, *given)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(called, x, *given, **how)


def _with(layer: nn.Module, weights: dict[str, Tensor], *given: Any) -> Any:
    # Untying looks at every parameter, and a graph is made for each size of what it looks at.
    return functional_call(layer, weights, given, tie_weights=False)


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
