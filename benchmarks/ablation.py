"""What each part of the Spider is worth: the model without it, at equal bytes and at equal time.

Every variant is trained by the real engine on the embedded corpus with the default run's optimizer and batch,
in one stage (a rise of 30 steps, then linearly to zero), once a seed; its bits per byte are those of the same
held-out text. Twice: on the same number of bytes as the full model, and on as
many as fit into the time that the full model needs for its own (one thread; step times are processor time,
measured in turn before anything is trained). Where both numbers of bytes are within 3%, one training serves
for both.

    python benchmarks/ablation.py [--memory] [--quick] [--json FILE] [--folder FOLDER] [--seeds N] [--jobs N]

``--memory`` asks it of the default run's small network beside its memory, and of parts of that as well.

Hours at full size; what is done is kept in ``--folder`` and not done again, so it may be stopped at any time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from variants import TOKENS, Comparison, Outcome, Task, equal_time, key, spec_of

from spider.config import merged

PLAIN: dict[str, Any] = {
    "boundary": {"kind": "none"},
    "moe": None,
    "recurrence": {
        "loops": 1,
        "injection": False,
        "loop_embedding": False,
        "lora_rank": 0,
        "halting": False,
    },
}

#: The full model is the default run's with the recurrence that this table took out of its defaults.
FULL: dict[str, Any] = {"recurrence": {"loops": 2}}
#: Changes to the full model. ``plain`` is filled up to the full model's FLOPs by `equal_flops`.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no patches": {"boundary": {"kind": "none"}},
    "fixed patches": {"boundary": {"kind": "fixed", "stride": 5}},
    "whitespace patches": {"boundary": {"kind": "whitespace"}},
    "learned patches, random start": {"boundary": {"start": "random"}},
    "no recurrence, same parameters": {"recurrence": {"loops": 1}},
    "no recurrence, same FLOPs": {"recurrence": {"loops": 1, "layers": 2}},
    "no byte n-grams": {"engram": {"byte_orders": []}},
    "Engram in the core": {"engram": {"layers": [0]}},
    "Engram in the core, no byte n-grams": {"engram": {"layers": [0], "byte_orders": []}},
    "no ACT": {"recurrence": {"halting": False}},
    "no LoRA": {"recurrence": {"lora_rank": 0}},
    "no MoE": {"moe": None},
    "plain transformer, equal FLOPs": PLAIN | {"engram": {"layers": [], "byte_orders": []}},
    "plain transformer with byte n-grams, equal FLOPs": PLAIN,
}
#: Changes to the default run's model.
WITH_MEMORY: dict[str, dict[str, Any]] = {
    "full": {},
    "no patches": {"boundary": {"kind": "none"}},
    "two loops": {"recurrence": {"loops": 2}},
    "no MoE": {"moe": None},
    "byte n-grams": {"engram": {"byte_orders": [2, 3, 4, 5, 6]}},
    "width 128": {"hidden": 128, "ffn_hidden": 256, "attention": {"heads": 4}},
    "no contexts of words": {"memory": {"words": []}},
}


def task_of(variant: str, model: dict[str, Any], seed: int, tokens: int, memory: bool = False) -> Task:
    return Task(variant, {"model": model if memory else merged(FULL, model)}, seed, tokens, memory)


def flops(model: dict[str, Any], memory: bool = False) -> tuple[float, int]:
    """FLOPs a byte of the default window and parameters of a variant, without allocating it."""
    import torch

    from spider.model import build_model

    spec = spec_of(task_of("", model, 0, TOKENS, memory), "fp32")
    with torch.device("meta"):
        built = build_model(spec.model)
    return built.flops_per_token(spec.settings.seq_len, spec.settings.n_loops), built.num_parameters()


def equal_flops(model: dict[str, Any], wanted: float) -> dict[str, Any]:
    """The variant with as many layers, and then as wide a feed-forward, as come nearest to ``wanted``."""

    def off(layers: int, ffn_hidden: int) -> float:
        return abs(flops(merged(model, size(layers, ffn_hidden)))[0] - wanted)

    def size(layers: int, ffn_hidden: int) -> dict[str, Any]:
        return {"recurrence": {"layers": layers}, "ffn_hidden": ffn_hidden}

    layers = min(range(1, 9), key=lambda n: off(n, 512))
    return merged(model, size(layers, min(range(256, 1025, 16), key=lambda f: off(layers, f))))


def main() -> None:
    asked = Comparison("ablation", __doc__.splitlines()[0], rounds=15, with_memory=True)
    tokens, memory = asked.tokens, asked.memory
    wanted, _ = flops({})
    models = {
        name: equal_flops(changes, wanted) if name.startswith("plain") else changes
        for name, changes in (WITH_MEMORY if memory else VARIANTS).items()
    }
    if asked.options.quick:
        models = {name: models[name] for name in ("full", "no patches", "no MoE")}
    seconds = asked.step_seconds(
        {name: task_of(name, model, 0, tokens, memory) for name, model in models.items()}, models
    )
    in_time = equal_time(tokens, seconds, "full")
    plan = {
        (name, budget): [task_of(name, model, seed, count, memory) for seed in asked.seeds]
        for name, model in models.items()
        for budget, count in (("bytes", tokens), ("time", in_time[name]))
    }
    unique = {key(task): task for tasks in plan.values() for task in tasks}
    bpb = asked.bpb(sorted(unique.values(), key=lambda task: task.seed))

    def outcome(name: str) -> Outcome:
        by_bytes, by_time = ([bpb[key(task)] for task in plan[name, b]] for b in ("bytes", "time"))
        return Outcome(seconds[name], in_time[name], by_bytes, by_time)

    rows, figures = [], {}
    for name, model in models.items():
        (cost, parameters), came_to = flops(model, memory), outcome(name)
        own = [name, f"{parameters / 1e6:.2f}M", f"{cost / 1e6:.2f}"]
        rows.append(own + came_to.row(outcome("full")))
        own_figures = {"model": model, "parameters": parameters, "flops_per_byte": cost}
        figures[name] = own_figures | asdict(came_to)
    asked.report(["variant", "params", "MFLOPs/B"], "full", rows, figures)


if __name__ == "__main__":
    main()
