"""Train the model of `presets/ngram-cpu.yaml` without single features of its n-gram index, with three seeds.

All runs are of one workflow, so they share the text, the index and the baselines. What is finished is kept in
``--folder`` and not done again.

    python benchmarks/ablation.py [--folder FOLDER] [--seeds N] [--quick] [--json FILE]

``--quick`` trains a tenth of the tokens with one seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from common import ROOT, parser, report, spread, workflow

from spider.config import merged
from spider.files import read_json
from spider.model.spider.config import PRESETS
from spider.results import Results

MATCHES = PRESETS["slim"]["ngram"]["matches"]


def without(*kinds: str) -> dict[str, Any]:
    """Return the setting of the matches without the kinds whose names begin so."""
    return {"matches": [kind for kind in MATCHES if not str(kind).startswith(kinds)]}


#: Changed settings of the n-gram index, by the name of the variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "all features": {},
    "no document counts": {"counts": []},
    "no matches by words": without("words"),
    "no matches by structure": without("column", "indent", "above"),
    "none of these": {"counts": [], **without("words", "column", "indent", "above")},
    "trained on single documents": {"carry_over": 0},
}


def configuration(seeds: int, share: float) -> dict[str, Any]:
    """Return the configuration with a run for each variant and seed, with a share of the tokens."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / "presets/ngram-cpu.yaml").read_text())
    (base,) = raw["runs"].values()
    stages = [{**stage, "tokens": int(share * stage["tokens"])} for stage in base["stages"]]
    one_thread = {**base, "stages": stages, "precision": "fp32", "resources": {"threads": 1}}
    raw["runs"] = {
        run_name(variant, seed): merged(
            one_thread, {"seed": seed, "model": {"preset": base["model"], "ngram": change}}
        )
        for variant, change in VARIANTS.items()
        for seed in range(seeds)
    }
    return raw


def run_name(variant: str, seed: int) -> str:
    return f"{variant.replace(' ', '-')}-{seed}"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="folder of the results (default: a temporary one)")
    options.add_argument("--seeds", type=int, default=3, help="seeds of each variant (default: 3)")
    chosen = options.parse_args()
    seeds = 1 if chosen.quick else chosen.seeds
    raw = configuration(seeds, 0.1 if chosen.quick else 1.0)
    (last,) = {run["stages"][-1]["name"] for run in raw["runs"].values()}
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        results = Results((chosen.folder or Path(scratch)).resolve() / "results")
        workflow(raw, results.root, *(results.stage(run, last).evaluation for run in raw["runs"]))
        for variant in VARIANTS:
            runs = [
                read_json(results.stage(run_name(variant, seed), last).evaluation) for seed in range(seeds)
            ]
            alone = [run["bpb"] for run in runs]
            carried = [run["bpb_carried"] for run in runs]
            seconds = [run["training"]["seconds"] for run in runs]
            figures[variant] = {"alone": alone, "carried": carried, "seconds": seconds}
            rows.append([variant, spread(alone), spread(carried), f"{mean(seconds):.0f}"])
    columns = ["variant", "each document alone", "with what came before", f"seconds of {last}"]
    report(f"Features of the index, bits per byte, {seeds} seeds", columns, rows, figures, chosen, ["torch"])


if __name__ == "__main__":
    main()
