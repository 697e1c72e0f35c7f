"""Memory: the most that a training holds on the device, beside what ``spider describe`` counts.

    python benchmarks/gpu/device_memory.py [--rows adamw8bit ...]

Rows of train_throughput.py say the same of their ways; here are the ways that trade speed for memory, three
short steps each. What describe counts are tensors; the allocator's rounding, workspaces and what a backward
pass holds for a moment come on top. The issue of memory is that the difference be within 5%.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import questions
from questions import ROOT, goal
from train_throughput import BF16, HEADLINE, PRESET, WAYS, measure

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw8bit": {"kind": "adamw8bit"},
    "adamw8bit, bf16 weights": {"kind": "adamw8bit", "master_weights": "bf16"},
    "adamw4bit, bf16 weights": {"kind": "adamw4bit", "master_weights": "bf16"},
    "muon": {"kind": "muon"},
}


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("device_memory", chosen, goals_of)
    shape = {**HEADLINE, "grad_accum": 2}
    bf16 = {**BF16, "defaults": shape}
    ways: dict[str, dict[str, Any]] = {
        "adamw": bf16,
        **{f"adamw, {how}": {**WAYS[f"bf16, {how}"], "defaults": shape} for how in ("kept", "recomputed")},
        **{name: {**bf16, "optimizer": optimizer} for name, optimizer in OPTIMIZERS.items()},
    }
    rows = {name: (PRESET, changes) for name, changes in ways.items()}
    for preset in sorted(PRESET.parent.glob("spider-1b-*.yaml")):
        rows[preset.stem] = (preset, BF16)
    if chosen.rehearse:
        rows = {"adamw": (ROOT / "presets/smoke.yaml", {"precision": "fp32", "compile": False})}
    for name, (configuration, changes) in rows.items():
        question.measure(name, 330, partial(measure, configuration, changes, 2, 1), said)
    question.end()


def said(row: Mapping[str, Any]) -> str:
    parts = {name: n for name, n in row["described_memory"].items() if name != "total"}
    counted = ", ".join(f"{name.replace('_', ' ')} {n / 1e9:.2f}" for name, n in parts.items())
    ratio = row["peak_memory"] / row["described_memory"]["total"]
    return f"peak {row['peak_memory'] / 1e9:.2f} GB, {ratio:.3f} of what is described: {counted}"


def goals_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for name, row in rows.items():
        ratio = row["peak_memory"] / row["described_memory"]["total"]
        goals.append(
            goal(f"{name}: peak within 5% of what is described", ratio, lambda x: abs(x - 1) <= 0.05)
        )
    return goals


if __name__ == "__main__":
    main()
