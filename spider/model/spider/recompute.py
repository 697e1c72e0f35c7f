"""What of a layer is kept for the backward pass, and what is computed once more there.

    none        keep everything
    selective   keep what costs most to make, the outputs of matrix products and of attention; compute norms,
                rotations, SwiGLU and Engram's reading again, which moves bytes and multiplies little
    full        keep the layer's input alone

Nothing in a layer draws random numbers or changes a buffer, so a recomputation repeats it exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spider.model.spider.config import Recompute

#: Ops whose outputs the selective way keeps.
_COSTLY = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "spider::grouped_mm_fp8"),
    *(f"aten::_scaled_dot_product_{way}_attention" for way in ("flash", "efficient", "cudnn")),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"),
}


def run(layer: nn.Module, recompute: Recompute, x: Tensor, *given: Any) -> Any:
    """``layer(x, *given)``; in training, of its activations no more is kept than ``recompute`` leaves."""
    if recompute == "none" or not (layer.training and torch.is_grad_enabled()):
        return layer(x, *given)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "full":
        return checkpoint(layer, x, *given, **how)
    how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(_uncached, layer, x, *given, **how)


def _uncached(layer: nn.Module, x: Tensor, *given: Any) -> Any:
    """The layer with each weight cast where it is used, or the second time would not do what the first did:
    autocast keeps the casts of a forward pass, of which a later loop would do none."""
    kind = x.device.type
    same: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
    }
    with torch.autocast(kind, **same, cache_enabled=False):
        return layer(x, *given)


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
