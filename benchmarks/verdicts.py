"""Measure how often `spider compare` is wrong, how often it finds an effect, and what it saves.

    python benchmarks/ladder.py FOLDER --seeds     # real runs that differ by their seed alone
    python benchmarks/verdicts.py FOLDER           # 200 pairs of their recorded losses, in seconds

Each pair of recipes is one recipe twice: ten of its runs are dealt to two sides. Any verdict is false. Then
0.02 bits per byte are taken from one side, and the verdict should be that it is better. The noise that the
test begins with is that of the other recipes. Last, a verdict is sought twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from spider_lab.sequential import after

from spider.evaluation.noise import noise, scored_runs
from spider.results import Results

PAIRS, MOST, EFFECT = 200, 5, 0.02


def decide(one: np.ndarray, other: np.ndarray, known) -> tuple[str, int]:
    """Return the outcome of a test of recorded losses, and the number of its pairs."""
    for k in range(1, MOST + 1):
        shown = after((other - one)[:k].tolist(), known, MOST)
        if shown.stops:
            break
    return shown.outcome, k


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("folder", type=Path)
    folder = options.parse_args().folder
    runs = scored_runs(Results(folder / "results"))
    groups = defaultdict(list)
    for one in runs:
        groups[one.recipe, one.scoring].append(one)
    groups = {key: own for key, own in groups.items() if len(own) >= 2 * MOST}
    if not groups:
        sys.exit(f"{folder}: no recipe has {2 * MOST} seeds; run benchmarks/ladder.py {folder} --seeds")
    random = np.random.default_rng(0)
    print("recipe                 seeds  deviation  noise of the others")
    found = {0.0: [], EFFECT: []}
    for (recipe, _), own in groups.items():
        known = noise(one for one in runs if one.recipe != recipe)
        losses = np.array([one.bpb for one in own])
        label = own[0].run.rpartition("-seed")[0]
        print(f"{label:22} {len(own):5} {losses.std(ddof=1):10.4f} {known.deviation:10.4f} ({known.freedom})")
        for _ in range(PAIRS // len(groups)):
            one, other = random.permutation(losses)[: 2 * MOST].reshape(2, MOST)
            for effect, outcomes in found.items():
                outcomes.append(decide(one, other - effect, known))
    for effect, outcomes in found.items():
        verdicts = [outcome for outcome, _ in outcomes]
        share = {name: verdicts.count(name) / len(verdicts) for name in ("better", "worse", "not shown")}
        saved = 1 - np.mean([k for _, k in outcomes]) / MOST
        print(
            f"effect {effect:.2f}, {len(verdicts)} pairs: "
            + ", ".join(f"{name} {value:.1%}" for name, value in share.items())
            + f"; {saved:.1%} of the trainings of {MOST} fixed seeds saved"
        )
    one, other = (own[0].run for own in list(groups.values())[:2])
    command = [str(Path(sys.executable).with_name("spider")), "compare", one, other, "--budget", "0"]
    for name in ("verdict", "the same again"):
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        print(f"{name}: {time.perf_counter() - began:.2f} s, whole command")


if __name__ == "__main__":
    main()
