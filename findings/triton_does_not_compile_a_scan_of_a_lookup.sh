#!/usr/bin/env bash
# Triton 3.6 does not compile a legal kernel: a scan of what was looked up, whose sums are stored in three ways.
#
# Guess:     a kernel that only loads, adds and stores compiles for every number of warps, or the error names a line that
#            is wrong. So what torch's compiler generates, Triton can translate.
# Behaviour: the pass that removes conversions of layouts moves a sum behind its use ("operand #0 does not dominate this
#            use") and fails, for one warp or two. With four warps, or without the lookup, the same kernel compiles. In
#            torch 2.11 a training then ends with an InductorError that names a generated file.
# Seen with: triton 3.6.0, Python 3.11 and 3.12, for compute capability 9.0 (it needs no GPU), with 1, 2 and 4 warps:
#            with the lookup:    PassManager::run failed, PassManager::run failed, compiles
#            without the lookup: compiles, compiles, compiles
#            triton 3.7.1 compiles all of them.
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export TRITON_CACHE_DIR="$folder/cache"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check triton==3.6.0
cat > scan.py <<'PYTHON'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def kernel(index, score, table, numbers, places, following, rows, ROWS: tl.constexpr, LOOKUP: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    n = tl.arange(0, 64)[None, :]
    found = tl.load(index + (n + 64 * row), inside, other=0)
    value = tl.load(score + (n + 64 * row), inside, other=0.0).to(tl.float32)
    if LOOKUP:
        value = value + tl.load(table + found, inside)
    chosen = value > 0
    number = tl.associative_scan(chosen.to(tl.int64), 1, add)
    early = number <= 16
    both = chosen & early
    least = tl.minimum(number, 16)
    place = 17 * row + least
    late = both == 0
    after = place + late.to(tl.int64)
    tl.store(numbers + (n + 64 * row), number, inside)
    tl.store(places + (n + 64 * row), place, inside)
    tl.store(following + (n + 64 * row), after, inside)


def outcome(lookup: bool, warps: int) -> str:
    types = {"index": "*i64", "score": "*bf16", "table": "*fp32", "numbers": "*i64", "places": "*i64"}
    types |= {"following": "*i64", "rows": "i32", "ROWS": "constexpr", "LOOKUP": "constexpr"}
    source = ASTSource(kernel, types, {"ROWS": 1, "LOOKUP": lookup})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    except RuntimeError as error:
        return str(error)
    return "compiles"


found = {lookup: [outcome(lookup, warps) for warps in (1, 2, 4)] for lookup in (True, False)}
print("with the lookup:   ", ", ".join(found[True]))
print("without the lookup:", ", ".join(found[False]))
failed = "PassManager::run failed"
sys.exit(found != {True: [failed, failed, "compiles"], False: ["compiles"] * 3})
PYTHON
env/bin/python scan.py 2> errors || { cat errors; exit 1; }
grep -q "does not dominate this use" errors
