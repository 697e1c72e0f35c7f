"""Print whether inverted orders equal the logged digests of batches, and what the digest costs.

python -m extras.trust.benchmarks.order
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from spider_trust.order import Order, logged

from spider.checkpoints.metrics import read_rows
from spider.common.results import Results
from spider.config import load_config
from spider.data.encode import encode_part
from spider.data.loader import batch_digest
from spider.data.packing import pack
from spider.data.shards import build_metadata
from spider.training.stage import train

STEPS = 510
SAMPLED = 1000
STAGE = {"seq_len": 64, "micro_batch": 4, "max_steps": STEPS, "log_every": 10, "ckpt_every": STEPS}


def measure_order() -> None:
    """Train a small model on windows and on packed rows, and compare 1,000 random steps of both stages."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stages = [{"name": "windows"}, {"name": "packed", "packing": "best_fit"}]
        run = {
            "data": "text",
            "model": {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2},
            "precision": "fp32",
            "defaults": STAGE,
            "stages": stages,
        }
        plain = {"results": folder, "datasets": {"text": {"source": {"kind": "pydocs"}}}, "runs": {"r": run}}
        config, results = load_config(plain), Results(root)
        encode(root, results.shards("text"), config.dataset("text"))
        previous = None
        for stage in config.run("r").stages:
            target = results.stage("r", stage.name)
            train(config.stage("r", stage.name), target.path, results.shards("text"), previous=previous)
            previous = target.receipt
        order, rng = Order(config, "r"), np.random.default_rng(0)
        written = {}
        for name in order.stages():
            written |= logged(results.stage("r", name).metrics)
        chosen = rng.choice(2 * STEPS, SAMPLED, replace=False) + 1
        began = time.perf_counter()
        equal = 0
        for global_step in chosen.tolist():
            stage_order, step = order.at(global_step)
            equal += stage_order.digest(step) == written[global_step]
        each = (time.perf_counter() - began) / SAMPLED
        rows = read_rows(results.stage("r", "windows").metrics)
        step_seconds = float(np.median([row.metrics["train/step_seconds"] for row in rows]))
        ids_BT1, _ = order.rows("windows", 1)
        repeats = 500
        began = time.perf_counter()
        for _ in range(repeats):
            batch_digest(ids_BT1)
        seconds = (time.perf_counter() - began) / repeats
    print("| what | measured |\n|---|---|")
    print(f"| random steps whose digest equals the logged one | {equal:,} of {SAMPLED:,} |")
    print(f"| time to find and read a step again | {1e3 * each:.2f} ms |")
    print(f"| digest of a batch of {ids_BT1.nbytes:,} bytes | {1e6 * seconds:.0f} µs |")
    print(f"| step of the small model | {1e3 * step_seconds:.1f} ms |")
    print(f"| share of the digest | {seconds / step_seconds:.3%} |")


def encode(root: Path, folder: Path, settings: object) -> None:
    """Encode and pack random text of two thousand documents."""
    rng = np.random.default_rng(0)
    words = [" ".join(f"{rng.integers(0, 5000):x}" for _ in range(rng.integers(5, 200))) for _ in range(2000)]
    table = pa.table({"text": words, "id": [json.dumps(i) for i in range(len(words))]})
    pq.write_table(table, root / "000.parquet")
    encode_part(root / "000.parquet", folder, "000", settings)
    build_metadata(folder, "text", settings, source={}, parts=["000"])
    pack(folder, STAGE["seq_len"])


if __name__ == "__main__":
    measure_order()
