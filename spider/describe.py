"""Estimate the cost of a run before training: parameters, FLOPs, steps and memory.

The model is built on the meta device, so a description of a billion parameters takes a second and no memory.
Memory is that of one process (`spider.training.memory`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from spider.checkpoints.records import Kind
from spider.common.formatting import quantity
from spider.common.results import Results
from spider.config import CompressConfig, Config, StageSpec
from spider.data.mixture import Mixture, mixes_of
from spider.data.packing import Packing
from spider.data.shards import load_metadata
from spider.model.interface import Model
from spider.processes.device import available
from spider.training.memory import choose, is_open, memory_of, meta_model, training_memory, with_choice
from spider.training.optim import group_settings
from spider.training.schedule import horizon

FORMAT = 1
#: Sizes of text, in bytes, for the cost of an n-gram index whose text is not encoded yet: a billion, and
#: FineWeb-Edu's sample of ten billion tokens.
_TEXTS = (1e9, 46e9)
#: Settings that decide the cost of a stage.
_SETTINGS = ("seq_len", "micro_batch", "grad_accum", "windows_per_step", "n_loops", "max_hours")
#: Bytes of memory of a GPU that is not at hand.
USUAL_GPU = 80_000_000_000


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
        ValueError: a stage ends before the moving average of its weights starts, or the caps of its mixture
            leave nothing to read.
    """
    block = config.run(run)
    specs = [config.stage(run, stage.name) for stage in block.stages]
    model = meta_model(specs[0])
    narrow = block.precision in ("bf16", "fp8") or (block.precision == "auto" and block.resources.gpus > 0)
    kind: Kind = "bf16" if narrow else "fp32"
    device_type = "cuda" if block.resources.gpus else "cpu"
    fits = None
    if any(map(is_open, specs)):
        here = device_type if available() == device_type or device_type == "cpu" else None
        fits = memory or (memory_of(torch.device(here)) if here else USUAL_GPU)
        open_ = [choose(spec, spec.processes, kind, device_type, fits) for spec in specs]
        specs = list(map(with_choice, specs, open_))
        model = meta_model(specs[0])
    stages = [_stage(spec, model, _bytes_per_token(config, spec), kind, device_type) for spec in specs]
    for spec, stage in zip(specs, stages, strict=True):
        stage["sources"] = _sources(config, spec, stage["steps"])
    parts = {name: [stage[name] for stage in stages] for name in ("steps", "tokens", "bytes", "flops")}
    return {
        "format": FORMAT,
        "run": run,
        "preset": block.model.preset or block.model.family,
        "parameters": model.num_parameters(),
        "parameters_by_part": model.parameters_by_part(),
        "parameters_by_convention": _conventions(model),
        "looked_up": model.looked_up(),
        **{name: stages[-1][name] for name in ("flops_per_byte", "flops_per_token", "bytes_per_token")},
        **{name: None if None in known else sum(known) for name, known in parts.items()},
        "memory": max(stage["memory"]["total"] for stage in stages),
        "device_memory": fits,
        "precision": block.precision,
        "counted_as": kind + (", compiled" if specs[0].compiled_on(device_type, kind) else ""),
        "optimizer": block.optimizer.kind,
        "groups": _groups(model, specs[0]),
        "stages": stages,
        "counted_text": _counted(config, specs[0]),
        "compressed": _compressed_model(model, block.compress),
    }


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
    return [
        {
            "group": group["name"],
            "parameters": sum(p.numel() for p in group["params"]),
            "update": "muon" if group["muon"] else spec.optimizer.kind.replace("muon", "adamw"),
            "lr": group["peak_lr"],
            "betas": [b for b in _betas(group) if b is not None],
            "eps": None if group["muon"] else group["eps"],
            "weight_decay": group["weight_decay"],
            "decay": group["decay"] if group["weight_decay"] else None,
        }
        for group in group_settings(model, spec.optimizer, spec.settings.lr)
    ]


def _betas(group: dict[str, Any]) -> tuple[float | None, ...]:
    return (group["momentum"], group["beta2"]) if group["muon"] else group["betas"]


def _counted(config: Config, spec: StageSpec) -> list[dict[str, float]]:
    """Return the cost of the n-gram index for the run's text, or for `_TEXTS` before that is encoded."""
    if spec.model.ngram is None:
        return []
    from spider.data.ngram.cost import cost  # imports numba

    shards = Results(Path(config.results)).shards(spec.data)
    sizes: tuple[float, ...] = _TEXTS
    if (shards / "metadata.json").exists():
        splits = load_metadata(shards).splits
        counted = sum(splits[name].tokens for name in ("ngram", "train") if name in splits)
        sizes = (counted,) if counted else _TEXTS
    return [cost(spec.model.ngram, size)._asdict() for size in sizes]


