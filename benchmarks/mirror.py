"""The cost of a mirror to a training: the same training with and without one in turns, and the copier itself.

    python benchmarks/mirror.py [--turns 3] [--steps 240] [--every 120] [--url URL] [--json FILE]

A turn trains from the same data, once with a mirror and once without, in changing order. The share is the
processor time of the copier after the first step, over that of the training beside it, because a shared
machine is faster at one time than at another. The start of the copier, once for a workflow, has a row of its
own. ``--every`` is the number of steps between two checkpoints.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil
import yaml
from common import ROOT, parser, report, workflow

from spider.provenance.made import attempts

RUN, STAGE = "smoke", "main"


def configuration(steps: int, every: int) -> dict:
    """Return the smoke preset with one stage, a larger model, and a checkpoint after so many steps."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    run = config["runs"][RUN]
    run["model"] |= {"hidden": 192, "ffn_hidden": 512}
    run["defaults"] |= {"seq_len": 256, "ckpt_every": every}
    run["stages"] = [{"name": STAGE, "max_steps": steps, "schedule": "constant", "warmup_steps": 5}]
    return config | {"tracking": {"enabled": False}}


class Watch:
    """Note the processor seconds of the copier of a workflow, in all and up to the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds, self.start = folder, 0.0, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            for one in psutil.process_iter(["cmdline", "cwd", "cpu_times"]):
                is_copier = (one.info["cmdline"] or [])[-3:] == ["mirror", "push", "--follow"]
                if is_copier and one.info["cwd"] == str(self.folder):
                    self.seconds = one.info["cpu_times"].user + one.info["cpu_times"].system
                    if not (self.folder / f"results/runs/{RUN}/{STAGE}/metrics.jsonl").exists():
                        self.start = self.seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--steps", type=int, default=240)
    options.add_argument("--every", type=int, default=120)
    options.add_argument("--url", help="address to mirror to (default: a folder)")
    options = options.parse_args()
    steps, turns = (30, 1) if options.quick else (options.steps, options.turns)
    config = configuration(steps, options.every)
    found = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as made:
        prepared = Path(made).resolve() / "prepared"
        prepared.mkdir()
        workflow(config, prepared / "results", options=["--until", "index", "warmup"])
        for turn in range(turns):
            for kind in ("with", "without")[:: 1 if turn % 2 else -1]:
                folder = prepared.with_name(f"{kind}-{turn}")
                shutil.copytree(prepared, folder, symlinks=True)
                url = (options.url or f"{made}/mirror") + f"/{time.time_ns()}"
                own = {**config, "mirror": url} if kind == "with" else config
                with Watch(folder) as watch:
                    train = f"runs/{RUN}/{STAGE}/train.json"
                    workflow(own, folder / "results", folder / "results" / train)
                (measured,) = attempts(folder / "results/benchmarks/train" / train.replace(".json", ".tsv"))
                found[kind].append(measured["cpu_time"])
                found[f"wall {kind}"].append(measured["s"])
                if kind == "with":
                    found["copier"].append(watch.seconds - watch.start)
                    found["start"].append(watch.start)
                print(turn, kind, measured["cpu_time"], measured["s"], watch.start, watch.seconds, flush=True)
                shutil.rmtree(folder)
    share = median(a / b for a, b in zip(found["copier"], found["with"], strict=True))
    ratio = median(a / b for a, b in zip(found["with"], found["without"], strict=True))
    wall = median(a / b for a, b in zip(found["wall with"], found["wall without"], strict=True))
    rows = [
        ["training without a mirror, processor seconds", f"{median(found['without']):.1f}"],
        ["the same with a mirror, over that without", f"{ratio:.3f}"],
        ["the same in seconds of a clock", f"{wall:.3f}"],
        ["copier, share of the training beside it", f"{share:.2%}"],
        ["start of the copier, processor seconds", f"{median(found['start']):.1f}"],
    ]
    figures = found | {"share": share, "ratio": ratio}
    report("The cost of a mirror", ["", ""], rows, figures, options, ["torch", "fsspec"])


if __name__ == "__main__":
    main()
