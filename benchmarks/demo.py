"""Time the default run from nothing to the report, then train it with other seeds and another split.

The first run is ``config.yaml`` in an empty folder. In the same folder the same run is trained with two more
seeds, and with all three seeds on a split by single documents. In that split, parts of one file are on both
sides. This favours everything that remembers the training text, compressors included.

    python benchmarks/demo.py [--quick] [--json FILE]

``--quick`` uses the smoke preset, whose model is too small to be good, and one seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, baseline_rates, parser, report, show, spread, workflow

from spider.files import read_json
from spider.results import Results

#: Settings of a dataset that is split by single documents.
BY_DOCUMENT = {"split_by": None, "validation": 0.02}


def varied(raw: dict[str, Any], seeds: range) -> dict[str, Any]:
    """Return the configuration with a run for each seed and split, the first as it is."""
    ((name, base),) = raw["runs"].items()
    data = raw["datasets"][base["data"]]
    runs = {name if seed == 0 else f"{name}-{seed}": {**base, "seed": seed} for seed in seeds}
    evaluation = {**base.get("evaluation", {}), "max_bytes": 200_000, "largest_group": None}
    for seed in seeds:
        runs[f"documents-{seed}"] = {**base, "seed": seed, "data": "documents", "evaluation": evaluation}
    return {**raw, "datasets": {**raw["datasets"], "documents": {**data, **BY_DOCUMENT}}, "runs": runs}


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    path = ROOT / ("presets/smoke.yaml" if options.quick else "config.yaml")
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    ((name, base),) = raw["runs"].items()
    last = base["stages"][-1]["name"]
    with tempfile.TemporaryDirectory() as scratch:
        results = Results(Path(scratch) / "results")
        seconds = workflow(raw, results.root)
        summary = read_json(results.root / "report/summary.json")
        rows = [["seconds, from an empty folder to the report", f"{seconds:.1f}"]]
        rows += [[f"seconds, {rule}", f"{took:.1f}"] for rule, took in summary["seconds_by_rule"].items()]
        show(f"The workflow of {path.name}", ["what", "figure"], rows)

        raw = varied(raw, range(1 if options.quick else 3))
        workflow(raw, results.root)
        scores = {run: read_json(results.stage(run, last).evaluation) for run in raw["runs"]}
    rows, figures = [], {"seconds": seconds, "summary": summary}
    for split, prefix in ((base["data"], name), ("documents", "documents")):
        runs = [run for run in scores if run.startswith(prefix)]
        bits = [scores[run]["bpb"] for run in runs]
        strict = [scores[run]["bpb_strict"] for run in runs]
        compressors = baseline_rates(scores[runs[0]])
        best = min(compressors, key=compressors.__getitem__)
        figures[split] = {
            "bpb": bits,
            "bpb_strict": strict,
            "compressors": compressors,
            "bytes": scores[runs[0]]["bytes"],
        }
        rows += [[split, f"{run}, after {last}", f"{scores[run]['bpb']:.4f}"] for run in runs]
        rows.append([split, f"mean of {len(runs)} seeds, ends of documents given", spread(bits)])
        rows.append([split, f"mean of {len(runs)} seeds, ends of documents predicted", spread(strict)])
        for key, rate in sorted(compressors.items(), key=lambda item: item[1]):
            rows.append([split, key, f"{rate:.4f}"])
        rows.append([split, f"mean below {best}", f"{compressors[best] - sum(bits) / len(bits):.4f}"])
    columns = ["split", "bits per byte", "figure"]
    report(f"{name}, by seed and split", columns, rows, figures, options, ["torch", "snakemake"])


if __name__ == "__main__":
    main()
