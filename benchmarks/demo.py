"""Time a configuration from nothing to the report, then train each of its models with several seeds.

    python benchmarks/demo.py [--config FILE] [--folder FOLDER] [--seeds N] [--quick] [--json FILE]

The configuration is ``config.yaml``, the default run, or another file. The scores of a model are the mean and
the sample standard deviation over the seeds. A model over bytes is also scored with the online mixer. The
spread over groups of documents, such as packages, is printed too. What is finished is kept in ``--folder``
and not done again. ``--quick`` takes the smoke preset, whose model is too small to be good, and one seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, parser, rates, report, show, spread, workflow

from spider.config import merged
from spider.files import read_json
from spider.results import Results


def varied(raw: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Return a configuration with a run for each run of ``raw`` and each seed."""
    runs = {}
    for name, base in raw["runs"].items():
        of_bytes = "tokenizer" not in raw["datasets"][base["data"]]
        for seed in range(seeds):
            change = {"seed": seed, "evaluation": {"mixer": {} if of_bytes else None}}
            runs[f"{name}-{seed}"] = merged(base, change)
    return {**raw, "runs": runs}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, help="the configuration (default: config.yaml)")
    options.add_argument("--folder", type=Path, help="folder of the results (default: a temporary one)")
    options.add_argument("--seeds", type=int, default=3, help="seeds of each run (default: 3)")
    chosen = options.parse_args()
    config = ROOT / "presets/smoke.yaml" if chosen.quick else chosen.config or ROOT / "config.yaml"
    seeds = 1 if chosen.quick else chosen.seeds
    raw = yaml.safe_load(config.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        results = Results(folder / "from-nothing")
        seconds = workflow(raw, results.root)
        summary = read_json(results.root / "report/summary.json")
        rows = [["seconds, from an empty folder to the report", f"{seconds:.1f}"]]
        rows += [[f"seconds, {rule}", f"{took:.1f}"] for rule, took in summary["seconds_by_rule"].items()]
        for name, run in summary["runs"].items():
            stages = run["stages"].values()
            trained = f"{sum(stage['seconds'] for stage in stages):.1f}"
            rows.append([f"seconds, training of {name}", trained])
            rows.append([f"MB, training text of {name}", f"{sum(one['bytes'] for one in stages) / 1e6:.2f}"])
        show(f"The workflow of {config.name}", ["what", "figure"], rows)

        results = Results(folder / "seeds")
        runs = varied(raw, seeds)
        files = {
            name: results.stage(name, run["stages"][-1]["name"]).evaluation
            for name, run in runs["runs"].items()
        }
        workflow(runs, results.root, *files.values())
        rows, figures = [], {"seconds": seconds, "summary": summary}
        for name in raw["runs"]:
            evaluations = [read_json(files[f"{name}-{seed}"]) for seed in range(seeds)]
            found = [rates(evaluation) for evaluation in evaluations]
            groups = [evaluation["results"].get("spread", {}).get("metrics") for evaluation in evaluations]
            figures[name] = {"rates": found, "groups": groups}
            for label in found[0]:
                pairs = [one[label] for one in found]
                if pairs.count(pairs[0]) == seeds > 1:
                    pairs = pairs[:1]  # a baseline does not depend on the seed
                cells = [[rate for rate in column if rate is not None] for column in zip(*pairs, strict=True)]
                rows.append([name, label, *(spread(cell) if cell else "" for cell in cells)])
            if groups[0]:
                ends = [[one[f"spread/{end}"] for one in groups] for end in ("lowest", "highest")]
                label = f"lowest and highest of {groups[0]['spread/groups']:.0f} groups, each document alone"
                rows.append([name, label, *map(spread, ends)])
    columns = ["run", "bits per byte", "each document alone", "with what came before"]
    report(f"{config.name}, {seeds} seeds", columns, rows, figures, chosen, ["torch", "snakemake"])


if __name__ == "__main__":
    main()
