"""The default run: timed from nothing to report, then with other seeds and another split of the documents.

The first run is ``config.yaml`` in an empty folder. In the same folder then the same run is trained with two
more seeds, and with all three on a split by single documents: there parts of a file that was cut fall on both
sides, which flatters whoever has a memory, compressors included.

    python benchmarks/demo.py [--quick] [--json FILE]

``--quick`` takes the smoke preset instead, whose model is too small to be good, and one seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from common import arguments, report, show

from spider.config import load_config
from spider.evaluation.artifact import Evaluation
from spider.results import Results

ROOT = Path(__file__).parents[1]
#: The split of before packages were held out whole.
BY_DOCUMENT = {"split_by": None, "validation": 0.02}


def run(configuration: Path, folder: Path) -> float:
    """Seconds of one workflow."""
    command = [Path(sys.executable).with_name("snakemake"), "--configfile", configuration]
    command += ["--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
    begun = time.perf_counter()
    subprocess.run([*command, "--config", f"results={folder}"], cwd=folder.parent, check=True)
    return time.perf_counter() - begun


def varied(raw: dict[str, Any], seeds: range) -> dict[str, Any]:
    """The configuration with a run for each seed and split, the first as it is."""
    ((name, base),) = raw["runs"].items()
    data = raw["datasets"][base["data"]]
    runs = {name if seed == 0 else f"{name}-{seed}": {**base, "seed": seed} for seed in seeds}
    evaluation = {**base.get("evaluation", {}), "max_bytes": 200_000}
    for seed in seeds:
        runs[f"documents-{seed}"] = {**base, "seed": seed, "data": "documents", "evaluation": evaluation}
    return {**raw, "datasets": {**raw["datasets"], "documents": {**data, **BY_DOCUMENT}}, "runs": runs}


def main() -> None:
    options = arguments(__doc__ or "")
    path = ROOT / ("presets/smoke.yaml" if options.quick else "config.yaml")
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    ((name, base),) = raw["runs"].items()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "results"
        seconds = run(path, folder)
        summary = json.loads((folder / "report/summary.json").read_text())
        rows = [["seconds, from an empty folder to the report", f"{seconds:.1f}"]]
        rows += [[f"seconds, {rule}", f"{took:.1f}"] for rule, took in summary["seconds_by_rule"].items()]
        show(f"The workflow of {path.name}", ["what", "figure"], rows)

        raw = varied(raw, range(1 if options.quick else 3))
        (Path(scratch) / "varied.yaml").write_text(json.dumps(raw))
        run(Path(scratch) / "varied.yaml", folder)
        config, last = load_config(raw), base["stages"][-1]["name"]
        measured = {one: Evaluation.read(Results(folder).stage(one, last).evaluation) for one in config.runs}
    rows, figures = [], {"seconds": seconds, "summary": summary}
    for split, runs in ((base["data"], [one for one in measured if one.startswith(name)]),
                        ("documents", [one for one in measured if one.startswith("documents")])):  # fmt: skip
        bits = [measured[one].bpb for one in runs]
        strict = [measured[one].bpb_strict for one in runs]
        given = measured[runs[0]].compressors
        best = min(given, key=given.__getitem__)
        figures[split] = {
            "bpb": bits,
            "bpb_strict": strict,
            "compressors": given,
            "bytes": measured[runs[0]].bytes,
        }
        rows += [[split, f"{one}, after {last}", f"{measured[one].bpb:.4f}"] for one in runs]
        for kind, values in (("ends of documents given", bits), ("ends of documents predicted", strict)):
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            rows += [[split, f"mean of {len(values)} seeds, {kind}", f"{mean(values):.4f}{spread}"]]
        rows += [[split, key, f"{rate:.4f}"] for key, rate in sorted(given.items(), key=lambda one: one[1])]
        rows += [[split, f"mean below {best}", f"{given[best] - mean(bits):.4f}"]]
    columns = ["split", "bits per byte", "figure"]
    report(f"{name}, by seed and split", columns, rows, figures, options, ["torch", "snakemake"])


if __name__ == "__main__":
    main()
