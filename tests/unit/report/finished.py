"""Make a real run of two stages: encode, train and evaluate it, with texts that contain HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.common.files import sha256
from spider.common.results import Results
from spider.config import Config, load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata
from spider.evaluation.baselines import text_baselines
from spider.evaluation.evaluate import evaluate
from spider.evaluation.generate import sample
from spider.evaluation.overlap import find_overlap
from spider.evaluation.text import LearnedFrom
from spider.report.page import draw_stage
from spider.training.stage import train
from tests.unit.records import write_job
from tests.unit.small_datasets import dataset

HOSTILE = "</pre></script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
HOSTILE += " & \x1b[31m\u202e"

#: A run of a few steps of a toy model, on the text of `encode_text`.
TOY: dict[str, Any] = {
    "data": "text",
    "model": {"family": "tests.families.toy", "width": 8},
    "precision": "fp32",
    "defaults": {"seq_len": 16, "micro_batch": 2, "log_every": 5, "ckpt_every": 100, "val_every": 0},
    "stages": [{"name": "main", "max_steps": 5}],
    "evaluation": {"max_bytes": 1000, "loops_bytes": 0, "carry_over": 0},
    "resources": {"threads": 1},
}


def toys(root: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of toy runs with a results folder."""
    text = {"source": {"kind": "local", "files": ["text.parquet"]}, "validation": 0.3}
    return {"results": str(root), "datasets": {"text": text}, "runs": runs}


def train_toys(plain: dict[str, Any], *runs: str) -> Results:
    """Train and score toy runs of a configuration."""
    config, results = load_config(plain), Results(Path(plain["results"]))
    encode_text(results)
    for run in runs:
        folder, spec = results.stage(run, "main"), config.stage(run, "main")
        train(spec, folder.path, results.shards("text"))
        evaluate(folder.receipt, spec, results.shards("text"), folder.path, device="cpu")
    return results


def config_of(results: Path) -> dict[str, Any]:
    """Return the configuration as a user would write it."""
    model = {"preset": "tiny", "hidden": 32, "ffn_hidden": 32, "recurrence": {"layers": 2, "loops": 2}}
    model["attention"] = {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16}
    model["moe"] = {"experts": 3, "expert_hidden": 16, "shared_hidden": 16}
    model["engram"] = {"layers": [0], "head_dim": 8, "table_size": 512}
    run = {"data": "text", "model": model, "precision": "fp32", "optimizer": {"kind": "muon"}}
    run["defaults"] = {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "log_every": 2, "ckpt_every": 5}
    run["defaults"] |= {"val_every": 5, "val_bytes": 600}
    run["stages"] = [
        {"name": "first", "max_steps": 20, "schedule": "constant", "warmup_steps": 5},
        {"name": "second", "max_steps": 10, "schedule": "linear", "warmup_steps": 0},
    ]
    run["evaluation"] = {"max_bytes": 2000, "loops_bytes": 300, "sample_bytes": 20, "prompts": [HOSTILE]}
    run["evaluation"] |= {"seq_len": 256, "ttt": {"chunk": 512}, "checkpoints": 0}
    dataset = {"source": {"kind": "local", "files": ["text.parquet"]}, "validation": 0.3}
    return {"results": str(results), "datasets": {"text": dataset}, "runs": {"small": run}}


def encode_text(results: Results) -> None:
    """Encode the dataset ``text`` as the workflow does."""
    raw, shards = results.raw("text", "000"), results.shards("text")
    raw.parent.mkdir(parents=True)
    texts = [f"Document {i}: {HOSTILE} " + " ".join(str(i * j % 97) for j in range(40)) for i in range(120)]
    pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(120)]}), raw)
    encode_part(raw, shards, "000", dataset(validation=0.3))
    origin = {"part": "000", "name": HOSTILE, "bytes": raw.stat().st_size, "sha256": sha256(raw)}
    source = {"kind": "local", "files": [origin]}
    build_metadata(shards, "text", dataset(validation=0.3), source=source, parts=["000"])
    write_job(results.root, "raw/text/000.parquet", rule="download", command="")
    made = {"rule": "index", "wildcards": {"dataset": "text"}, "command": ""}
    write_job(results.root, "shards/text/metadata.json", ["raw/text/000.parquet"], **made)


def train_stage(
    config: Config, results: Results, stage: str, *, run: str = "small", evaluated: bool = True
) -> None:
    """Train a stage of a run, and write the files that Snakemake and tracking write for its jobs."""
    spec, folder = config.stage(run, stage), results.stage(run, stage).path
    names = [one.name for one in config.runs[run].stages]
    before = names[: names.index(stage)]
    previous = results.stage(run, before[-1]).receipt if before else None
    train(spec, folder, results.shards("text"), previous=previous)
    learned = ["shards/text/metadata.json", *(f"runs/{run}/{name}/train.json" for name in before[-1:])]
    write_job_files(results, "train", f"{run}/{stage}", 12.5, learned)
    if evaluated:
        evaluate(folder / "train.json", spec, results.shards("text"), folder)
        given = spec, results.shards("text"), LearnedFrom()
        overlap = find_overlap(*given, results.overlap("text"))
        text_baselines(*given, overlap, folder / "baselines.json")
        sample(folder / "train.json", spec, folder)
        draw_stage(results.stage(run, stage))
        write_job_files(results, "evaluate", f"{run}/{stage}", 2.25, [f"runs/{run}/{stage}/train.json"])


def write_job_files(
    results: Results, rule: str, name: str, seconds: float, inputs: Sequence[str] = (), command: str = ""
) -> None:
    """Write the benchmark file and the record of a job of a stage."""
    made = f"runs/{name}/" + {"train": "train.json", "evaluate": "evaluation.json"}[rule]
    benchmark = f"benchmarks/{rule}/{Path(made).with_suffix('.tsv')}"
    (results.root / benchmark).parent.mkdir(parents=True, exist_ok=True)
    head = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time"
    row = f"{seconds}\t0:00:12\t100.5\t1\t1\t1\t0\t0\t90\t{seconds / 2}"
    (results.root / benchmark).write_text(f"{head}\n{row}\n")
    run, stage = name.split("/")
    own = {"rule": rule, "wildcards": {"run": run, "stage": stage}, "command": command}
    own |= {"commit": "0123456789abcdef-dirty", "benchmark": benchmark}
    write_job(results.root, made, inputs, **own)


def finished_run(folder: Path) -> tuple[Config, Results]:
    """Train and evaluate both stages."""
    config, results = load_config(config_of(folder)), Results(folder)
    encode_text(results)
    for stage in ("first", "second"):
        train_stage(config, results, stage)
    return config, results
