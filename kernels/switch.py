"""Ops of a Triton kernel and its torch twin, and the choice between the two.

One choice holds for the whole process. It is read when an op runs, not when it is traced, so a compiled model
follows a new choice without recompilation. Only this file imports Triton, which torch's CPU build does not
include. Where it is missing, ``jit`` and ``tl`` are stand-ins: kernels can be defined but not run.

float64 always uses the twin, because kernels accumulate in float32 and float64 serves as a reference. A
kernel runs on the current CUDA device, which must hold its tensors.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload

jit: Any
tl: Any
try:
    import triton

    jit, tl, INTERPRETED = triton.jit, triton.language, triton.knobs.runtime.interpret
except ModuleNotFoundError:
    triton = None
    jit, tl, INTERPRETED = lambda kernel: kernel, SimpleNamespace(constexpr=None), False

Mode = Literal["auto", "triton", "torch"]


class Choice(NamedTuple):
    """The implementation for CUDA tensors and the reason, for the log. Other tensors use the twin."""

    implementation: Literal["triton", "torch"]
    reason: str


_choice: Choice
_library = torch.library.Library("spider", "FRAGMENT")


def choose(mode: Mode) -> Choice:
    """Set the implementation of every op of this process, and return the choice.

    ``auto`` selects the kernels if Triton is installed and there is a CUDA device, else the twins. Under
    ``TRITON_INTERPRET=1`` kernels run on CPU tensors too.

    Raises:
        ValueError: ``mode`` is ``triton`` and the kernels cannot run here.
    """
    global _choice
    if mode not in get_args(Mode):
        raise ValueError(f"kernels: {mode!r} is not one of {', '.join(get_args(Mode))}")
    missing = _what_is_missing()
    if mode == "triton" and missing:
        raise ValueError(f"kernels: triton cannot run here: {missing}; choose auto or torch")
    if mode == "torch":
        _choice = Choice("torch", "configured")
    elif missing:
        _choice = Choice("torch", missing)
    else:
        where = "in Triton's interpreter" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
        _choice = Choice("triton", f"triton {triton.__version__} {where}")
    return _choice


def _what_is_missing() -> str:
    if triton is None:
        return "triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "there is no CUDA device"
    return ""


def use_triton(x: Tensor) -> bool:
    """Tell whether an op on ``x`` launches its kernel."""
    return _choice.implementation == "triton" and (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def op(
    name: str, launch: Callable[..., None], twin: Callable[..., Any]
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Register the decorated function as ``spider::<name>`` with ``torch.library``.

    It is registered below ``custom_op``, whose checks of every call cost more than a launch.

    The function checks the arguments and allocates the results, which is all that tracing needs. When the op
    runs, either ``launch(results, *arguments)`` fills the results by a kernel, given contiguous tensors, or
    ``twin(*arguments)`` computes others. The first argument, a tensor, decides.
    """

    def register(allocate: Callable[..., Any]) -> OpOverload:
        @wraps(allocate)
        def run(*arguments: Any) -> Any:
            results = allocate(*arguments)
            if use_triton(arguments[0]):
                launch(results, *(a.contiguous() if isinstance(a, Tensor) else a for a in arguments))
                return results
            del results  # The twin needs the memory.
            return twin(*arguments)

        schema = torch.library.infer_schema(run, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"spider::{name}", allocate, lib=_library)
        return getattr(torch.ops.spider, name).default

    return register


def check_shapes(op: str, **tensors: Tensor | None) -> None:
    """Check that the shapes of an op's arguments fit each other.

    The letters at the end of a name are its axes: ``w_NK`` is (N, K). A letter has one size in all tensors.
    A tensor that is None is left out. Shapes that fit are remembered, because every call of an op asks.

    Raises:
        ValueError: a tensor has another number of axes, or a letter has two sizes.
    """
    shapes = tuple([None if tensor is None else tensor.shape for tensor in tensors.values()])
    try:
        _check(op, tuple(tensors), shapes)
    except TypeError:  # a size is a symbol of the compiler, which cannot be remembered
        _check.__wrapped__(op, tuple(tensors), shapes)


@lru_cache(maxsize=1024)
def _check(op: str, names: Sequence[str], shapes: Sequence[torch.Size | None]) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, shape in zip(names, shapes, strict=True):
        if shape is None:
            continue
        axes = name.rpartition("_")[2]
        if len(shape) != len(axes):
            raise ValueError(f"{op}: {name} must be ({', '.join(axes)}), is {tuple(shape)}")
        for letter, size in zip(axes, shape, strict=True):
            known, first = sizes.setdefault(letter, (size, name))
            if size != known:
                raise ValueError(f"{op}: {letter} is {known} in {first} and {size} in {name} {tuple(shape)}")


def tile(size: int, largest: int | None = None) -> int:
    """Return the smallest power of two that is at least ``size``, limited to ``largest``."""
    covering = 1 << max(size - 1, 0).bit_length()
    return min(covering, largest or covering)


choose("auto")
