"""The warm-up's plan: which products it takes in fp8, what a step then costs, and how long it takes to say.

    python benchmarks/gpu/fp8_plan.py

``precision: auto`` at the headline's shape, as the rule ``warmup`` runs it: every distinct product in bf16
and fp8, the experts in both, whole steps in both. Its record is kept, with all times.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import questions
from questions import FOLDER, ROOT, goal
from steps import spec_of
from train_throughput import HEADLINE, PRESET
from trainings import MODEL

from spider.config import StageSpec
from spider.files import read_json

PATIENCE = 470
#: Arguments: the stage, the record, seconds that may be spent on timing (empty: its own).
WARM_UP = """
import sys
from pathlib import Path
from spider.config import StageSpec
from spider.training import warmup
if sys.argv[3]:
    warmup._GEMM_SECONDS = warmup._STEP_SECONDS = float(sys.argv[3])
warmup.warm_up(StageSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("fp8_plan", chosen, goals_of)
    small = {"seq_len": 256, "micro_batch": 32, "n_loops": None}
    specs = {
        "small": spec_of(PRESET, model=MODEL, defaults=small, precision="auto"),
        "headline": spec_of(PRESET, defaults=HEADLINE, precision="auto"),
    }
    if chosen.rehearse:
        specs = {"smoke": spec_of(ROOT / "presets/smoke.yaml", precision="fp32", compile=False)}
    for name, spec in specs.items():
        question.measure(name, 180 if name == "small" else PATIENCE, partial(warm_up, name, spec), said)
    question.end()


def warm_up(name: str, spec: StageSpec) -> dict[str, Any]:
    """The record of a warm-up in a process of its own."""
    record = FOLDER / "work" / f"warmup-{name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    budget = "0.1" if name == "smoke" else ""
    command = [sys.executable, "-c", WARM_UP, spec.model_dump_json(), str(record), budget]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return read_json(record)


def said(row: Mapping[str, Any]) -> str:
    in_fp8 = [one for one in row["gemms"] if one["fastest"] == "fp8"]
    costs = ", ".join(f"{kind} {1000 * of['seconds']:.0f} ms" for kind, of in row["step"].items())
    layers = f"{len(row['fp8_layers'])} layers and {len(in_fp8)} of {len(row['gemms'])} products in fp8"
    return f"{row['precision']} in {row['seconds']:.0f} s; a micro-batch: {costs}; {layers}"


def goals_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    seconds = rows.get("headline", {}).get("seconds")
    return [goal("the warm-up of spider-1b within 5 minutes", seconds, lambda x: x <= 300)]


if __name__ == "__main__":
    main()
