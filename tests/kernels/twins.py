"""Pairs of a kernel and its twin: their arguments, and the tolerance of their results.

Each test file of an op defines its pairs. ``pairs()`` finds them all, so that the same arguments go through
Triton's interpreter (``test_twins.py``), through a GPU and through ``compute-sanitizer`` (``tests/gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Pair(NamedTuple):
    """A kernel and its twin, which take the same arguments and return one or several tensors."""

    kernel: Callable[..., Any]
    twin: Callable[..., Any]
    cases: st.SearchStrategy[Sequence[Any]]
    """Strategy for arguments on the CPU."""
    examples: Sequence[Sequence[Any]] = ()
    """Arguments that are always tested: edge cases, and more rows than one program takes."""
    rtol: float = 0.0
    """Relative tolerance of float32 results; 0 requires the same bits. If it is not 0, bfloat16 results
    may differ by two units in the last place, because the interpreter truncates where torch rounds."""
    atol: float = 0.0

    def check(self, arguments: Sequence[Any], device: str = "cpu") -> None:
        """Check that the kernel agrees with the twin and writes each element; on a GPU, the same twice."""
        arguments = on(device, arguments)
        want = _tensors(self.twin(*arguments))
        with poisoned():
            got = again = _tensors(self.kernel(*arguments))
            if device != "cpu":
                again = _tensors(self.kernel(*arguments))
        for i, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
            assert a.dtype == b.dtype, f"result {i} is {a.dtype}, not {b.dtype}"
            rtol = max(self.rtol, 2**-6) if self.rtol and a.dtype == torch.bfloat16 else self.rtol
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=self.atol, equal_nan=True, msg=lambda text, i=i: f"result {i}: {text}"
            )
            assert torch.equal(_bits(a), _bits(c)), f"result {i} differs from one call to the next"


def pairs() -> dict[str, Pair]:
    """Return every pair of every test file in this folder, by file and name."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for name, value in vars(import_module(f"tests.kernels.{file.stem}")).items():
            if isinstance(value, Pair):
                found[f"{file.stem.removeprefix('test_')}.{name}"] = value
    return found


def on(device: str, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments with their tensors moved to ``device``."""
    return [a.to(device) if isinstance(a, Tensor) else a for a in arguments]


def run_examples(device: str) -> int:
    """Call every kernel with its examples, and return the number of calls."""
    calls = [(pair, arguments) for pair in pairs().values() for arguments in pair.examples]
    for pair, arguments in calls:
        pair.kernel(*on(device, arguments))
    return len(calls)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch fill allocations with NaN, or the largest integer, which reveals elements left unwritten."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
