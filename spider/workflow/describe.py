"""Estimate the cost of a run before training: parameters, FLOPs, steps and memory.

The model is built on the meta device, so a description of a billion parameters takes a second and no memory.
Memory is that of one process (`spider.training.memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spider.checkpoints.records import Kind
from spider.common.formatting import quantity
from spider.common.results import Results
from spider.config import Config, StageSpec
from spider.data.mixture import Mixture
from spider.data.packing import Packing
from spider.data.shards import Split, load_metadata
from spider.model.interface import Model
from spider.processes.device import available
from spider.processes.parallel import unit_parameters
from spider.training.memory import choose, is_open, memory_of, meta_model, training_memory, with_choice
from spider.training.optim import group_settings
from spider.training.schedule import horizon

FORMAT = 1
#: Settings that decide the cost of a stage.
_SETTINGS = ("seq_len", "micro_batch", "grad_accum", "windows_per_step", "n_loops", "max_hours")
#: Bytes of memory of a GPU that is not at hand.
USUAL_GPU = 80_000_000_000
#: GPUs of a training whose exchange is estimated.
_GPUS = (1, 2, 4, 8, 16)
#: Bytes a second that a GPU sends: half of the 900 GB/s of both directions in NVIDIA's data sheet of the
#: H100, and 100 Gbit/s.
_LINKS = {"NVLink": 450e9, "Ethernet": 12.5e9}
#: FLOP/s of arithmetic: two fifths of the peak of an H100 in bf16.
_ARITHMETIC = 0.4 * 989e12
#: Share of the arithmetic above which an exchange is marked, because it may not hide behind it.
_TOO_MUCH = 0.25


def describe(config: Config, run: str, memory: int | None = None) -> dict[str, Any]:
    """Return the description of a run as plain JSON, with sizes in bytes.

    What a stage leaves to the device (``micro_batch: auto``, ``checkpointing: auto``) is chosen for one with
    ``memory`` bytes. The default is this machine's device, or for a run with GPUs on a machine without one
    `USUAL_GPU`.

    ``flops_per_byte`` counts forward and backward passes at the window and the loops of a stage (at the top:
    of the last stage). ``precision: auto`` counts as bf16 for a run with GPUs, else as fp32. Activations
    are those of a compiled pass if the model is compiled. ``counted_as`` has both choices. The bytes of a
    token come from the dataset, once it is encoded. Unknown values are null, and so are their sums; a stage
    with no limit but ``max_hours`` has an unknown number of steps.

    Raises:
        ValueError: a stage ends before the moving average of its weights starts.
    """
    block = config.run(run)
    specs = [config.stage(run, stage.name) for stage in block.stages]
    model = meta_model(specs[0])
    narrow = block.precision in ("bf16", "fp8") or (block.precision == "auto" and block.resources.gpus > 0)
    kind: Kind = "bf16" if narrow else "fp32"
    device_type = "cuda" if block.resources.gpus else "cpu"
    fits = None
    if any(map(is_open, specs)):
        here = device_type in ("cpu", available())
        fits = memory or (memory_of(torch.device(device_type)) if here else USUAL_GPU)
        chosen = [choose(spec, spec.processes, kind, device_type, fits) for spec in specs]
        specs = list(map(with_choice, specs, chosen))
        model = meta_model(specs[0])
    results = Results(Path(config.results))
    stages = [_stage(spec, model, results, kind, device_type) for spec in specs]
    sums = {name: [stage[name] for stage in stages] for name in ("steps", "tokens", "bytes", "flops")}
    return {
        "format": FORMAT,
        "run": run,
        "preset": block.model.preset or block.model.family,
        "parameters": model.num_parameters(),
        "parameters_by_part": model.parameters_by_part(),
        "parameters_by_convention": _conventions(model),
        "looked_up": model.looked_up(),
        **{name: stages[-1][name] for name in ("flops_per_byte", "flops_per_token", "bytes_per_token")},
        **{name: None if None in known else sum(known) for name, known in sums.items()},
        "memory": max(stage["memory"]["total"] for stage in stages),
        "device_memory": fits,
        "precision": block.precision,
        "counted_as": kind + (", compiled" if specs[0].compiled_on(device_type, kind) else ""),
        "optimizer": block.optimizer.kind,
        "groups": _groups(model, specs[0]),
        "stages": stages,
        "exchange": _exchange(specs[-1], model, kind) if block.resources.gpus else [],
    }


def _exchange(spec: StageSpec, model: Model, kind: Kind) -> list[dict[str, Any]]:
    """Return for numbers of GPUs the seconds of arithmetic in a step, and of its exchange on each link.

    Of W replicas each sends 2 (W - 1) / W of the bytes of the gradients, which are summed in a ring, and its
    share of Muon's updates, in bf16, to all others. Shards gather weights for each micro-batch (those of
    units twice, in the dtype of products) and scatter its gradients, (W - 1) / W of the bytes each time. They
    send their rows of matrices to Muon and back. Numbers that cannot share a step's windows are left out.
    """
    group_of = model.parameter_groups()
    sizes = [(group_of[name].role, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for _, p in sizes)
    muon = spec.optimizer.kind == "muon"
    matrices = 2 * sum(p.numel() for role, p in sizes if muon and role == "matrix")
    of_units = sum(p.numel() for p in chain(*chain(*unit_parameters(model).values())))
    gathered = gradients + (2 * (4 if kind == "fp32" else 2) - 4) * of_units
    flops = model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops) * spec.tokens_per_step
    found = []
    for gpus in (one for one in _GPUS if spec.windows_per_step % one == 0):
        others, windows = (gpus - 1) / gpus, spec.windows_per_step // gpus
        sent = others * (2 * gradients + matrices)
        if spec.parallel == "fsdp":
            passes = windows / spec.micro_batch(gpus)
            sent = others * (passes * (gathered + gradients) + 2 * matrices / gpus)
        seconds = {link: sent / rate for link, rate in _LINKS.items()}
        arithmetic = flops / gpus / _ARITHMETIC
        found.append({"gpus": gpus, "windows": windows, "sent": sent, "arithmetic": arithmetic, **seconds})
    return found


def _conventions(model: Model) -> dict[str, int]:
    """Return the number of parameters as three conventions count it.

    Matrices are those of layers, with stacks of experts. Without a head, the embedding is the head as well.
    """
    group_of, parts = model.parameter_groups(), model.parameters_by_part()
    head = parts.get("head", parts.get("embedding", 0))
    sizes = ((group_of[name], p.numel()) for name, p in model.named_parameters())
    matrices = sum(size for group, size in sizes if group.role == "matrix")
    return {"all": model.num_parameters(), "matrices and head": matrices + head, "matrices": matrices}


def _groups(model: Model, spec: StageSpec) -> list[dict[str, Any]]:
    """Return the groups of the optimizer with their settings and their learning rates in a stage.

    The betas of Muon are its momentum and NorMuon's decay rate, if it has one.
    """
    groups = []
    for group in group_settings(model, spec.optimizer, spec.settings.lr):
        betas = (group["momentum"], group["beta2"]) if group["muon"] else group["betas"]
        settings = {
            "group": group["name"],
            "parameters": sum(p.numel() for p in group["params"]),
            "update": "muon" if group["muon"] else spec.optimizer.kind.replace("muon", "adamw"),
            "lr": group["peak_lr"],
            "betas": [beta for beta in betas if beta is not None],
            "eps": None if group["muon"] else group["eps"],
            "weight_decay": group["weight_decay"],
            "decay": group["decay"] if group["weight_decay"] else None,
        }
        groups.append(settings)
    return groups


def _splits(shards: Path) -> dict[str, Split] | None:
    """Return the splits of a dataset, or None before it is encoded."""
    return load_metadata(shards).splits if (shards / "metadata.json").exists() else None


def _bytes_per_token(results: Results, spec: StageSpec) -> float | None:
    """Return the mean bytes of a token in the text of a stage, or None before the text is encoded."""
    if spec.model.vocab_size is None:
        return 1.0
    mean = 0.0
    for name, share in spec.weights.items():
        splits = _splits(results.shards(name))
        if splits is None:
            return None
        mean += share * splits["train"].bytes / max(1, splits["train"].tokens)
    return mean


def _sources(results: Results, spec: StageSpec, steps: int | None) -> list[dict[str, Any]]:
    """Return what a stage reads of each dataset of a mixture: samples, bytes and epochs.

    ``shares`` are pairs: a sample where the weights change, and the share from there on. A number is None
    before the stage's steps, or the text, are known.
    """
    if not spec.mixed:
        return []
    sizes = {name: _size_of(results.shards(name), spec) for name in spec.weights}
    mixes = spec.mixture.mixes
    mixture = Mixture(mixes[0][1], mixes[1:])
    read = {} if steps is None else mixture.counts(steps * spec.windows_per_step)
    sources = []
    for name, size in sizes.items():
        epochs = read[name] / size[0] if name in read and size else None
        source = {
            "data": name,
            "shares": [(begin, mix.get(name, 0) / math.fsum(mix.values())) for begin, mix in mixes],
            "samples": read.get(name),
            "bytes": epochs * size[1] if epochs is not None and size else None,
            "epochs": epochs,
        }
        sources.append(source)
    return sources


def _size_of(shards: Path, spec: StageSpec) -> tuple[int, int] | None:
    """Return the windows and the bytes of an epoch of a dataset; None before they are known."""
    plan = shards / f"packed-{spec.settings.seq_len}.json"
    packed = spec.settings.packing == "best_fit"
    splits = _splits(shards)
    if splits is None or (packed and not plan.exists()):
        return None
    split = splits["train"]
    windows = Packing.read(plan).rows if packed else -(-split.tokens // spec.settings.seq_len)
    return max(1, windows), split.bytes


def _stage(spec: StageSpec, model: Model, results: Results, kind: Kind, device_type: str) -> dict[str, Any]:
    """Return the description of one stage."""
    s = spec.settings
    flops = model.flops_per_token(s.seq_len, s.n_loops)
    bytes_per_token = _bytes_per_token(results, spec)
    steps = horizon(spec, model)
    tokens = None if steps is None else steps * spec.tokens_per_step
    return {
        "stage": spec.stage,
        "data": f"{len(spec.weights)} datasets" if spec.mixed else spec.data,
        "steps": steps,
        "tokens_per_step": spec.tokens_per_step,
        "tokens": tokens,
        "bytes_per_token": bytes_per_token,
        "bytes": None if tokens is None or bytes_per_token is None else round(tokens * bytes_per_token),
        "flops_per_token": flops,
        "flops_per_byte": None if bytes_per_token is None else flops / bytes_per_token,
        "flops": None if tokens is None else flops * tokens,
        "memory": training_memory(model, spec, kind, device_type),
        **{name: getattr(s, name) for name in _SETTINGS},
        "checkpointing": spec.model.recomputes,
        "sources": _sources(results, spec, steps),
    }


# ------------------------------------------------------------------------------------------------ tables


def render(run: dict[str, Any]) -> None:
    """Print a description as tables."""
    total, stages = run["parameters"], run["stages"]
    ids, unit = ("Bytes", "B") if run["bytes_per_token"] == 1 else ("Tokens", "")
    _print(f"[bold]{run['run']}[/] ({run['preset']}): {total:,} parameters")
    parts = run["parameters_by_part"].items()
    _print(
        {"Part": part.replace("_", " "), "Parameters": f"{count:,}", "Share": f"{count / total:.1%}"}
        for part, count in parts
    )
    _print((_group_row(group, stages[0]["stage"]) for group in run["groups"]), no_wrap=True)
    _print(
        {
            "Stage": stage["stage"],
            "Data": stage["data"],
            ids: quantity(stage["tokens"], unit),
            "Steps": f"{stage['max_hours']:g} h" if stage["steps"] is None else f"{stage['steps']:,}",
            f"{ids} a step": quantity(stage["tokens_per_step"], unit),
            "Window": f"{stage['seq_len']:,}",
            "Loops": str(stage["n_loops"]),
            f"FLOPs a {ids.lower()[:-1]}": quantity(stage["flops_per_token"], ""),
            "Memory": quantity(stage["memory"]["total"], "B"),
        }
        for stage in stages
    )
    _print(_source_row(source, stage["stage"]) for stage in stages for source in stage["sources"])
    _print(map(_exchange_row, run["exchange"]))
    for line in _sentences(run, ids, unit):
        _print(line)


def render_list(runs: list[dict[str, Any]]) -> None:
    """Print several descriptions, one in each line."""
    rows = [
        {
            "Run": run["run"],
            "Parameters": quantity(run["parameters"], ""),
            "FLOPs a byte": quantity(run["flops_per_byte"], ""),
            "Steps": "?" if run["steps"] is None else f"{run['steps']:,}",
            "Bytes": quantity(run["bytes"], "B"),
            "FLOPs": quantity(run["flops"], ""),
            "Memory": quantity(run["memory"], "B"),
        }
        for run in runs
    ]
    _print(rows, no_wrap=True)


def _group_row(group: dict[str, Any], stage: str) -> dict[str, str]:
    """Return a row about a group of the optimizer, whose rate is that of a stage."""
    how = "" if group["decay"] in (None, "decoupled") else f" {group['decay']}"
    return {
        f"Group in {stage}": group["group"],
        "Parameters": quantity(group["parameters"], ""),
        "Update": group["update"],
        "Rate": f"{group['lr']:.3g}",
        "Betas": ", ".join(f"{beta:g}" for beta in group["betas"]),
        "Eps": "" if group["eps"] is None else f"{group['eps']:g}",
        "Decay": f"{group['weight_decay']:g}{how}",
    }


def _source_row(source: dict[str, Any], stage: str) -> dict[str, str]:
    """Return a row about what a stage reads of a dataset of a mixture."""
    (_, share), *changes = source["shares"]
    return {
        "Stage": stage,
        "Data": source["data"],
        "Share": ", ".join([f"{share:.3g}", *(f"{share:.3g} from {sample:,}" for sample, share in changes)]),
        "Samples": "?" if source["samples"] is None else f"{source['samples']:,}",
        "Bytes": quantity(source["bytes"], "B"),
        "Epochs": "?" if source["epochs"] is None else f"{source['epochs']:.3g}",
    }


def _exchange_row(one: dict[str, Any]) -> dict[str, str]:
    """Return a row about the step of the last stage on a number of GPUs."""
    row = {"GPUs": str(one["gpus"]), "Windows of each": f"{one['windows']:,}"}
    row |= {"Arithmetic": f"{1000 * one['arithmetic']:,.1f} ms", "Sent by each": quantity(one["sent"], "B")}
    for link in _LINKS:
        is_much = one[link] > _TOO_MUCH * one["arithmetic"]
        row[link] = f"{'! ' * is_much}{1000 * one[link]:,.1f} ms"
    return row


def _sentences(run: dict[str, Any], ids: str, unit: str) -> Iterator[str]:
    """Yield what stands below the tables: totals, parameters, memory and what ``auto`` chose."""
    if run["steps"] is None:
        yield "max_hours limits at least one stage: its steps depend on the speed of the machine."
    else:
        tokens = f"{quantity(run['tokens'], unit)}{'' if unit else ' tokens'}"
        known = f" ({quantity(run['bytes'], 'B')})" if not unit and run["bytes"] is not None else ""
        yield f"{tokens}{known} in {run['steps']:,} steps, {quantity(run['flops'], 'FLOP')} in all."
    ratios = (
        f"{name} {count:,}" + (f" ({run['tokens'] / count:.3g})" if run["tokens"] and count else "")
        for name, count in run["parameters_by_convention"].items()
    )
    yield f"Parameters ({ids.lower()} for each): {', '.join(ratios)}."
    memory = max((stage["memory"] for stage in run["stages"]), key=lambda memory: memory["total"])
    parts = [f"{name.replace('_', ' ')} {quantity(n, 'B')}" for name, n in memory.items() if name != "total"]
    counted = f"Memory of a process, counted as {run['counted_as']}"
    yield f"{counted}: {', '.join(parts)} (activations: an estimate)."
    if run["exchange"]:
        yield (
            "GPUs: a step of the last stage, at 40% of the peak of an H100. ! marks an exchange of more than "
            "a quarter of it. More windows in a step make that share smaller."
        )
    if run["device_memory"] is not None:
        chosen = "; ".join(
            f"{stage['stage']} micro_batch {stage['micro_batch']}, "
            f"checkpointing {stage['checkpointing'] or 'none'}"
            for stage in run["stages"]
        )
        fits = quantity(run["device_memory"], "B")
        yield f"auto, on a device of {fits} (--memory names another): {chosen}."


def _print(what: str | Iterable[dict[str, str]], *, no_wrap: bool = False) -> None:
    """Print a line, or rows as a table whose titles are their keys; nothing for no rows."""
    console = Console(highlight=False)
    if isinstance(what, str):
        console.print(what)
    elif rows := list(what):
        table = Table(box=None, pad_edge=False)
        for column, title in enumerate(rows[0]):
            left = column == 0 or title == "Data"
            table.add_column(title, justify="left" if left else "right", no_wrap=no_wrap)
        for row in rows:
            table.add_row(*row.values())
        console.print(table, "")
