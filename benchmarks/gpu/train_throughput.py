"""Training speed: bytes or tokens a second, memory and MFU of each way to run a step.

    python benchmarks/gpu/train_throughput.py [--rows 'headline, bf16' ...]

Shapes: the headline's is the seed's, spider-1b with 4 micro-batches of 112 windows of 256 bytes and 6 loops;
every preset named ``spider-1b*`` is measured as it stands as well, and gpt-d12 as gpt.yaml has it, 8
micro-batches of 32 windows of 2,048 made-up ids of 32,768. Ways, all with the preset's own optimizer:

    bf16           experts in one grouped product, compiled
    fp8            the same, linear layers in fp8 with a scale a tensor
    fp8-rowwise    the same with a scale a row
    bf16, kept     bf16 with no activation recomputed; "recomputed": with all of the core's
    bf16, documents
                   of the GPT: rows are packed, and an id sees its own document only; nothing of that may be
                   compiled anew in the 64 batches that are counted
    bf16, parts    where the time of a bf16 step goes, by group of kernels; all kernels are in the file
    seed           experts in a Python loop, nothing compiled, bf16. (The seed ran fp8, which uncompiled is
                   slower than bf16: this is its way at its best.)

Each trains in a process of its own, through the trainer itself: text from the loader, ``grad_accum`` forward
and backward passes, clipping, update. The first `SETTLE` steps are left out; a step's time is the median of
the next `STEPS`, waiting for the GPU at the end of each. Peak memory is the allocator's, from then on, beside
what ``spider describe`` counts. MFU counts neither recomputation nor what the model skips (but of documents,
whole rows), against the dense peak of the row's own arithmetic. What is compiled is kept: a killed row ends
sooner the next time.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import questions
import torch
from questions import FOLDER, ROOT, goal
from steps import config_of, first_steps
from texts import text_for

from spider.config import Config
from spider.describe import describe
from spider.model import build_model
from spider.training.device import peak_flops

HEADLINE = {"micro_batch": 112, "seq_len": 256, "grad_accum": 4, "n_loops": 6}
PRESET = ROOT / "presets/spider-1b.yaml"
GPT = ROOT / "benchmarks/gpu/gpt.yaml"
D12, PACKED = "gpt-d12", "bf16, documents"

BF16 = {"precision": "bf16", "compile": True}
FP8 = {"precision": "fp8", "compile": True}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp8": {**FP8, "fp8_recipe": "tensorwise"},
    "fp8-rowwise": {**FP8, "fp8_recipe": "rowwise"},
    "bf16, kept": {**BF16, "model": {"recurrence": {"checkpointing": False}}},
    "bf16, recomputed": {**BF16, "model": {"recurrence": {"checkpointing": True}}},
    PACKED: {**BF16, "defaults": {"packing": "best_fit", "attend": "document"}},
    "bf16, parts": BF16,
    "seed": {"precision": "bf16", "compile": False, "model": {"moe": {"implementation": "loop"}}},
}
#: Those of the GPT.
GPT_WAYS = ("bf16", PACKED, "fp8")
#: What a row takes at most, mostly to compile; of the GPT, whose layers are few and plain, `GPT_SECONDS`.
SECONDS = dict.fromkeys(WAYS, 360) | {"fp8": 420, "fp8-rowwise": 420, "bf16, parts": 200, "seed": 150}
GPT_SECONDS = 180
STEPS, SETTLE = 8, 3

#: Kernels, and a CPU's operators, by what they do; the first pattern found in the name counts.
GROUPS = {
    "compiled reductions": r"triton_(red|per)",
    "compiled elementwise": r"triton_poi|cpp_fused",
    "attention": r"flash|fmha|sdpa|attention",
    "grouped products": r"group",
    "fp8 products": r"(gemm|cutlass|nvjet|scaled_mm).*(e4m3|e5m2|f8|fp8)|nvjet_q|scaled_mm",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|aten::(b|add|badd)?mm|triton_(tem|mm)",
    "optimizer": r"adam|multi_tensor|foreach",
    "sorting and lookups": r"sort|radix|scatter|gather|index|embedding|topk|scan|cumsum",
    "copies and casts": r"memcpy|memset|copy|_to\b|fill|zero|cat\b",
    "other reductions": r"reduce|softmax|norm|sum|mean",
    "other elementwise": r"elementwise|aten::(mul|add|sub|div|neg|silu|exp|sigmoid|where)",
}


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("train_throughput", chosen, goals_of)
    for name, (configuration, changes) in rows_of(chosen.rehearse).items():
        steps = (2, 1) if chosen.rehearse else (STEPS, SETTLE)
        way = name.partition(", ")[2]
        call = partial(measure, configuration, changes, *steps, profile=way.endswith("parts"))
        seconds = GPT_SECONDS if configuration == GPT else SECONDS[way]
        question.measure(name, seconds, call, said_parts if way.endswith("parts") else said)
    question.end()


def rows_of(rehearse: bool) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The configuration of each row and what is changed in it, in order of worth."""
    if rehearse:
        smoke = ROOT / "presets/smoke.yaml"
        slow = {"precision": "fp32", "compile": False}
        size = {"hidden": 32, "layers": 2, "heads": 2, "short_window": 16}
        shape = {"seq_len": 64, "micro_batch": 2, "grad_accum": 2, **WAYS[PACKED]["defaults"]}
        return {
            "smoke, bf16, parts": (smoke, slow),
            f"small gpt, {PACKED}": (GPT, {**slow, "model": size, "defaults": shape}),
        }
    rows = {
        f"headline, {way}": (PRESET, {**WAYS[way], "defaults": HEADLINE}) for way in WAYS if way != PACKED
    }
    rows |= {f"{D12}, {way}": (GPT, WAYS[way]) for way in GPT_WAYS}
    for preset in sorted(PRESET.parent.glob("spider-1b*.yaml")):
        rows |= {f"{preset.stem}, {way}": (preset, WAYS[way]) for way in ("bf16", "fp8")}
    return rows


