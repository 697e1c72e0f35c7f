"""Compare runs on the same text at equal processor time, in bits per byte, beside compressors.

The runs are those of presets/arena.yaml or of ``--runs FILE``. Each run has its settings there, but one
stage, with as many tokens as it learns in ``--seconds`` of one core. The measured time of a step gives that
number. Each run is trained once for each seed. All score the same held-out bytes.

    python benchmarks/families.py [--search] [--quick] [--json FILE] [--folder FOLDER]

``--search`` trains each run for a third of the time at every point of one grid: learning rate, ids of a
window, windows of a step. It prints the best settings; those of the preset were found this way.
``--tokens N`` trains each run on N ids instead, to compare at equal steps.
``--only NAME ...`` trains some of the runs.

Trained models stay in ``--folder``, so the same command goes on with them.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from common import ROOT, parser, rates, report, spread, workflow

from spider.common.files import digest, read_json, write_json
from spider.common.results import Results
from spider.config import StageSpec, load_config, merged
from spider.model import build_model
from spider.training.optim import build_optimizer

STAGE = "main"
#: Points of the search: learning rate, ids of a window, windows of a step.
GRID = list(itertools.product([4e-3, 8e-3, 16e-3, 32e-3], [(256, 2), (256, 4), (256, 8), (512, 4)]))


def run_of(base: dict[str, Any], point: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return a run with the settings of a point."""
    run = {**base, "precision": "fp32", "compile": False}
    run["defaults"] = merged(base["defaults"], point)
    evaluation = {"max_bytes": options.scored, "loops_bytes": 0, "sample_bytes": 20}
    run["evaluation"] = merged(base["evaluation"], evaluation)
    return run


def stage_of(tokens: int) -> list[dict[str, Any]]:
    return [{"name": STAGE, "tokens": tokens, "schedule": "linear"}]


def step_seconds(specs: dict[str, StageSpec], rounds: int) -> dict[str, float]:
    """Return the median processor seconds of one optimizer step of each, measured on one thread.

    The runs take turns, so a slow minute of the machine affects all alike.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def stepper(spec: StageSpec) -> Callable[[], None]:
        model = build_model(spec.model).train()
        optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, torch.float32)
        ids = torch.randint(32, 127, (spec.settings.micro_batch, spec.settings.seq_len + 1))

        def step() -> None:
            model(ids[:, :-1], ids[:, 1:], **model.empty_candidates(ids[:, :-1])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return step

    steppers = {name: stepper(spec) for name, spec in specs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    for _ in range(rounds):
        for name, step in steppers.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {name: median(values) for name, values in seconds.items()}


def token_seconds(
    raw: dict[str, Any], runs: dict[str, dict[str, Any]], folder: Path, rounds: int
) -> dict[str, float]:
    """Return the processor seconds of a token of each run, which are measured once."""
    cache = folder / f"token-seconds-{digest(runs)}.json"
    if not cache.exists():
        config = load_config(
            {**raw, "runs": {name: {**run, "stages": stage_of(1)} for name, run in runs.items()}}
        )
        specs = {name: config.stage(name, STAGE) for name in runs}
        seconds = step_seconds(specs, rounds)
        write_json(cache, {name: seconds[name] / spec.tokens_per_step for name, spec in specs.items()})
    return read_json(cache)


def parameters(raw: dict[str, Any], run: str) -> int:
    with torch.device("meta"):
        return build_model(load_config(raw).stage(run, STAGE).model).num_parameters()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--search", action="store_true", help="find the best settings on a grid")
    arguments.add_argument("--runs", type=Path, default=ROOT / "presets/arena.yaml", help="file of the runs")
    arguments.add_argument("--folder", type=Path, help="folder of the results, which a later call continues")
    arguments.add_argument("--seconds", type=float, default=120.0, help="seconds of one core for a training")
    arguments.add_argument("--tokens", type=int, help="tokens of each training, instead of seconds")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="train only these runs")
    arguments.add_argument("--seeds", type=int, default=3, help="seeds of each run")
    options = arguments.parse_args()
    options.scored = 5_000 if options.quick else 100_000
    raw = yaml.safe_load(options.runs.read_text()) | {"tracking": {"enabled": False}}
    bases = {name: run for name, run in raw["runs"].items() if name in (options.only or raw["runs"])}
    points: list[dict[str, Any]] = [{}]
    seeds = range(1 if options.quick or options.search else options.seeds)
    seconds = 2.0 if options.quick else options.seconds
    if options.search:
        points = [{"lr": lr, "seq_len": length, "micro_batch": rows} for lr, (length, rows) in GRID]
        points = points[:2] if options.quick else points
        seconds /= 3
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="families-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    runs: dict[str, dict[str, Any]] = {}
    for i, point in enumerate(points):
        variants = {name: run_of(base, point, options) for name, base in bases.items()}
        costs = {} if options.tokens else token_seconds(raw, variants, folder, 2 if options.quick else 9)
        for name, run in variants.items():
            stages = stage_of(options.tokens or round(seconds / costs[name]))
            for seed in seeds:
                runs[f"{name}-{i}-{seed}"] = {**run, "seed": seed, "stages": stages}
    raw["runs"] = runs
    results = Results(folder / "results")
    workflow(raw, results.root, *(f"runs/{run}" for run in runs))

    rows, figures = [], {}
    scores = {run: read_json(results.stage(run, STAGE).evaluation) for run in runs}
    for name in bases:
        best = min(range(len(points)), key=lambda i: scores[f"{name}-{i}-0"]["bpb"])
        chosen = [f"{name}-{best}-{seed}" for seed in seeds]
        bpb, carried = ([scores[run][key] for run in chosen] for key in ("bpb", "bpb_carried"))
        size, read = parameters(raw, chosen[0]), read_json(results.stage(chosen[0], STAGE).receipt)["bytes"]
        note = " ".join(f"{key} {value}" for key, value in points[best].items())
        figures[name] = {"bpb": bpb, "carried": carried, "parameters": size, "bytes": read}
        figures[name]["settings"] = points[best]
        figures[name]["all"] = [[point, scores[f"{name}-{i}-0"]["bpb"]] for i, point in enumerate(points)]
        rows.append([name, f"{size / 1e6:.2f}M", f"{read / 1e6:.2f}", spread(bpb), spread(carried), note])
    if not options.search:
        for name, pair in rates(scores[next(iter(runs))], baselines=True).items():
            cells = ["" if rate is None else f"{rate:.3f}" for rate in pair]
            rows.append([name, "", "", *cells, ""])
            figures[name] = {"bpb": [pair[0]], "carried": [pair[1]]}
    budget = f"{options.tokens:,} tokens" if options.tokens else f"{seconds:.0f} s of one core"
    title = f"{budget} each, {len(seeds)} seeds, {options.scored:,} held-out bytes"
    columns = ["run", "params", "MB read", "each document alone", "with what came before", "settings"]
    report(title, columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
