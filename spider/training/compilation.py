"""Compile the forward pass, and keep what torch compiled in a file, so that another process compiles nothing.

Torch finds graphs (traced, differentiated, lowered) and machine code in a folder, by the digest of their
sources. `saved_to` compiles into an empty folder and packs it; `unpack` puts the content where this process's
compiler looks. ``torch.compiler.save_cache_artifacts`` would keep only the graphs, and on a CPU nine
tenths of the time is the C++ compiler's. Two things cannot be kept: the analysis of the bytecode and, in fp8,
the graph of the derivative, because torchao's product is a function that cannot be pickled.

An archive holds *code*. Unpack only the run's own archive, made for this kind of processor.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import platform
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from spider.checkpoints.records import Compiled, Warmup
from spider.common import files
from spider.model.interface import Model
from spider.training.precision import device_name

log = logging.getLogger(__name__)


def compile_forward(model: Model, **options: Any) -> None:
    """Compile the forward pass of the model inside FSDP or DDP; ``options`` are those of `torch.compile`."""
    # DDP would cut the graph at the ends of its buckets; the warm-up compiled one graph.
    torch._dynamo.config.optimize_ddp = False
    # The backward pass is traced while autocast is on, and would narrow what the forward pass kept wide.
    torch._functorch.config.backward_pass_autocast = "off"
    # Of one function for all layers, this many kinds of layers may have a graph of their own.
    torch._dynamo.config.recompile_limit = 32
    for module, name in model.parts_to_compile():
        setattr(module, name, torch.compile(getattr(module, name), dynamic=False, **options))


def describe(archive: Path, device: torch.device) -> Compiled:
    """Return the archive's entry in the record of the warm-up."""
    return Compiled(cache=archive.name, bytes=archive.stat().st_size, made_for=_processors(device))


def load(warmup: Path, device: torch.device) -> None:
    """Unpack the warm-up's archive for the compiler, if there is one and its code runs on this machine."""
    compiled = Warmup.read(warmup).compile
    if compiled is None:
        return
    archive = warmup.with_name(compiled.cache)
    if not archive.exists():
        return
    here = _processors(device)
    if compiled.made_for != here:
        log.info("compile: the warm-up compiled for %s, this is %s; compiling again", compiled.made_for, here)
        return
    try:
        unpack(archive)
        log.info("compile: using the warm-up's compiled code (%.1f MB)", archive.stat().st_size / 1e6)
    except ValueError as error:
        log.warning("compile: %s; compiling again", error)


def compiler_failed(error: BaseException) -> str | None:
    """Return what happened and what to do if torch's compiler raised an error, else None."""
    if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return None
    reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
    return f"torch {torch.__version__} cannot compile this model here ({reason}); set compile: false"


def _processors(device: torch.device) -> str:
    """Return what machine code depends on: the processor, a digest of its instruction sets, and the GPU."""
    name = features = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in pairs}
        name = fields.get("model name", name)
        features = files.digest(fields.get("flags") or fields.get("Features"))
    gpu = f", {device_name(device)}" if device.type == "cuda" else ""
    return f"{name} ({features[:8]}){gpu}"


@contextlib.contextmanager
def saved_to(archive: Path) -> Iterator[None]:
    """Compile into an empty folder and pack its content into ``archive`` at the end."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    _cache_autocast()
    with fresh_cache():
        yield
        folder = Path(cache_dir())
        with files.replacing(archive) as beside, tarfile.open(beside, "w:gz", compresslevel=1) as tar:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix != ".lock":
                    tar.add(path, path.relative_to(folder))


def unpack(archive: Path) -> None:
    """Make this process's compiler use the content of ``archive``; call it before the first compilation.

    The files go into a local folder below ``TORCHINDUCTOR_CACHE_DIR``, once for all processes on the machine,
    and the environment then points to it.

    Raises:
        ValueError: the archive is damaged.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _cache_autocast()
    caches = Path(cache_dir())
    folder = caches / f"spider-{files.sha256(archive)[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=caches) as beside:
            whole = Path(beside) / "whole"
            try:
                with tarfile.open(archive, "r:gz") as tar:
                    files.unpack(tar, whole)
            except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{archive}: damaged ({error}); delete it and warm up again") from None
            with contextlib.suppress(OSError):  # another process was first
                whole.rename(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")  # as in `fresh_cache`


def _cache_autocast() -> None:
    """Let torch cache the graphs of steps that enter and leave autocast inside."""
    from torch._inductor import config

    # Torch caches graphs only of functions on its list of pure functions, which lacks these two. They are
    # pure: device, dtype and switch are arguments, and so part of the graph's digest.
    for name in ("_enter_autocast", "_exit_autocast"):
        config.unsafe_marked_cacheable_functions[f"torch.amp.autocast_mode.{name}"] = torch.__version__
