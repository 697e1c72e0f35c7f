"""The results that two equal trainings have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spider.common import files


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without those that depend on clock or machine."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("system/", "train/bytes_per_second", "train/tokens_per_second", "train/data_wait_share")
    timed += ("train/eta_seconds", "train/mfu", "train/step_seconds", "train/seconds")
    return [
        {"step": r["step"], "metrics": {k: v for k, v in r["metrics"].items() if not k.startswith(timed)}}
        for r in found
    ]


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a disturbed run and an undisturbed one must share: tensors, position, curve."""
    receipt = files.read_json(folder / "train.json")
    manifest = files.read_json(folder / receipt["checkpoint"] / "manifest.json")
    tensors = {n: f["sha256"] for n, f in manifest["files"].items() if n.endswith(".safetensors")}
    same = ("weights", "steps", "global_step", "tokens", "bytes", "position", "loss", "best_loss")
    return {"tensors": tensors, "rows": rows(folder), **{k: receipt[k] for k in same}}
