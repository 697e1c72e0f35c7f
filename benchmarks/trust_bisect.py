"""Measure the search for one of eight settings, which moves bits per byte by at least 0.05.

`spider diff --bisect` has to name this setting after at most four trainings. The other seven settings differ
too, by little.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, show
from trust_diff import run_workflow, target, write_texts

from spider.files import read_json
from tests import forkserver

Config = dict[str, Any]

#: The least difference in bits per byte, and the most trainings.
LEAST = 0.05
MOST = 4
#: Value in the first run, value that changes little, and value that changes much, by the name of a setting.
SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "lr": (3e-3, 3.03e-3, 2e-3),
    "max_steps": (60, 61, 52),
    "warmup_steps": (4, 5, 600),
    "min_lr_ratio": (0.1, 0.11, 0.11),
    "seed": (0, 1, 1),
    "optimizer.weight_decay": (0.1, 0.11, 0.11),
    "optimizer.betas": ([0.9, 0.95], [0.9, 0.951], [0.9999, 0.99999]),
    "optimizer.clip": (1.0, 1.01, 1e-9),
}
GUILTY = ("lr", "max_steps", "warmup_steps", "optimizer.betas")


def run(guilty: str | None = None, *, changed: bool = True) -> Config:
    """Return the first run, or one that differs in all settings, and in one of them by much."""
    block: Config = {
        "data": "text",
        "model": {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2},
        "precision": "fp32",
        "optimizer": {},
        "defaults": {"seq_len": 32, "micro_batch": 4, "ckpt_every": 100, "val_every": 0},
        "stages": [{"name": "main"}],
        "evaluation": {"max_bytes": 4000, "loops_bytes": 0, "sample_bytes": 0, "carry_over": 0},
        "resources": {"threads": 1},
    }
    for name, values in SETTINGS.items():
        value = values[0 if not changed else 2 if name == guilty else 1]
        block_name, _, key = name.rpartition(".")
        if name == "seed":
            block[name] = value
        else:
            block[block_name or "defaults"][key] = value
    return block


def measure_bisect() -> None:
    """Train the pairs, bisect each, and print what is found."""
    server = forkserver.start()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = bisect_all(Path(scratch))
        finally:
            if server:
                forkserver.stop(server)
    found = sum(row[1] == "yes" for row in rows)
    title = f"spider diff --bisect: {found} of {len(rows)} causes named, each one of {len(SETTINGS)}"
    show(title, ["cause", f"named in {MOST} trainings", "trainings", "bpb moved by", "of", "seconds"], rows)


def bisect_all(folder: Path) -> list[list[str]]:
    """Return a row for each guilty setting."""
    write_texts(folder)
    source = {"kind": "local", "files": ["text.jsonl"]}
    names = [f"other-{i}" for i in range(len(GUILTY))]
    others = {name: run(guilty) for name, guilty in zip(names, GUILTY, strict=True)}
    raw = {
        "datasets": {"text": {"source": source, "validation": 0.2}},
        "runs": {"one": run(changed=False), **others},
    }
    run_workflow(folder, raw, [target(name, "main") for name in raw["runs"]], {})
    rows = []
    for name, guilty in zip(names, GUILTY, strict=True):
        one, other = (read_json(folder / target(each, "main"))["bpb"] for each in ("one", name))
        if abs(other - one) < LEAST:
            raise ValueError(f"{guilty}: moves bits per byte only by {other - one:.3f}; make it worse")
        command = [forkserver.spider(), "--config", "config.json", "diff", "one", name, "--bisect", "--json"]
        command += ["--", "--profile", str(ROOT / "profiles/default"), "--quiet", "all"]
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        outcome = json.loads(done.stdout)
        trainings = len(outcome["measured"])
        right = outcome["found"] == [guilty] and outcome["confirmed"] and trainings <= MOST
        if len(outcome["causes"]) != len(SETTINGS):
            raise ValueError(f"{outcome['causes']}: expected the settings {', '.join(SETTINGS)}")
        moved = f"{outcome['share'] * (other - one):.3f}"
        seconds = f"{time.perf_counter() - began:.0f}"
        rows.append([guilty, "yes" if right else "NO", str(trainings), moved, f"{other - one:.3f}", seconds])
    return rows


if __name__ == "__main__":
    measure_bisect()
