"""What torch compiled, kept in one file, so that another process compiles nothing.

Torch looks up graphs (traced, differentiated, lowered) and machine code in a folder, by the digest of what
they were made from. `kept` compiles into an empty one and packs it; `unpack` puts it where this process's
compiler looks. ``torch.compiler.save_cache_artifacts`` would keep the graphs alone, and on a CPU nine tenths
of the time is the C++ compiler's. What nobody can keep is the analysis of the bytecode; nor, in fp8, the
derivative's graph, because torchao's product is a function that cannot be pickled.

An archive holds *code*. Unpack none but the run's own, nor one made for another processor.
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

import torch

from spider import files
from spider.training.measurements import Compiled, Warmup
from spider.training.precision import device_name

log = logging.getLogger(__name__)


def describe(archive: Path, device: torch.device) -> Compiled:
    return Compiled(cache=archive.name, bytes=archive.stat().st_size, made_for=_processors(device))


def load(warmup: Path, device: torch.device) -> None:
    """Give the compiler what the warm-up compiled, if it left anything that runs here."""
    compiled = Warmup.read(warmup).compile
    if compiled is None or not (archive := warmup.with_name(compiled.cache)).exists():
        return
    if compiled.made_for != (here := _processors(device)):
        log.info("compile: the warm-up compiled for %s, this is %s; compiling again", compiled.made_for, here)
        return
    try:
        unpack(archive)
        log.info("compile: found what the warm-up compiled (%.1f MB)", archive.stat().st_size / 1e6)
    except ValueError as error:
        log.warning("compile: %s; compiling again", error)


def _processors(device: torch.device) -> str:
    """What machine code is made for: the processor with the instructions that it has, and the GPU."""
    name = features = platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        pairs = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        about = {key.strip(): value.strip() for key, value in pairs}
        name = about.get("model name", name)
        features = files.digest(about.get("flags") or about.get("Features"))
    gpu = f", {device_name(device)}" if device.type == "cuda" else ""
    return f"{name} ({features[:8]}){gpu}"


@contextlib.contextmanager
def kept(archive: Path) -> Iterator[None]:
    """Compile into an empty folder; what is in it at the end becomes ``archive``."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    _keep_whole_steps()
    with fresh_cache():
        yield
        folder = Path(cache_dir())
        with files.replacing(archive) as beside, tarfile.open(beside, "w:gz", compresslevel=1) as tar:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix != ".lock":
                    tar.add(path, path.relative_to(folder))


def unpack(archive: Path) -> None:
    """Make this process's compiler find what is in ``archive``; has to come before its first compilation.

    The files go into a folder of the machine's own (below ``TORCHINDUCTOR_CACHE_DIR``), once for all
    processes on it, to which the environment then points. `ValueError`: the archive is damaged.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _keep_whole_steps()
    around = Path(cache_dir())
    folder = around / f"spider-{files.sha256(archive)[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=around) as beside:
            whole = Path(beside) / "whole"
            try:
                with tarfile.open(archive, "r:gz") as tar:
                    files.unpack(tar, whole)
            except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{archive}: damaged ({error}); delete it and warm up again") from None
            with contextlib.suppress(OSError):  # another process was first
                whole.rename(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")  # where `fresh_cache` had it


def _keep_whole_steps() -> None:
    """Let torch keep the graphs of steps that enter and leave autocast inside."""
    from torch._inductor import config

    # It keeps graphs of functions that it knows to depend on nothing but their arguments, and these two are
    # not on its list. They do: device, dtype and switch are arguments, and so part of the graph's digest.
    for name in ("_enter_autocast", "_exit_autocast"):
        config.unsafe_marked_cacheable_functions[f"torch.amp.autocast_mode.{name}"] = torch.__version__
