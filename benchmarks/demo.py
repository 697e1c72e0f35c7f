"""Time the default run from nothing to the report, then score its recipe on two held-out texts.

The first run is ``config.yaml`` in an empty folder. Then the run of ``presets/ngram-cpu.yaml`` is trained
with three seeds on its own held-out text, and the default run on its choice of packages. Two networks without
an n-gram index take as many steps on the text of the preset. Each run is scored with the online mixer too.

    python benchmarks/demo.py [--folder FOLDER] [--seeds N] [--quick] [--json FILE]

What is finished is kept in ``--folder`` and not done again. ``--quick`` uses the smoke preset for both, whose
model is too small to be good, and one seed.
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

#: Networks without an n-gram index, by name, as changes of the run.
NETWORKS: dict[str, dict[str, Any]] = {
    "spider": {"model": {"preset": "slim", "ngram": None}},
    "gpt": {"model": "gpt-cpu", "defaults": {"seq_len": 256, "micro_batch": 16, "lr": 16.0e-3}},
}


def varied(texts: dict[str, dict[str, Any]], seeds: int) -> dict[str, Any]:
    """Return the configuration with a run for each seed of the configurations by held-out text."""
    varied: dict[str, Any] = {"datasets": {}, "runs": {}}
    for text, raw in texts.items():
        (base,) = raw["runs"].values()
        varied["datasets"][text] = raw["datasets"][base["data"]]
        for seed in range(seeds):
            run = {**base, "data": text, "seed": seed, "resources": {"threads": 1}}
            varied["runs"][f"{text}-{seed}"] = merged(run, {"evaluation": {"mixer": {}}})
    base = varied["runs"]["first-0"]
    for name, change in NETWORKS.items():
        varied["runs"][name] = {
            **base,
            **change,
            "defaults": merged(base["defaults"], change.get("defaults", {})),
        }
    return varied


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="folder of the results (default: a temporary one)")
    options.add_argument("--seeds", type=int, default=3, help="seeds of each text (default: 3)")
    chosen = options.parse_args()
    default, preset = ("smoke.yaml",) * 2 if chosen.quick else ("../config.yaml", "ngram-cpu.yaml")
    seeds = 1 if chosen.quick else chosen.seeds
    with tempfile.TemporaryDirectory() as scratch:
        folder = (chosen.folder or Path(scratch)).resolve()
        texts = {
            "first": yaml.safe_load((ROOT / "presets" / preset).read_text()),
            "other": yaml.safe_load((ROOT / "presets" / default).read_text()),
        }
        results = Results(folder / "default-run")
        seconds = workflow(texts["other"], results.root)
        summary = read_json(results.root / "report/summary.json")
        rows = [["seconds, from an empty folder to the report", f"{seconds:.1f}"]]
        rows += [[f"seconds, {rule}", f"{took:.1f}"] for rule, took in summary["seconds_by_rule"].items()]
        show("The workflow of the default run", ["what", "figure"], rows)

        raw = varied(texts, seeds)
        results = Results(folder / "results")
        (last,) = {run["stages"][-1]["name"] for run in raw["runs"].values()}
        workflow(raw, results.root, *(results.stage(run, last).evaluation for run in raw["runs"]))
        rows, figures = [], {"seconds": seconds, "summary": summary}
        for text in ("first", "other"):
            found = [rates(read_json(results.stage(f"{text}-{n}", last).evaluation)) for n in range(seeds)]
            figures[text] = found
            for label in found[0]:
                pairs = [one[label] for one in found]
                if pairs.count(pairs[0]) == seeds > 1:
                    pairs = pairs[:1]  # a baseline does not depend on the seed
                cells = [[rate for rate in column if rate is not None] for column in zip(*pairs, strict=True)]
                rows.append([text, label, *(spread(cell) if cell else "" for cell in cells)])
        for name in NETWORKS:
            figures[name] = rates(read_json(results.stage(name, last).evaluation))
            rows += [
                ["first", f"{name} without an index: {label}", *(f"{rate:.4f}" for rate in pair)]
                for label, pair in figures[name].items()
                if label in ("model", "with the mixer")
            ]
    columns = ["held-out text", "bits per byte", "each document alone", "with what came before"]
    report(f"{preset}, {seeds} seeds", columns, rows, figures, chosen, ["torch", "snakemake"])


if __name__ == "__main__":
    main()
