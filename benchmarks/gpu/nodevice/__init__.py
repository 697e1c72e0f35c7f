"""Run torch on a CUDA runtime that has no device: everything of a GPU but its time and its numbers.

`runtime.c` says how it works. This module builds it, gives the environment that a Python process needs to
start on it, and reads what it counted. It needs a torch that is built with CUDA, and gcc. The headers are
those of torch's and Triton's wheels, or those of the toolkit that the variable ``CUDA`` names.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = [Path(__file__).with_name(f"{name}.c") for name in ("runtime", "driver", "cublas")]
WRITTEN_FOR = "2.11"
"""The version of torch whose calls `runtime.c` answers."""
ACTIVE = "NODEVICE" in os.environ
"""Whether this process runs without a device."""


def environment(folder: Path) -> dict[str, str]:
    """Build the runtime in a folder, and return the variables of a process that runs on it."""
    library = build(folder)
    paths = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}
    return {**paths, "NODEVICE": str(library), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def build(folder: Path) -> Path:
    """Compile the runtime unless that is done, and return the library.

    Raises:
        SystemExit: torch, a compiler or a header is missing; the message says what to do.
    """
    check_torch()
    library = folder / "libcuda.so.1"
    newest = max(path.stat().st_mtime for path in SOURCES[0].parent.glob("*.[ch]"))
    if not library.exists() or library.stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=gnu11", "-O2", "-w", "-shared", "-fPIC", "-fvisibility=hidden", *includes()]
        command = ["gcc", *flags, *map(str, SOURCES), "-o", f"{library}.{os.getpid()}", "-ldl", "-lpthread"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit("there is no gcc, which builds the runtime without a device; install it")
        if done.returncode:
            sys.exit(f"{done.stderr}\n{SOURCES[0].parent}: gcc fails; name CUDA's toolkit with CUDA=FOLDER")
        Path(f"{library}.{os.getpid()}").replace(library)
    return library


def check_torch() -> None:
    """Exit with the reason if torch cannot run on the runtime; say so if it was not written for it."""
    found = find_spec("torch")
    about = runpy.run_path(str(Path(found.origin).with_name("version.py"))) if found and found.origin else {}
    if about.get("cuda") is None:
        has = "torch without CUDA" if about else "no torch"
        there = f"call this with a Python that has them (pip install torch=={WRITTEN_FOR}.0, 6 GB)"
        sys.exit(f"{sys.executable}: has {has}, and only kernels for CUDA can be counted; {there}")
    if not about["__version__"].startswith(f"{WRITTEN_FOR}."):
        wrong = f"torch {about['__version__']}: the runtime without a device was written for {WRITTEN_FOR}"
        print(f"{wrong}; if this fails, add to {SOURCES[0]} what it misses", file=sys.stderr)


def includes() -> list[str]:
    """Return the compiler's options for CUDA's headers."""
    folders = [f"{os.environ['CUDA']}/include"] if "CUDA" in os.environ else []
    if nvidia := find_spec("nvidia"):
        folders += [f"{folder}/cu13/include" for folder in nvidia.submodule_search_locations or ()]
    if (
        triton := find_spec("triton")
    ) and triton.origin:  # it has the folder `crt`, which torch's wheels lack
        folders.append(str(Path(triton.origin).with_name("backends") / "nvidia/include"))
    return [f"-I{folder}" for folder in folders]


def pretend() -> None:
    """Let every truth that is read from the device be true, since its numbers are all zero.

    Else each loss would look as if it were not finite. What the host waits for stays the same.
    """
    import torch

    def true_for(read: Any) -> Any:
        def truth(self: torch.Tensor) -> Any:
            value = read(self)
            return True if self.dtype == torch.bool and (self.is_cuda or self.is_pinned()) else value

        return truth

    torch.Tensor.item = true_for(torch.Tensor.item)  # type: ignore[method-assign]
    torch.Tensor.__bool__ = true_for(torch.Tensor.__bool__)  # type: ignore[method-assign]


class Work(NamedTuple):
    """A kernel, a product of a shape, or a kind of copy, and how often it ran."""

    called: int
    """By the host."""
    replayed: int
    """In graphs that the host launched."""
    grid: str
    block: int
    shared: int
    name: str

    @property
    def times(self) -> int:
        return self.called + self.replayed

    @property
    def kind(self) -> str:
        """Return ``product``, ``copy``, ``memory set`` or ``kernel``."""
        known = (kind for kind in ("product", "copy", "memory set") if self.name.startswith(kind))
        return next(known, "kernel")


def read(dump: str) -> tuple[dict[str, int], list[Work]]:
    """Return the sums and each work of what ``nodevice_dump`` wrote."""
    lines = dump.splitlines()
    sums = dict(line[2:].rsplit(" ", 1) for line in lines if line.startswith(": "))
    work = [line.split("\t") for line in lines if not line.startswith(": ")]
    return {name: int(of) for name, of in sums.items()}, [
        Work(int(called), int(replayed), grid, int(block), int(shared), name)
        for called, replayed, grid, block, shared, name in work
    ]
