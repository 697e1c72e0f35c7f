"""Measure the warm-up: which products it chooses for fp8, what a step then costs, and how long it takes.

    python benchmarks/gpu/fp8_plan.py

The warm-up runs with ``precision: auto`` as the rule ``warmup`` runs it. It times every distinct product in
bf16 and fp8, the experts in both, and whole steps in both. Its record is kept with all times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import questions
from questions import FOLDER, Row, apart, goal
from trainings import HEADLINE, MODEL, PRESET, SLOW, SMOKE, spec_of

from spider.config import StageSpec
from spider.files import read_json
from spider.training import warmup

#: What a row takes at most.
SECONDS = {"headline": 470, "small": 180, "smoke": 60}


def main(chosen: argparse.Namespace) -> int:
    question = questions.Question("fp8_plan", chosen, goals_of)
    if chosen.rehearse:
        specs = {"smoke": spec_of(SMOKE, **SLOW)}
    else:
        small = {"seq_len": 256, "micro_batch": 32, "n_loops": None}
        specs = {
            "small": spec_of(PRESET, model=MODEL, defaults=small, precision="auto"),
            "headline": spec_of(PRESET, defaults=HEADLINE, precision="auto"),
        }
    for name, spec in specs.items():
        question.measure(name, SECONDS[name], partial(warm_up, name, spec, chosen.rehearse), describe)
    return question.end()


def warm_up(name: str, spec: StageSpec, rehearse: bool) -> dict[str, Any]:
    """Return the record of a warm-up in a process of its own."""
    record = FOLDER / "work" / f"warmup-{name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    apart(_warm_up, spec, record, rehearse, seconds=SECONDS[name])
    return read_json(record)


def _warm_up(spec: StageSpec, record: Path, rehearse: bool) -> None:
    if rehearse:
        warmup._GEMM_SECONDS = warmup._STEP_SECONDS = 0.1
    warmup.warm_up(spec, record)


def describe(row: Row) -> str:
    in_fp8 = [gemm for gemm in row["gemms"] if gemm["fastest"] == "fp8"]
    costs = ", ".join(f"{kind} {1000 * of['seconds']:.0f} ms" for kind, of in row["step"].items())
    layers = f"{len(row['fp8_layers'])} layers and {len(in_fp8)} of {len(row['gemms'])} products in fp8"
    return f"{row['precision']} in {row['seconds']:.0f} s; a micro-batch: {costs}; {layers}"


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    seconds = rows["headline"]["seconds"] if "headline" in rows else None
    return [goal("the warm-up of spider-1b within 5 minutes", seconds, lambda x: x <= 300)]


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
