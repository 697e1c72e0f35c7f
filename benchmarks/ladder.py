"""Measure whether a ladder on a CPU forecasts larger runs: the acceptance of docs/sweeps.md.

    python benchmarks/ladder.py FOLDER             # trains what is missing in FOLDER, and prints the table
    python benchmarks/ladder.py FOLDER --seeds     # also five ladders of disjoint seeds
    python benchmarks/ladder.py FOLDER --spider    # also those of the preset with Spiders

Each forecast is written before its target is trained: the workflow does not start the target without it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SIZES = {1e11: [8, 16, 24, 32], 3e11: [16, 24, 32, 48], 1e12: [24, 32, 48, 64]}


def rungs(seeds: dict[float, list[int]]) -> list[dict[str, Any]]:
    return [{"flops": flops, "sizes": SIZES[flops], "seeds": own} for flops, own in seeds.items()]


def configuration(disjoint: bool, spider: bool) -> dict[str, Any]:
    """Return the preset with a second ladder of fewer budgets, and five of disjoint seeds."""
    plain: dict[str, Any] = yaml.safe_load((ROOT / "presets/ladder-cpu.yaml").read_text("utf-8"))
    plain["results"] = "results"
    gpt = plain["ladders"]["gpt"]
    if not spider:
        plain["ladders"] = {"gpt": gpt}
    gpt["rungs"] = rungs({1e11: [1, 2, 3], 3e11: [1, 2, 3], 1e12: [1, 2]})
    target = {"flops": 3e12, "sizes": [48], "seeds": [4]}
    lower = {"like": "gpt", "rungs": rungs({1e11: [1, 2, 3], 3e11: [1, 2, 3]}), "target": target}
    plain["ladders"]["lower"] = lower
    for first in range(1, 10, 2) if disjoint else ():
        one = {
            "like": "gpt",
            "rungs": rungs({1e11: [first, first + 1], 3e11: [first]}),
            "target": {"flops": 3e12, "sizes": [48], "seeds": [first]},
        }
        plain["ladders"][f"seeds{first}"] = one
    return plain


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--seeds", action="store_true", help="five ladders of disjoint seeds as well")
    options.add_argument(
        "--spider", action="store_true", help="the ladders of the preset with Spiders as well"
    )
    options.add_argument("--cores", default="2")
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "config.yaml").write_text(
        yaml.safe_dump(configuration(given.seeds, given.spider), sort_keys=False), "utf-8"
    )
    command = [str(Path(sys.executable).with_name("snakemake")), "--snakefile", str(ROOT / "Snakefile")]
    command += ["--cores", given.cores, "results/report/ladders.html"]
    if subprocess.run(command, cwd=given.folder).returncode:
        # The target of a ladder without a forecast does not start. The page shows the others, and the reason.
        page = [str(Path(sys.executable).with_name("spider")), "report", "ladders"]
        subprocess.run(page, cwd=given.folder, check=True)
    table(json.loads((given.folder / "results/report/ladders.json").read_text("utf-8")))


def table(found: dict[str, Any]) -> None:
    """Print each forecast beside the result that came later."""
    print("ladder      FLOPs forecast     90% interval  width     N*  result   error")
    for name, view in found.items():
        if not isinstance(view, dict):
            continue
        for one in view["forecast"]["predictions"]:
            of_budget = [run["bpb"] for run in view["results"] if run["budget"] == one["flops"]]
            result = min(of_budget, default=None)
            row = f"{name:10} {one['flops']:6.0e} {one['bpb']:8.4f} {one['low']:7.4f} {one['high']:8.4f} "
            row += f"{(one['high'] - one['low']) / one['bpb']:6.1%} {one['parameters'] / 1e3:5.0f}k "
            if result is not None:
                inside = "inside" if one["low"] <= result <= one["high"] else "outside"
                row += f"{result:7.4f} {one['bpb'] / result - 1:+7.2%} {inside}"
            print(row)
        exponent = view["size_law"] and view["size_law"][1]
        print(f"{name:10} N* ~ C^{exponent:.3f}" if exponent else f"{name:10} {view['forecast']['problem']}")


if __name__ == "__main__":
    main()