def _compressed_model(model: Model, settings: CompressConfig | None) -> dict[str, Any] | None:
    """Predict the size of the compressed model. Return None for a run that is not compressed."""
    if settings is None:
        return None
    from spider.checkpoints.compress.predict import predict

    return predict(model, settings)


def _bytes_per_token(config: Config, spec: StageSpec) -> float | None:
    """Return the mean bytes of a token in the text of a stage. Return None before the text is encoded."""
    if spec.model.vocab_size is None:
        return 1.0
    mean = 0.0
    for name, share in spec.weights.items():
        shards = Results(Path(config.results)).shards(name)
        if not (shards / "metadata.json").exists():
            return None
        split = load_metadata(shards).splits["train"]
        mean += share * split.bytes / max(1, split.tokens)
    return mean


def _sources(config: Config, spec: StageSpec, steps: int | None) -> list[dict[str, Any]]:
    """Return what a stage reads of each dataset of a mixture: samples, bytes and epochs.

    ``shares`` are pairs: a sample where the weights change, also by a cap, and the share from there on. A
    number is None before the stage's steps, or the text, are known. Raises `ValueError` as `mixes_of`.
    """
    if not spec.mixed:
        return []
    results = Results(Path(config.results))
    sizes = {name: _size_of(results.shards(name), spec) for name in spec.weights}
    windows = {name: size[0] for name, size in sizes.items() if size}
    caps = spec.mixture.max_epochs
    mixes = mixes_of(spec, windows, steps) if caps.keys() <= windows.keys() else spec.mixture.mixes
    is_known = steps is not None and caps.keys() <= windows.keys()
    samples = (steps or 0) * spec.windows_per_step
    counts = Mixture(mixes[0][1], mixes[1:]).counts(samples)
    sources = []
    for name in spec.weights:
        read = counts[name] if is_known else None
        epochs, bytes_ = None, None
        if read is not None and (size := sizes[name]):
            epochs = read / size[0]
            bytes_ = epochs * size[1]
        changes = [(begin, mix.get(name, 0) / math.fsum(mix.values())) for begin, mix in mixes]
        read_of = {"samples": read, "bytes": bytes_, "epochs": epochs}
        sources.append({"data": name, "shares": changes, **read_of, "max_epochs": caps.get(name)})
    return sources


def _size_of(shards: Path, spec: StageSpec) -> tuple[int, int] | None:
    """Return the windows and the bytes of an epoch of a dataset; None before they are known."""
    plan = shards / f"packed-{spec.settings.seq_len}.json"
    is_packed = spec.settings.packing == "best_fit"
    if not (plan if is_packed else shards / "metadata.json").exists():
        return None
    split = load_metadata(shards).splits["train"]
    windows = Packing.read(plan).rows if is_packed else -(-split.tokens // spec.settings.seq_len)
    return max(1, windows), split.bytes


def _stage(
    spec: StageSpec,
    model: Model,
    bytes_per_token: float | None,
    kind: Kind,
    device_type: str,
) -> dict[str, Any]:
    """Return the description of one stage."""
    s = spec.settings
    flops = model.flops_per_token(s.seq_len, s.n_loops)
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
    }


# ------------------------------------------------------------------------------------------------ tables


