"""Fixtures for tests of kernels: the choice of what runs them.

Tests marked ``interpreter`` run kernels on CPU tensors in Triton's interpreter. A kernel is interpreted or
compiled from the moment it is decorated, so they run in a process of their own, which ``test_interpreter.py``
starts; there ``TRITON_INTERPRET`` is set before anything is imported. By hand:
``TRITON_INTERPRET=1 pytest tests/kernels -m interpreter``.
"""

from __future__ import annotations

import pytest
import torch

from kernels import switch


@pytest.fixture(autouse=True)
def kernels(request):
    """Run kernels under the interpreter, and twins elsewhere, unless the process has chosen."""
    if request.node.get_closest_marker("interpreter"):
        if not switch.INTERPRETED:
            pytest.skip("needs TRITON_INTERPRET=1 in the environment")
        switch.choose("triton")
        # torch fills allocations with NaN, or the largest integer, which reveals elements left unwritten.
        torch.use_deterministic_algorithms(True)
    yield
    switch.choose("auto")
