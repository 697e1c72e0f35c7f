"""What holds for all ops: torch can trace them, they refuse what does not fit, and their kernels compile.

A kernel is compiled for two GPUs that are not here, as its op launches it at the sizes of models. The launch
is recorded and not run. No kernel may spill registers.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import embedding as lookup
from kernels import switch
from kernels.aux_fi import aux_fi
from kernels.cast_fp8 import cast_columns_fp8, cast_rows_fp8
from kernels.engram_conv import engram_conv, engram_conv_backward
from kernels.engram_gate import engram_gate, engram_gate_backward
from kernels.engram_hash import engram_hash
from kernels.expand_reduce import expand_to_fused, reduce_fused, reduce_fused_backward
from kernels.get_fused_mapping import fused_mapping
from kernels.grouped_mm_fp8 import grouped_mm_fp8
from kernels.normalize_weight import normalize_weight
from kernels.route import route
from kernels.segment_sum import segment_expand, segment_sum
from kernels.sum_tensors import sum_tensors
from kernels.topk_gate import topk_gate
from spider.model.spider.engram import multiplier, primes_from

F32, BF16, I32, I64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
EPS = 1e-5
ROUTE = torch.ops.spider.route.default
ROUTE_BACKWARD = torch.ops.spider.route_backward.default
#: Orders, multipliers and primes of an Engram, and the ids of BOS and PAD.
HASH = [3, 4, 5, 6], [multiplier(i) for i in range(6)], primes_from(81_307, 16), 257, 256


def z(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def grad(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def routed(E: int, K: int) -> tuple[Any, ...]:
    return z(64, E), z(64, K), z(64, K, dtype=I64), z(64), [z(64, K), z(64, E), z(64)]


def expanded(K: int, dtype: torch.dtype, D: int = 2048) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and the maps to their rows."""
    return z(64, D, dtype=dtype), z(64, K, dtype=I32), z(1024, dtype=I32)


def reduced(K: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return rows, weights and maps."""
    return z(1024, 2048, dtype=dtype), z(64, K), z(64, K, dtype=I32), z(1024, dtype=I32)


def gated(D: int, state: torch.dtype, value: torch.dtype) -> tuple[Any, ...]:
    """Return state, key and value with their dtypes in a model, weight and epsilon."""
    return (
        z(16, D, dtype=state),
        z(16, D, dtype=F32 if state == F32 else value),
        z(16, D, dtype=value),
        z(D),
        EPS,
    )


def convolved(dtype: torch.dtype) -> tuple[Any, ...]:
    return z(64, 2048, dtype=dtype), z(64, dtype=I64), z(4, 2048), z(2048), EPS


def segments(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return z(64, 2048, dtype=dtype), z(64, dtype=I64), z(17, dtype=I64)


def gradient_of_lookup(dtype: torch.dtype) -> Tensor:
    ids, *order = lookup._sort(z(64, dtype=I64), 272)
    return lookup._embedding_backward(z(64, 2048, dtype=dtype), ids, 272, *order)


#: Calls of ops at the sizes of models: of spider-1b, and of a router of 256 experts.
LAUNCHED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (aux_fi, (z(2048, 2, dtype=I64), 32, 2)),
    (aux_fi, (z(2048, 8, dtype=I64), 256, 8)),
    *((cast_rows_fp8, (z(64, C, dtype=dtype),)) for C, dtype in ((2048, BF16), (8192, F32))),
    *((cast_columns_fp8, (z(2, 2048, 1024, dtype=dtype),)) for dtype in (F32, BF16)),
    (engram_conv, convolved(BF16)),
    (engram_conv_backward, (z(64, 2048, dtype=BF16), *convolved(BF16))),
    (engram_hash, (z(2, 256, dtype=I64), *HASH)),
    *((expand_to_fused, expanded(K, BF16)) for K in (2, 8)),
    *((fused_mapping, (z(2048, K, dtype=I64), E, 16)) for E, K in ((32, 2), (256, 8))),
    *((normalize_weight, (z(2048, K),)) for K in (2, 8)),
    *((ROUTE, (z(2048, E), z(E), K, z(2048, dtype=torch.bool), 16)) for E, K in ((32, 2), (256, 8))),
    *((ROUTE_BACKWARD, routed(E, K)) for E, K in ((32, 2), (256, 8))),
    (segment_sum, segments(BF16)),
    (segment_expand, (z(16, 2048, dtype=BF16), *segments(BF16)[1:])),
    (gradient_of_lookup, (BF16,)),
    (sum_tensors, ([z(4096, dtype=BF16)] * 6, F32)),
    *((topk_gate, (z(2048, E), K)) for E, K in ((32, 2), (256, 8))),
]
for dtype in (F32, BF16):
    LAUNCHED += [
        (reduce_fused, reduced(2, dtype)),
        (reduce_fused, (reduced(2, dtype)[0], None, *reduced(2, dtype)[2:])),
    ]
    added = z(64, 2048, dtype=dtype)
    LAUNCHED += [(reduce_fused, (*reduced(8, dtype), added, added))]
    LAUNCHED += [(reduce_fused_backward, (added, *reduced(K, dtype))) for K in (2, 8)]
for D, state, value in ((2048, F32, F32), (2048, F32, BF16), (4096, F32, BF16)):
    LAUNCHED += [(engram_gate, made := gated(D, state, value))]
    LAUNCHED += [(engram_gate_backward, (z(16, D), *made))]

TYPES = {F32: "fp32", BF16: "bf16", I32: "i32", I64: "i64", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv"}


def type_of(value: Any) -> Any:
    """Return the type of an argument in Triton's words; None for a constant."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    return {int: "i32", float: "fp32"}.get(type(value))


@pytest.mark.parametrize(
    ("op", "arguments"),
    LAUNCHED,
    ids=[f"{getattr(op, '__name__', op)}-{i}" for i, (op, _) in enumerate(LAUNCHED)],
)
def test_kernels_compile_for_gpus_and_spill_nothing(op, arguments, monkeypatch, record_property):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launches = []
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda kernel, *given, **options: launches.append((kernel, given, options))
    )
    monkeypatch.setattr(switch, "INTERPRETED", True)  # kernels then take tensors of the CPU
    switch.choose("triton")
    op(*arguments)
    assert launches
    for kernel, given, options in launches:
        values = dict(zip(kernel.arg_names, given, strict=False)) | options
        types = {p.name: None if p.is_constexpr else type_of(values[p.name]) for p in kernel.params}
        constants = {name: values[name] for name, kind in types.items() if kind is None}
        signature = {name: "constexpr" if kind is None else kind for name, kind in types.items()}
        # Allocations and real widths are multiples of 16, which lets a load be 16 bytes wide.
        wide = {
            (i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if isinstance(kind, str)
        }
        source = ASTSource(kernel, signature, constants, wide)
        for capability in (90, 120):
            built = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": options.get("num_warps", 4)},
            )
            registers, spilled = _resources(built.asm["ptx"], capability)
            name = f"{kernel.__module__.removeprefix('kernels.')}.{kernel.__name__}"
            record_property("kernel", f"{name:40} sm_{capability:<4} {registers:4} registers")
            assert spilled == 0, f"{name} spills {spilled} bytes on sm_{capability}"


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
        re.search(rf"{what}", told) for what in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    )
    assert registers and spilled, told
    return int(registers[1]), int(spilled[1])


