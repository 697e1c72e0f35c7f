"""What a run will cost, before it is paid: parameters, FLOPs, steps and memory, from the configuration alone.

The model is built on the meta device, so a description of a billion parameters takes a second and no memory,
and its counts are the model's own. Weights, gradients and optimizer state are exact: the optimizer is built
as well. Memory is that of one process: under FSDP it holds a share of these three, and while a micro-batch
runs all weights and gradients (fp8 weights would be smaller than what is counted here).

Activations are an estimate of what the forward pass keeps for the backward pass, in elements for each byte
(prelude, coda), or for each patch slot, layer and loop (core), of a micro-batch:

    a norm       2 D wide, 1 D narrow                                     its input, normalised, weighted
    attention    2 H (nope + rope) + H (nope + v) + 2 H v + 3 kv + rope   q, k, kv, output twice, latent
    SwiGLU       4 F                                                      gate and up, silu(gate), product
    MoE          K (2 D + 4 F_expert) + 4 F_shared                        rows in and out of K experts
    Engram       9 D wide        a loop around the layers   5 D wide

Wide is fp32 always; narrow is 2 bytes under autocast (which adds a 2-byte copy of the matrices), else 4.
Under checkpointing a core layer keeps its input alone, and one layer at a time is recomputed. The head adds
two fp32 copies of the logits. A test holds this against what a real forward pass keeps; temporaries, the
allocator's rest and the framework itself come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from spider.config import Config, StageSpec
from spider.model.spider.config import SpiderConfig
from spider.vocab import VOCAB_SIZE

FORMAT = 1


def describe(config: Config, run: str) -> dict[str, Any]:
    """A plain mapping, ready for JSON.

    Sizes are in bytes. ``flops_per_byte`` is of training, forward and backward, at the window and depth of
    the stage (at the top: of the last stage). ``precision: auto`` is counted as bf16 where the run asks for a
    GPU, else as fp32; ``counted_as`` says which. Steps, bytes and FLOPs of a stage that only ``max_hours``
    limits are null, and so are sums that it belongs to.

    Raises:
        ConfigError: no such run.
        ValueError: a stage ends before its average of the weights starts.
    """
    import torch

    from spider.model import build_model
    from spider.training.optim import build_optimizer, narrow_weights
    from spider.training.schedule import horizon

    block = config.run(run)
    specs = [config.stage(run, stage.name) for stage in block.stages]
    with torch.device("meta"):
        model = build_model(block.model)
    narrow_weights(model, block.optimizer)
    state = build_optimizer(model, block.optimizer, specs[0].settings.lr).tensors(model)
    parts = model.parameters_by_part()
    narrow = block.precision in ("bf16", "fp8") or (block.precision == "auto" and block.resources.gpus > 0)
    fixed = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size([p for p in model.parameters() if p.requires_grad]),
        "optimizer": _size(list(state.values())),
    }
    if narrow and block.optimizer.master_weights == "fp32":
        looked_up = parts.get("embedding", 0) + parts.get("engram", 0)
        fixed["autocast_copies"] = 2 * (model.num_parameters() - looked_up)
    shares = block.resources.processes if block.parallel == "fsdp" else 1
    if shares > 1:
        gathered = fixed["weights"] + fixed["gradients"]
        fixed |= {name: fixed[name] // shares for name in ("weights", "gradients", "optimizer")}
        fixed["gathered"] = gathered
    stages = []
    for spec in specs:
        s = spec.settings
        average = {"average": 4 * model.num_parameters() // shares} if s.ema else {}
        memory = {**fixed, **average, "activations": activation_bytes(spec, narrow=narrow)}
        flops = model.flops_per_token(s.seq_len, s.n_loops)
        steps = horizon(spec, model)
        tokens = None if steps is None else steps * spec.tokens_per_step
        kept = (
            "seq_len",
            "micro_batch",
            "grad_accum",
            "n_loops",
            "lr",
            "schedule",
            "warmup_steps",
            "min_lr_ratio",
            "max_hours",
        )
        stages.append(
            {
                "stage": spec.stage,
                "data": spec.data,
                "steps": steps,
                "tokens_per_step": spec.tokens_per_step,
                "bytes": tokens,
                "flops_per_byte": flops,
                "flops": None if tokens is None else flops * tokens,
                "memory": {**memory, "total": sum(memory.values())},
                **{name: getattr(s, name) for name in kept},
            }
        )
    return {
        "format": FORMAT,
        "run": run,
        "preset": block.model.preset,
        "parameters": model.num_parameters(),
        "parameters_by_part": parts,
        "flops_per_byte": stages[-1]["flops_per_byte"],
        "steps": _sum(stage["steps"] for stage in stages),
        "bytes": _sum(stage["bytes"] for stage in stages),
        "flops": _sum(stage["flops"] for stage in stages),
        "memory": max(stage["memory"]["total"] for stage in stages),
        "precision": block.precision,
        "counted_as": "bf16" if narrow else "fp32",
        "optimizer": block.optimizer.kind,
        "stages": stages,
    }


def activation_bytes(spec: StageSpec, *, narrow: bool) -> int:
    """Estimate of what one micro-batch's forward pass keeps; the module's docstring has the terms."""
    c, s = spec.model, spec.settings
    wide_size, narrow_size = 4, 2 if narrow else 4
    D, r = c.hidden, c.recurrence
    micro_batch = spec.micro_batch(spec.processes)
    bytes_ = micro_batch * s.seq_len
    slots = micro_batch * _slots(c, s.seq_len)
    loops = spec.loops
    loops = min(loops, r.bptt or loops)

    attention = _attention(c)
    dense = 4 * D * wide_size + (2 * D + attention + 4 * c.ffn_hidden) * narrow_size
    core = 4 * D * wide_size + (2 * D + attention + _experts(c)) * narrow_size
    engram = 9 * D * wide_size
    total = bytes_ * (c.prelude_layers + c.coda_layers) * dense
    total += slots * loops * 5 * D * wide_size
    if r.checkpointing:
        total += slots * (loops * r.layers * D * wide_size + core + engram)
    else:
        total += slots * loops * (r.layers * core + len(c.engram.layers) * engram)
    # Embedding, boundaries, the way down and up, the head's norm; then the logits and their gradient.
    return int(total + bytes_ * (8 * D * wide_size + 2 * VOCAB_SIZE * 4))


def _slots(c: SpiderConfig, seq_len: int) -> int:
    if c.boundary.kind == "fixed":
        return max(1, seq_len // c.boundary.stride) + 1
    return math.ceil(seq_len * c.boundary.capacity) + 1


def _attention(c: SpiderConfig) -> int:
    a = c.attention
    heads = 2 * (a.nope_dim + a.rope_dim) + (a.nope_dim + a.v_dim) + 2 * a.v_dim
    return a.heads * heads + 3 * a.kv_lora_rank + a.rope_dim


def _experts(c: SpiderConfig) -> int:
    if c.moe is None:
        return 4 * c.ffn_hidden
    return c.moe.top_k * (2 * c.hidden + 4 * c.moe.expert_hidden) + 4 * c.moe.shared_hidden


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum, unless a part of it is not known."""
    known = list(values)
    return None if None in known else sum(v for v in known if v is not None)


