"""Recompute in the backward pass what a layer would keep for it: less memory for more time.

    none        Keep all activations.
    selective   Keep the outputs of matrix products and of attention. Recompute norms, rotations, gates and
                what tables hold, which move bytes and multiply little.
    full        Keep only the layer's input.

A layer draws no random numbers and changes no buffer, so recomputation repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spider.config.model import Recompute

#: Operators whose outputs selective recomputation keeps.
_COSTLY = {
    "aten::mm",
    "aten::mm.dtype",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "spider::grouped_mm_fp8",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}


def recomputing(layer: nn.Module, recompute: Recompute, call: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``call(*inputs)``, which runs a layer; in training, keep only the activations that ``recompute``
    leaves."""
    if recompute == "none" or not (layer.training and torch.is_grad_enabled()):
        return call(*inputs)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        if not torch.compiler.is_compiling():
            # A weight that an earlier call cast is cast again in the backward pass, which counts the casts.
            torch.clear_autocast_cache()
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(call, *inputs, **options)


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
