"""What validation on the way takes of the default run, and what it says beside the evaluation.

The default run's model (its smoke preset with ``--quick``) is trained for some steps by the real engine on
the real corpus, its memory included, and validated every few of them. The first validation also reads the
text and asks the memory, once for the whole stage; so it is told apart. Shares are of a whole stage of the
configuration, validated as often as by default, by the clock (both of one process, so a busy machine slows
both), and in the FLOPs by which the default is chosen.

    python benchmarks/validation.py [--quick] [--json FILE] [--folder FOLDER] [--threads N]
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from common import parser, report
from variants import DATASET, ROOT, memories_of, prepare_data

from spider.checkpoints.records import MANIFEST, Manifest
from spider.config import StageSpec, load_config
from spider.memory.store import make_memories, open_memory
from spider.results import Results
from spider.training.loop import Trainer
from spider.training.metrics import read_rows
from spider.training.stage import train

STEPS, EVERY = 40, 5


def specs(quick: bool) -> list[StageSpec]:
    """The stages as they are configured."""
    raw = yaml.safe_load((ROOT / ("presets/smoke.yaml" if quick else "config.yaml")).read_text())
    ((name, run),) = raw["runs"].items()
    config = load_config(raw)
    return [config.stage(name, stage["name"]) for stage in run["stages"]]


def measure(
    spec: StageSpec, folder: Path, shards: Path, memories: tuple[Path, Path] | None
) -> dict[str, Any]:
    """Seconds of a step, of the first validation, and of another."""
    short = {"tokens": None, "max_steps": STEPS, "val_every": EVERY, "ckpt_every": STEPS, "log_every": EVERY}
    short = spec.model_copy(update={"settings": spec.settings.model_copy(update=short)})
    receipt = train(short, folder, shards, memories=memories)
    took = [row.metrics["system/validation_seconds"] for row in read_rows(folder / "metrics.jsonl")]
    manifest = Manifest.read(folder / receipt.checkpoint / MANIFEST)
    assert manifest.validated is not None
    return {"step": receipt.seconds / STEPS, "first": took[0], "later": median(took[1:])}


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--threads", type=int, help="of training (default: torch's)")
    options_parser.add_argument("--folder", type=Path, help="keep the encoded corpus here")
    options = options_parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    stages = specs(options.quick)
    with tempfile.TemporaryDirectory(prefix="validation-", ignore_cleanup_errors=True) as scratch:
        results = Results(options.folder or Path(scratch))
        results.root.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(level=logging.WARNING, filename=Path(scratch) / "train.log")
        config = stages[0].model.memory
        prepare_data(results.root, memory=config is not None)
        shards, memories = results.shards(DATASET), None
        if config is not None:
            make_memories(shards, config, *(memories := memories_of(results.root, config)))
        found = measure(stages[0], Path(scratch) / "stage", shards, memories)
        read = tuple(map(open_memory, memories)) if memories else None
        rows, figures = [], dict(found)
        for spec in stages[:1] if options.quick else stages:
            folder = Path(scratch) / spec.stage
            folder.mkdir()
            trainer = Trainer(spec, folder, shards, {"data_digest": ""}, None, None, None, memories=read)
            validation, end = trainer.validation, trainer.progress.end
            trainer.loader.close()
            if validation.every is None or end is None or end < validation.every:
                rows.append([f"{spec.stage}, {end} steps", "none", "", "", ""])
                continue
            times = end // validation.every + bool(end % validation.every)
            work, stage = times * validation.cost / end, end * found["step"]
            spent = found["first"] + (times - 1) * found["later"]
            share = spent / (stage + spent)
            verdict = "" if options.quick else "met" if share < 0.01 else "MISSED"
            every = f"{times}, every {validation.every} steps"
            rows.append([f"{spec.stage}, {end} steps", every, f"{work:.2%}", f"{share:.2%}", verdict])
            figures[spec.stage] = {"every": validation.every, "times": times, "flops": work, "share": share}
        for name, what in (("step", "a step"), ("first", "the first"), ("later", "another")):
            rows.append([what, f"{found[name]:.3f} s", "", "", ""])
        title = f"validations on {stages[0].settings.val_bytes:,} bytes"
        report(title, ["", "how often", "of FLOPs", "of time", "< 1%"], rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
