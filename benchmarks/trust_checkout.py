"""Train with code that is not committed, check the result out, train again there, and compare the weights.

python benchmarks/trust_checkout.py [NUMBER_OF_RUNS]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

#: Uncommitted changes that alter the weights: code that is added to a file of the project, new or old.
EDITS = {
    "initializer": {
        "spider/model/__init__.py": """
_build = build_model

def build_model(*arguments):
    model = _build(*arguments)
    for one in model.parameters():
        one.data.mul_(0.9)
    return model
"""
    },
    "rate": {
        "spider/training/schedule.py": """
_factor = lr_factor

def lr_factor(*arguments):
    return 0.5 * _factor(*arguments)
"""
    },
    "new module": {
        "spider/training/halved.py": "FACTOR = 0.25\n",
        "spider/training/schedule.py": """
from spider.training.halved import FACTOR

_factor = lr_factor

def lr_factor(*arguments):
    return FACTOR * _factor(*arguments)
""",
    },
    "seeds": {
        "spider/training/loop.py": """
_seed_of = seed_of

def seed_of(*parts):
    return _seed_of("other", *parts)
"""
    },
    "order": {
        "spider/data/loader.py": """
_keys_of = epoch_keys

def epoch_keys(seed, epoch):
    return _keys_of(seed + 1, epoch)
"""
    },
}
_TINY: dict[str, Any] = {
    "preset": "tiny",
    "hidden": 32,
    "prelude_layers": 1,
    "coda_layers": 1,
    "ffn_hidden": 32,
    "attention": {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16},
    "moe": {"experts": 2, "expert_hidden": 16, "shared_hidden": 16},
    "engram": {"layers": [0], "orders": [3], "heads": 2, "head_dim": 8, "table_size": 512},
    "recurrence": {"layers": 1, "loops": 2},
}
#: Models and settings of a run.
RUNS: dict[str, dict[str, Any]] = {
    "spider, muon": {"model": _TINY, "optimizer": {"kind": "muon"}},
    "gpt, adamw": {
        "model": {"preset": "gpt-cpu", "hidden": 32, "heads": 2},
        "optimizer": {"kind": "adamw"},
    },
}


def again(folder: Path, run: dict[str, Any], edits: dict[str, str]) -> tuple[str, str]:
    """Train in a clone with uncommitted changes, then in its checkout; return both digests of the weights."""
    clone, work, restored = folder / "clone", folder / "work", folder / "restored"
    _run(["git", "clone", "--quiet", str(ROOT), str(clone)], folder)
    for name, text in edits.items():
        with open(clone / name, "a") as file:
            file.write(text)
    work.mkdir()
    with open(work / "text.jsonl", "w") as file:
        for i in range(200):
            text = f"Document {i} says: " + " ".join(str(i * j % 97) for j in range(40))
            file.write(json.dumps({"id": str(i), "text": text}) + "\n")
    settings = {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "max_steps": 20}
    block = {"data": "text", "precision": "fp32", "defaults": settings, "resources": {"threads": 1}, **run}
    block["stages"] = [{"name": "main"}]
    source = {"kind": "local", "files": ["text.jsonl"]}
    config = {"datasets": {"text": {"source": source, "validation": 0.1}}, "runs": {"small": block}}
    (work / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"PYTHONPATH": str(clone)}
    target = "results/runs/small/main/train.json"
    words = [str(BIN / "snakemake"), "--snakefile", str(clone / "Snakefile"), "--cores", "1", target]
    _run(words, work, **environment)
    command = [str(BIN / "spider"), "checkout", "small/main", str(restored)]
    *warnings, last = _run(command, work, **environment).splitlines()
    assert not warnings, warnings
    assert last.startswith(f"cd {restored} && PYTHONPATH="), last
    _run(["bash", "-c", last], folder)
    first, second = (json.loads((one / target).read_text())["weights"] for one in (work, restored))
    return first, second


def _run(words: list[str], folder: Path, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    done = subprocess.run(
        words, cwd=folder, env={**own, "PATH": path, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def measure_checkout(count: int = 10) -> None:
    """Print for each run whether its checkout gives the same bytes, and that the changes matter."""
    cases = [(name, run, what) for what in EDITS for name, run in RUNS.items()][:count]
    seen: dict[str, set[str]] = {name: set() for name in RUNS}
    equal = 0
    for name, run, what in cases:
        with tempfile.TemporaryDirectory() as folder:
            first, second = again(Path(folder), run, EDITS[what])
        equal += first == second
        seen[name].add(first)
        print(
            f"{name:14} {what:12} {first} {second} {'equal' if first == second else 'DIFFERENT'}", flush=True
        )
    print(f"equal bytes: {equal} of {len(cases)}; different weights: {sum(map(len, seen.values()))}")


if __name__ == "__main__":
    measure_checkout(*map(int, sys.argv[1:]))
