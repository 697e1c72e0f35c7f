"""Keep freed memory for the next step instead of handing it back to the kernel.

A training step allocates and frees the same gradients and activations every time. By default glibc returns
large blocks at once, and the kernel clears every page again on the next touch: with the demo's model that is
a sixth of the step on a CPU (benchmarks/cpu_step.py). A GPU has CUDA's caching allocator for it.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Let this process's allocator reuse what it freed; does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # never
        mallopt(_MMAP_MAX, 0)
