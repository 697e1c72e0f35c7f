"""How a process of the command line allocates memory for tensors, on a CPU and on a GPU.

A training step allocates and frees the same gradients and activations every time. By default glibc returns
large blocks to the kernel at once, and the kernel clears every page again when it is touched. With the demo's
model that takes a sixth of the step on a CPU.

On a GPU, torch keeps what is freed. By default it keeps it in segments of a fixed size, and a tensor that is
larger than every free segment needs a new one. Segments that can grow leave fewer such gaps.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)


#: Variables that torch's allocator reads once, when it first allocates.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments() -> None:
    """Let segments of GPU memory grow, in this process and in those it starts, unless the user's environment
    sets torch's allocator. Has to be called before torch allocates."""
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Let this process's allocator reuse what it freed; does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # never
        mallopt(_MMAP_MAX, 0)