def measure(
    configuration: Path, changes: Mapping[str, Any], steps: int, settle: int, *, profile: bool = False
) -> dict[str, Any]:
    """One row's figures; `RuntimeError` with what its training said."""
    config, folder = config_of(configuration, **changes), FOLDER / "work/throughput"
    spec = config.stage(next(iter(config.runs)), "steps")
    shutil.rmtree(folder, ignore_errors=True)
    found = first_steps(spec, folder, settle + steps, settle=settle, profile=profile, data=text_for(spec))
    shutil.rmtree(folder, ignore_errors=True)
    if "error" in found:
        raise RuntimeError(found["error"])
    with torch.device("meta"):
        model = build_model(spec.model)
    seconds = median(found["steps"][settle:])
    flops = model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops) * spec.tokens_per_step
    peak = peak_flops(found["device"], spec.precision)
    s, optimizer = spec.settings, spec.optimizer
    loops = f", {s.n_loops} loops" if spec.model.looped else ""
    return {
        "shape": f"{s.grad_accum} x {s.micro_batch} x {s.seq_len}{loops}",
        "optimizer": f"{optimizer.kind}, {optimizer.master_weights} weights",
        "seconds_per_step": seconds,
        "tokens_per_second": spec.tokens_per_step / seconds,
        "unit": "bytes" if spec.model.vocab_size is None else "tokens",
        "compiled_again": found["compiled_again"],
        "peak_memory": found["peak_memory"],
        "described_memory": described(config),
        "mfu": flops / seconds / peak if peak else None,
        "first_step_seconds": found["steps"][0],
        "steps": found["steps"],
        "parts": found["parts"],
    }


def described(config: Config) -> dict[str, int]:
    """Memory as ``spider describe`` counts it, by what takes it, and its sum."""
    return describe(config, next(iter(config.runs)))["stages"][0]["memory"]


def said(row: Mapping[str, Any]) -> str:
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    speed = (
        f"{row['tokens_per_second']:,.0f} {row['unit']}/s, {1000 * row['seconds_per_step']:,.1f} ms a step"
    )
    total = row["described_memory"]["total"] / 1e9
    memory = f"peak {row['peak_memory'] / 1e9:.2f} GB (described: {total:.2f})"
    first = f"first step {row['first_step_seconds']:.0f} s"
    again = f", {row['compiled_again']} graphs COMPILED AGAIN" if row["compiled_again"] else ""
    return f"{speed}, {memory}, MFU {mfu}, {first}{again}; {row['shape']}, {row['optimizer']}"


def said_parts(row: Mapping[str, Any]) -> str:
    """By group of kernels, the largest first."""
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, seconds, calls in row["parts"]:
        group = groups[group_of(name)]
        group[0] += seconds
        group[1] += calls
    total = sum(seconds for seconds, _ in groups.values())
    lines = [f"{1000 * total:,.1f} ms of work in a step of {1000 * row['seconds_per_step']:,.1f} ms"]
    for name, (seconds, calls) in sorted(groups.items(), key=lambda group: -group[1][0]):
        lines.append(f"    {name}: {1000 * seconds:,.2f} ms, {seconds / total:.1%}, {calls:,.0f} calls")
    return "\n".join(lines)


def goals_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the rows are to reach."""
    measured = {name: row["tokens_per_second"] for name, row in rows.items() if not name.endswith("parts")}
    speed = {name[10:]: of for name, of in measured.items() if name.startswith("headline, ")}
    seed = speed.pop("seed", None)
    top = max(speed.values(), default=None)
    fp8 = max((of for way, of in speed.items() if way.startswith("fp8")), default=None)
    ratio = fp8 / speed["bf16"] if fp8 and "bf16" in speed else None
    small = rows.get("spider-1b-25gb, bf16")
    memory = small["peak_memory"] / 1e9 if small else None
    again = [row["compiled_again"] for name, row in rows.items() if name.startswith(f"{D12}, ")]
    return [
        goal("at least 130,000 bytes/s at the headline's shape", top, lambda x: x >= 130_000),
        goal("then 200,000", top, lambda x: x >= 200_000),
        goal("fp8 at least 1.1 times bf16", ratio, lambda x: x >= 1.1),
        goal("then 1.2", ratio, lambda x: x >= 1.2),
        goal("at least 8 times the seed's way", top / seed if top and seed else None, lambda x: x >= 8),
        goal("spider-1b-25gb at most 25 GB at its peak", memory, lambda x: x <= 25),
        goal("gpt-d12: at least 400,000 tokens/s", measured.get(f"{D12}, bf16"), lambda x: x >= 400_000),
        goal("gpt-d12: no graph compiled again", float(sum(again)) if again else None, lambda x: not x),
    ]


def group_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


if __name__ == "__main__":
    main()
