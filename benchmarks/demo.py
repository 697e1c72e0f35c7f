"""The default run, timed from nothing to report: how long it takes and how well its model predicts.

    python benchmarks/demo.py [--quick] [--json FILE]

``--quick`` runs the smoke preset instead, whose model is too small to be good.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, report

from spider.files import read_json

ROOT = Path(__file__).parents[1]


def run(configuration: str, folder: Path) -> tuple[float, dict]:
    """Seconds of one whole workflow in an empty folder, and its summary.json."""
    command = [Path(sys.executable).with_name("snakemake"), "--configfile", ROOT / configuration]
    command += ["--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
    begun = time.perf_counter()
    subprocess.run([*command, "--config", f"results={folder}"], cwd=folder.parent, check=True)
    return time.perf_counter() - begun, read_json(folder / "report/summary.json")


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    configuration = "presets/smoke.yaml" if options.quick else "config.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        seconds, summary = run(configuration, Path(scratch) / "results")
    (name, one), *_ = summary["runs"].items()
    rows = [[f"bits per byte, {name} after {s}", f"{one['stages'][s]['bpb']:.3f}"] for s in one["order"]]
    rows += [[f"bits per byte, {c}", f"{bits:.3f}"] for c, bits in summary["compressors"].items()]
    rows += [[f"seconds, {rule}", f"{took:.1f}"] for rule, took in summary["seconds_by_rule"].items()]
    rows += [["seconds, the whole run", f"{seconds:.1f}"]]
    figures = {"seconds": seconds, "summary": summary}
    report(
        f"The workflow of {configuration}", ["what", "figure"], rows, figures, options, ["torch", "snakemake"]
    )


if __name__ == "__main__":
    main()