def render(run: dict[str, Any]) -> None:
    """Print a description as tables."""
    console = Console(highlight=False)
    total = run["parameters"]
    console.print(f"[bold]{run['run']}[/] ({run['preset']}): {total:,} parameters")
    table = _table("Part", "Parameters", "Share")
    for part, count in run["parameters_by_part"].items():
        table.add_row(part.replace("_", " "), f"{count:,}", f"{count / total:.1%}")
    console.print(table, "")
    first = run["stages"][0]["stage"]
    table = _table(f"Group in {first}", "Parameters", "Update", "Rate", "Betas", "Eps", "Decay", no_wrap=True)
    for group in run["groups"]:
        how = "" if group["decay"] in (None, "decoupled") else f" {group['decay']}"
        table.add_row(
            group["group"],
            quantity(group["parameters"], ""),
            group["update"],
            f"{group['lr']:.3g}",
            ", ".join(f"{beta:g}" for beta in group["betas"]),
            "" if group["eps"] is None else f"{group['eps']:g}",
            f"{group['weight_decay']:g}{how}",
        )
    console.print(table, "")
    ids, unit = ("Bytes", "B") if run["bytes_per_token"] == 1 else ("Tokens", "")
    table = _table(
        "Stage",
        "Data",
        ids,
        "Steps",
        f"{ids} a step",
        "Window",
        "Loops",
        f"FLOPs a {ids.lower()[:-1]}",
        "Memory",
    )
    table.columns[1].justify = "left"
    for stage in run["stages"]:
        table.add_row(
            stage["stage"],
            stage["data"],
            _known(stage["tokens"], unit),
            f"{stage['max_hours']:g} h" if stage["steps"] is None else f"{stage['steps']:,}",
            quantity(stage["tokens_per_step"], unit),
            f"{stage['seq_len']:,}",
            str(stage["n_loops"]),
            quantity(stage["flops_per_token"], ""),
            quantity(stage["memory"]["total"], "B"),
        )
    console.print(table, "")
    if any(stage["sources"] for stage in run["stages"]):
        table = _table("Stage", "Data", "Share", "Samples", "Bytes", "Epochs")
        table.columns[1].justify = "left"
        for stage in run["stages"]:
            for source in stage["sources"]:
                (_, share), *changes = source["shares"]
                shares = [f"{share:.3g}", *(f"{share:.3g} from {sample:,}" for sample, share in changes)]
                epochs = "?" if source["epochs"] is None else f"{source['epochs']:.3g}"
                epochs += f" of {source['max_epochs']:g}" if source["max_epochs"] else ""
                table.add_row(
                    stage["stage"],
                    source["data"],
                    ", ".join(shares),
                    "?" if source["samples"] is None else f"{source['samples']:,}",
                    _known(source["bytes"], "B"),
                    epochs,
                )
        console.print(table, "")
    if run["steps"] is None:
        console.print("max_hours limits at least one stage: its steps depend on the speed of the machine.")
    else:
        text = f"{quantity(run['tokens'], unit)}{'' if unit else ' tokens'}"
        if not unit and run["bytes"] is not None:
            text += f" ({quantity(run['bytes'], 'B')})"
        console.print(f"{text} in {run['steps']:,} steps, {quantity(run['flops'], 'FLOP')} in all.")
    ratios = (
        f"{name} {count:,}" + (f" ({run['tokens'] / count:.3g})" if run["tokens"] and count else "")
        for name, count in run["parameters_by_convention"].items()
    )
    console.print(f"Parameters ({ids.lower()} for each): {', '.join(ratios)}.")
    memory = max((stage["memory"] for stage in run["stages"]), key=lambda memory: memory["total"])
    parts = [f"{name.replace('_', ' ')} {quantity(n, 'B')}" for name, n in memory.items() if name != "total"]
    counted = f"Memory of a process, counted as {run['counted_as']}"
    console.print(f"{counted}: {', '.join(parts)} (activations: an estimate).")
    if (fits := run["device_memory"]) is not None:
        cuts = "; ".join(
            f"{stage['stage']} micro_batch {stage['micro_batch']}, "
            f"checkpointing {stage['checkpointing'] or 'none'}"
            for stage in run["stages"]
        )
        console.print(f"auto, on a device of {quantity(fits, 'B')} (--memory names another): {cuts}.")
    for one in run["counted_text"]:
        hours = one["seconds"] / 3600
        time = f"{hours:.1f} processor hours" if hours >= 1 else f"{60 * hours:.1f} processor minutes"
        console.print(
            f"N-gram index of {quantity(one['text'], 'B')} of text: {quantity(one['disk'], 'B')} on disk, "
            f"and {quantity(one['runs'], 'B')} more until its counts are merged; {time} to count and merge; "
            f"{one['look_up']:,} bytes read for each byte (extrapolated from 24 MB)."
        )
    if (file := run["compressed"]) is not None:
        fits = file["total_bytes"] <= file["cap"]
        at = "no clip fits" if file["clip"] is None else f"clip {file['clip']:.3g}"
        sizes = ", ".join(f"{name} {size:,}" for name, size in file["bytes"].items() if size)
        console.print(
            f"Compressed: {file['total_bytes']:,} bytes, cap {file['cap']:,}"
            f"{'' if fits else ', does not fit'} ({at}): {sizes} "
            "(Gaussian weights, before it is trained: an estimate)."
        )


def render_list(runs: list[dict[str, Any]]) -> None:
    """Print several descriptions, one in each line."""
    table = _table("Run", "Parameters", "FLOPs a byte", "Steps", "Bytes", "FLOPs", "Memory", no_wrap=True)
    for run in runs:
        table.add_row(
            run["run"],
            quantity(run["parameters"], ""),
            _known(run["flops_per_byte"], ""),
            "?" if run["steps"] is None else f"{run['steps']:,}",
            _known(run["bytes"], "B"),
            _known(run["flops"], ""),
            quantity(run["memory"], "B"),
        )
    Console(highlight=False).print(table)


def _table(first: str, *titles: str, no_wrap: bool = False) -> Table:
    numbers = [Column(title, justify="right", no_wrap=no_wrap) for title in titles]
    return Table(Column(first, no_wrap=no_wrap), *numbers, box=None, pad_edge=False)


def _known(value: float | None, unit: str) -> str:
    return "?" if value is None else quantity(value, unit)
