"""What a checkpoint holds of a model: its tensors by name, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def model_tensors(model: nn.Module, prefix: str = "model.") -> dict[str, Tensor]:
    """Parameters (a tied one once) and persistent buffers, as ``{prefix}{name}``."""
    kept = model.state_dict()
    named = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
    return {prefix + name: tensor.detach() for name, tensor in named.items()}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the ``model.*`` tensors' names, types, shapes and bytes, whatever files they lie in."""
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        t = tensors[name].detach()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]