def _size(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ------------------------------------------------------------------------------------------------ for people


def render(found: dict[str, Any]) -> None:
    """Print a description as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    total = found["parameters"]
    console.print(f"[bold]{found['run']}[/] ({found['preset']}): {total:,} parameters")
    table = Table(box=None, pad_edge=False)
    table.add_column("Part")
    table.add_column("Parameters", justify="right")
    table.add_column("Share", justify="right")
    for part, count in found["parameters_by_part"].items():
        table.add_row(part.replace("_", " "), f"{count:,}", f"{count / total:.1%}")
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("Stage")
    for title in ("Data", "Bytes", "Steps", "Bytes a step", "Window", "Loops", "FLOPs a byte", "Memory"):
        table.add_column(title, justify="left" if title == "Data" else "right")
    for stage in found["stages"]:
        table.add_row(
            stage["stage"],
            stage["data"],
            "?" if stage["bytes"] is None else quantity(stage["bytes"], "B"),
            f"{stage['max_hours']:g} h" if stage["steps"] is None else f"{stage['steps']:,}",
            quantity(stage["tokens_per_step"], "B"),
            f"{stage['seq_len']:,}",
            str(stage["n_loops"]),
            quantity(stage["flops_per_byte"], ""),
            quantity(stage["memory"]["total"], "B"),
        )
    console.print(table)
    largest = max(found["stages"], key=lambda stage: stage["memory"]["total"])
    parts = [
        f"{k.replace('_', ' ')} {quantity(v, 'B')}" for k, v in largest["memory"].items() if k != "total"
    ]
    console.print()
    if found["steps"] is None:
        console.print("A clock ends some of it (max_hours): how much it trains depends on the machine.")
    else:
        work = quantity(found["flops"], "FLOP")
        console.print(f"{quantity(found['bytes'], 'B')} in {found['steps']:,} steps, {work} in all.")
    counted = f"Memory of a process, counted as {found['counted_as']}"
    console.print(f"{counted}: {', '.join(parts)} (activations: an estimate).")


def render_list(runs: list[dict[str, Any]]) -> None:
    """Print several descriptions, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("Run", no_wrap=True)
    for title in ("Parameters", "FLOPs a byte", "Steps", "Bytes", "FLOPs", "Memory"):
        table.add_column(title, justify="right", no_wrap=True)
    for found in runs:
        known = found["steps"] is not None
        table.add_row(
            found["run"],
            quantity(found["parameters"], ""),
            quantity(found["flops_per_byte"], ""),
            f"{found['steps']:,}" if known else "?",
            quantity(found["bytes"], "B") if known else "?",
            quantity(found["flops"], "") if known else "?",
            quantity(found["memory"], "B"),
        )
    Console(highlight=False).print(table)


def quantity(value: float, unit: str) -> str:
    """Three figures and a decimal prefix: ``3.20 MB``."""
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z")
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    digits = (
        0 if power == 0 and float(value).is_integer() else max(0, 2 - int(math.log10(max(abs(value), 1))))
    )
    return f"{value:.{digits}f} {prefixes[power]}{unit}".strip()
