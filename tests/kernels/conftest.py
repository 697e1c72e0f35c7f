"""Fixtures for tests of kernels: the interpreter, and compilation for absent GPUs.

Tests marked ``interpreter`` run kernels on CPU tensors in Triton's interpreter. A kernel is interpreted or
compiled from the moment it is decorated, so they run in a process of their own, which ``test_interpreter.py``
starts; there ``TRITON_INTERPRET`` is set before anything is imported. By hand:
``TRITON_INTERPRET=1 pytest tests/kernels -m interpreter``.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

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


@pytest.fixture
def compiles(record_property):
    """Return ``compiles(kernel, num_warps=4, argument="*bf16", CONSTANT=4, ...)``: compile without spilling.

    A string, or a tuple of them, is an argument's type, anything else is a constant. Pointers and sizes are
    taken to be multiples of 16, as torch's allocations and real widths are: that is what lets a load be 16
    bytes wide. Registers and spills of every kernel are printed at the end of the test run.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compile(kernel, num_warps: int = 4, **arguments) -> None:
        types = {
            name: a for name, a in arguments.items() if isinstance(a[0] if isinstance(a, tuple) else a, str)
        }
        constants = {name: a for name, a in arguments.items() if name not in types}
        signature = {name: types.get(name, "constexpr") for name in arguments}
        wide = {
            (i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments.values()) if isinstance(a, str)
        }
        source = ASTSource(kernel, signature, constants, wide)
        for capability in (90, 120):
            target = GPUTarget("cuda", capability, 32)
            built = triton.compile(source, target=target, options={"num_warps": num_warps})
            registers, spilled = _resources(built.asm["ptx"], capability)
            name = f"{kernel.__module__.removeprefix('kernels.')}.{kernel.__name__}"
            shown = " ".join(str(a) for a in arguments.values())
            row = f"{name:40} sm_{capability:<4} {registers:4} registers  {spilled} spilled  {shown:.60}"
            record_property("kernel", row)
            assert spilled == 0, f"{name} spills {spilled} bytes on sm_{capability}"

    return compile


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, as the assembler reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert arch
    command = [get_ptxas(capability).path, f"--gpu-name={arch[1]}", "--verbose", "-o", os.devnull]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        told = subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stderr
    registers, spilled = (
        re.search(r"Used (\d+) registers", told),
        re.search(r"(\d+) bytes spill stores", told),
    )
    assert registers and spilled, told
    return int(registers[1]), int(spilled[1])
