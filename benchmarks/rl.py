"""Train presets/rl-cpu.yaml with several seeds and print what reinforcement learning adds to the SFT model.

    python benchmarks/rl.py [--folder FOLDER] [--seeds N] [--quick] [--json FILE]

pass@1 is the share of sampled answers that are correct, over held-out questions; pass@k is the share of
questions with at least one correct answer among k. Seconds are those of training both stages, of validation,
and of the whole workflow. ``--quick`` trains a few steps of one seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from common import ROOT, parser, report, spread, workflow

from spider.config import merged
from spider.files import read_json
from spider.results import Results
from spider.training.metrics import read_rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="folder of the results (default: a temporary one)")
    options.add_argument("--seeds", type=int, default=3, help="seeds (default: 3)")
    chosen = options.parse_args()
    raw = yaml.safe_load((ROOT / "presets/rl-cpu.yaml").read_text())
    base = raw["runs"]["sums"]
    if chosen.quick:
        sft, rl = base["stages"]
        base["stages"] = [sft | {"max_steps": 4}, rl | {"max_steps": 2, "ckpt_every": 1, "val_every": 1}]
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1 if chosen.quick else chosen.seeds):
            folder = (chosen.folder or Path(scratch)).resolve() / f"seed-{seed}"
            seconds = workflow({**raw, "runs": {"sums": merged(base, {"seed": seed})}}, folder)
            results = Results(folder)
            stages = [results.stage("sums", name) for name in ("sft", "rl")]
            logged = [row.metrics for row in read_rows(stages[1].metrics) if "val/pass_1" in row.metrics]
            trained = [read_json(stage.receipt)["seconds"] for stage in stages]
            figures.append({"validations": logged, "trained": trained, "workflow": seconds})
    names = [name for name in figures[0]["validations"][0] if name.startswith("val/pass_")]
    for name in names:
        pairs = [(one["validations"][0][name], one["validations"][-1][name]) for one in figures]
        before, after = zip(*pairs, strict=True)
        gain = spread([last - first for first, last in pairs])
        rows.append([name.removeprefix("val/"), spread(before), spread(after), gain])
    for number, what in enumerate(("SFT", "RL")):
        rows.append(
            [f"seconds, training of {what}", "", spread([one["trained"][number] for one in figures]), ""]
        )
    rows.append(["seconds, whole workflow", "", spread([one["workflow"] for one in figures]), ""])
    columns = ["what", "after SFT", "after RL", "gain"]
    report(f"Made-up sums, {len(figures)} seeds", columns, rows, {"seeds": figures}, chosen, ["torch"])


if __name__ == "__main__":
    main()
