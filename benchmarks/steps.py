"""Processor time of a training step: of each run's first stage, of one or several checkouts in turns.

    make run && python benchmarks/steps.py [--trees . ../other] [--turns 5] [--json FILE]

A turn trains the first steps of a run in each checkout, one after the other, in processes of one thread, with
the data and the warm-up of the finished workflow. Its figure is the median of the steps after the first ten.
The table has the median of the turns, and how often the last checkout's step fits into the first one's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from common import ROOT, parser, report

from spider.config import load_config

#: Prints the processor seconds of a step, given a configuration, a run, its stage and the number of steps.
TRAIN = """
import sys, tempfile, time
from pathlib import Path
from statistics import median
from spider.cli.session import prepare_torch
from spider.config import load_config
from spider.training.stage import Places, plan, train

prepare_torch(1)
config, (run, stage), steps, ends = load_config(Path(sys.argv[1])), sys.argv[2:4], int(sys.argv[4]), []

def on_step(number):
    ends.append(time.process_time())
    if number == steps:
        raise KeyboardInterrupt

with tempfile.TemporaryDirectory() as folder:
    planned = plan(config, config, run, stage, Places(ckpt_dir=Path(folder) / "stage"))
    try:
        train(planned.spec, planned.folder, planned.data, warmup=planned.warmup, indexes=planned.indexes,
              on_step=on_step)
    except KeyboardInterrupt:
        print(median(after - before for before, after in zip(ends[10:], ends[11:])))
"""


def pages(tree: Path) -> dict[str, str]:
    """Return the variable that a checkout's workflow sets for its jobs, if it does, for pages of memory."""
    found = re.search(r'"(GLIBC_TUNABLES)", "(.+)"', (tree / "rules/common.smk").read_text())
    return {found[1]: found[2]} if found else {}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--configuration", type=Path, default=Path("config.yaml"))
    options.add_argument("--trees", type=Path, nargs="+", default=[ROOT], help="checkouts (default: this)")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--turns", type=int, default=5)
    options = options.parse_args()
    path = options.configuration.resolve()
    runs = {name: run.stages[0].name for name, run in load_config(path).runs.items()}
    found = defaultdict[str, list[list[float]]](list)
    steps, turns = (13, 1) if options.quick else (options.steps, options.turns)
    for turn in range(turns):
        for run, stage in runs.items():
            found[run].append([])
            for tree in options.trees:
                command = [sys.executable, "-c", TRAIN, path, run, stage, str(steps)]
                environment = os.environ | {"PYTHONPATH": str(tree.resolve()), **pages(tree)}
                done = subprocess.run(
                    command, cwd=path.parent, env=environment, stdout=-1, text=True, check=True
                )
                found[run][turn].append(float(done.stdout.split()[-1]))
            print(run, turn, *(f"{1000 * seconds:.0f} ms" for seconds in found[run][turn]), flush=True)
    rows, figures = [], {}
    for run, of in found.items():
        each = [median(seconds) for seconds in zip(*of, strict=True)]
        ratio = median(one[0] / one[-1] for one in of)
        rows.append([run, *(f"{1000 * seconds:.0f}" for seconds in each), f"{ratio:.2f}"])
        figures[run] = {"seconds": of, "ratio": ratio}
    columns = ["run", *(tree.name or "this" for tree in options.trees), "first / last"]
    report("Processor milliseconds a training step", columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
