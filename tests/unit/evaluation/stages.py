"""Write results folders of finished stages without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spider.evaluation.result import BITS, Number, Result, Row
from tests.unit import records

SETTINGS = {"zlib": "zlib -9", "bz2": "bzip2 -9", "xz": "xz -9", "zstd": "zstd --ultra -22"}
COMPRESSORS = {"zlib": 2.70, "bz2": 2.31, "xz": 2.39, "zstd": 2.41}


def write_stage(
    runs: Path,
    run: str,
    stage: str,
    index: int,
    bpb: float,
    *,
    global_step: int,
    steps: int = 100,
    data: str = "pydocs",
    sha: str = "a" * 64,
    compressors: dict[str, float] = COMPRESSORS,
    names: dict[str, str] = SETTINGS,
    results: Mapping[str, Result] = {},
    sample: str | None = "function returns the [value] of the\x1b[31m object.\n\nIf *name* is given,\tit ",
    **changed: Any,
) -> Path:
    """Write train.json, metrics.jsonl and evaluation.json of one stage, and return the last path."""
    folder = runs / run / stage
    folder.mkdir(parents=True)
    done = {"steps": steps, "global_step": global_step, "tokens": steps * 4096, "bytes": steps * 4000}
    done["seconds"] = 12.5
    (folder / "train.json").write_text(json.dumps(records.receipt(run=run, stage=stage, **done)))
    rows = [
        {"step": s, "time": 1.0, "metrics": {"train/bpb": bpb + 3 * math.exp(-s / 60)}}
        for s in range(global_step - steps + 10, global_step + 1, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = baselines(compressors, names).model_dump(mode="json")
    rates = {"format": 1, "text_sha256": sha, "results": {"baselines": result}}
    (folder / "baselines.json").write_text(json.dumps(rates))
    evaluation = {"format": 3, "run": run, "stage": stage, "index": index, "global_step": global_step}
    evaluation |= {"bpb": bpb, "bpb_strict": bpb + 0.01, "bpb_carried": bpb - 0.1, "deviation": 3e-7}
    evaluation |= {"bpb_strict_carried": bpb - 0.09, "carry_over": 1000, "documents": 90, "bytes": 500_000}
    evaluation |= {"seconds": 2.5, "bytes_per_second": 200_000.0, "nats": {"byte": 1.0}}
    evaluation |= {"targets": {"byte": 500_000}, "data": data, "data_digest": "d", "text_sha256": sha}
    evaluation |= {"seq_len": 256, "overlap": 0.5, "n_loops": 2, "device": "cpu", "precision": "fp32"}
    evaluation |= {"checkpoint": "checkpoints/step-1", "averaged": False, "weights": "w", "model": {}}
    evaluation |= {"parameters": 1000, "parameters_by_part": {"all": 1000}, "parameters_looked_up": 0}
    evaluation |= {"flops_per_token": 6000.0, "training": done}
    evaluation |= {"results": {name: one.model_dump() for name, one in results.items()}, **changed}
    if sample is not None:
        shown = {"format": 1, "run": run, "stage": stage, "weights": evaluation["weights"]}
        (folder / "sample.json").write_text(json.dumps(shown | {"prompt": "The ", "text": sample}))
    path = folder / "evaluation.json"
    path.write_text(json.dumps(evaluation))
    return path


def baselines(rates: Mapping[str, float], names: Mapping[str, str] = SETTINGS) -> Result:
    """Return rates of compressors, by name, as a result."""
    rows = [
        Row(
            name=f"compressors/{name}",
            label=name,
            note=names.get(name, ""),
            value=rate,
            carried=Number(value=rate - 0.05, unit=BITS),
            unit=BITS,
            better="lower",
            baseline=True,
            group=name.partition(" ")[2],
        )
        for name, rate in rates.items()
    ]
    return Result(title="Baselines", rows=rows)


def demo(runs: Path, run: str = "demo", shift: float = 0.0, **changed: Any) -> list[Path]:
    """Write the three stages of the default run."""
    return [
        write_stage(runs, run, "warmup", 0, 3.02 + shift, global_step=100, **changed),
        write_stage(runs, run, "main", 1, 2.21 + shift, global_step=500, steps=400, **changed),
        write_stage(runs, run, "anneal", 2, 2.05 + shift, global_step=700, steps=200, **changed),
    ]


def write_benchmark(benchmarks: Path, rule: str, name: str, *seconds: float) -> None:
    path = benchmarks / rule / f"{name}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time"]
    lines += [f"{s}\t0:00:01\t10.1\t20.2\t5.5\t5.6\t0.00\t0.00\t95.5\t{s}" for s in seconds]
    path.write_text("\n".join(lines) + "\n")
