"""A stage that is trained and evaluated on a small text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.common.results import write_config
from spider.config import load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata
from spider.evaluation.evaluate import evaluate
from spider.training.stage import train
from spider.verify.claim import Claim
from tests.unit.small_training import DEFAULTS


def scored_stage(root: Path, model: dict[str, Any], **settings: Any) -> Claim:
    """Train and evaluate a stage, and return the claim of its score."""
    run = {
        "data": "text",
        "model": model,
        "precision": "fp32",
        "defaults": {**DEFAULTS, "max_steps": 4, **settings},
        "stages": [{"name": "a"}],
        "evaluation": {"max_bytes": 3000, "loops_bytes": 0, "batch": 8, "carry_over": 1000},
        "resources": {"threads": 1},
    }
    datasets = {"text": {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.2}}
    written = {"results": str(root), "datasets": datasets, "runs": {"r": run}}
    config = load_config(written)
    write_config(root, written)
    one = Claim(config, "r", "a")
    raw = one.results.raw("text", "000")
    raw.parent.mkdir(parents=True)
    texts = [f"Document {i}: the {i * i} brown foxes jump. " * (1 + i % 5) for i in range(150)]
    pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(150)]}), raw)
    shards = one.results.shards("text")
    encode_part(raw, shards, "000", config.dataset("text"))
    build_metadata(shards, "text", config.dataset("text"), source={}, parts=["000"])
    train(one.spec, one.folder.path, shards)
    evaluate(one.folder.receipt, one.spec, shards, one.folder.path, device="cpu")
    return one
