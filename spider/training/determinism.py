"""One order for every sum on a GPU, so that a run ends with the same bytes there, too.

Left to itself torch adds floats there as threads happen to arrive (the gradient of the queries in
FlashAttention, lookups and scatters that a compiler makes), and its compiler times several ways to cut a sum
into pieces and takes the fastest, which need not be that of the process before. A switch of torch's takes
other ways for all of these, or raises where it knows of none. Ours are in one order as they are (`kernels`).
"""

from __future__ import annotations

import os

import torch


def one_order(device: torch.device) -> None:
    """Set the switch for this process, if it computes on a GPU; before anything is compiled, for a compiler's
    work depends on it."""
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # room for products that is always the same
    # That is for finding faults, and not free.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