PLACES = torch.tensor([[0], [2]]), torch.tensor([0, -1, 1])
NINE = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 3]), torch.tensor([0, 2, 3, 8])
IDS = torch.tensor([[1, 3], [1, 0]])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aux_fi, (torch.tensor([[0, 2], [2, -1]]), 3, 2)),
        (cast_rows_fp8, (z(3, 16),)),
        (cast_columns_fp8, (z(2, 3, 16),)),
        (lookup._embedding, (IDS, grad(4, 3))),
        (lookup._embedding, (IDS, grad(4, 3), *lookup._sort(IDS, 4)[1:])),
        (lookup._embedding_backward, (z(2, 2, 3), IDS, 4)),
        (engram_conv, (grad(3, 4), torch.tensor([0, 1, 0]), grad(2, 4), grad(4), EPS)),
        (engram_gate, (grad(3, 4), grad(3, 4, dtype=BF16), grad(3, 4, dtype=BF16), grad(4), EPS)),
        (engram_hash, (torch.tensor([[257, 97, 98, 99]]), *HASH)),
        (expand_to_fused, (grad(2, 3), *PLACES)),
        (fused_mapping, (torch.tensor([[0, 2], [2, -1]]), 3, 4)),
        (normalize_weight, (grad(3, 2),)),
        (reduce_fused, (grad(3, 2), grad(2, 1), *PLACES, grad(2, 2), grad(2, 2))),
        (reduce_fused, (grad(3, 2), None, *PLACES)),
        (ROUTE, (grad(3, 4), z(4), 2, torch.tensor([True, False, True]), 4)),
        (segment_sum, (grad(9, 4), *NINE)),
        (segment_expand, (grad(3, 4), *NINE)),
        (topk_gate, (z(3, 4), 2)),
    ],
)
def test_torch_library_finds_nothing_wrong(op, arguments):
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(
    ("op", "arguments", "problem"),
    [
        (engram_hash, (z(2, 3, dtype=I64), [3, 7], *HASH[1:]), "engram_hash: orders"),
        (expand_to_fused, (z(3, 2), z(2, 1, dtype=I32), z(4)), "N is 3 in x_ND and 2 in token_to_pos_NK"),
        (grouped_mm_fp8, (z(96, 64), z(3, 64, 40), z(3)), "with D and F multiples of 16"),
        (route, (z(2, 4), None, 5), "k = 5 must be in"),
        (sum_tensors, ([z(2), z(3)], F32), "sum_tensors: the tensors must have one shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(op, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        op(*arguments)
