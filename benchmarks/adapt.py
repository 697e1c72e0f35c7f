"""Learning while scoring (`evaluation.ttt`): what it brings a trained model, and what it costs.

The runs named of ``--runs FILE`` (benchmarks/golf.yaml, or presets/arena.yaml) are trained on so many
``--tokens`` each as by benchmarks/families.py, or were by it in the same ``--folder``. Each is scored on the
same held-out bytes, and again learning, at every rate and chunk; the cost is processor time of learning
and scoring over that of scoring, in one thread.

    python benchmarks/adapt.py [--runs FILE] [--only NAME ...] [--quick] [--json FILE] [--folder FOLDER]
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import parser, report
from families import ROOT, configuration, prepare, train_and_score

from spider import load_model
from spider.config import TTTConfig
from spider.evaluation.adapt import adapt
from spider.evaluation.bpb import score
from spider.evaluation.held_out import validation_stream
from spider.files import digest
from spider.results import Results

#: Rates, and ids of a chunk, in windows.
POINTS = list(itertools.product([1e-3, 5e-3], [8, 32]))


def measured(folder: Path, spec: Any, scored: int, trained_on: int, quick: bool) -> list[dict[str, Any]]:
    """Of one trained run: scored alone, and learning at each point."""
    model, _ = load_model(Results(folder).stage(digest([spec.identity, trained_on]), "only").path)
    tokens_N, _ = validation_stream(Results(folder).shards(spec.data), scored, model.tokens)
    how = {"seq_len": spec.window, "overlap": spec.evaluation.overlap}
    found = []
    for lr, windows in [None, None], *(POINTS[:1] if quick else POINTS):
        began = time.process_time()
        if lr is None:
            told, settings = score(model, tokens_N, **how), {}
        else:
            settings = {"lr": lr, "chunk": windows * spec.window}
            told = adapt(model, tokens_N, TTTConfig(**settings), **how)
        found.append({**settings, "bpb": told.bpb, "seconds": time.process_time() - began})
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--runs", type=Path, default=ROOT / "benchmarks/golf.yaml", help="whose to train")
    options.add_argument("--only", nargs="+", metavar="NAME", default=["flat", "looped"], help="of the runs")
    options.add_argument("--folder", type=Path, help="keep trained models here, and go on from them")
    options.add_argument("--tokens", type=int, default=1_000_000, help="for each training")
    options.add_argument("--bytes", type=int, default=100_000, help="held-out ones to score")
    asked = options.parse_args()
    torch.set_num_threads(1)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="adapt-"))
    tokens, scored = (4_096, 5_000) if asked.quick else (asked.tokens, asked.bytes)
    prepare(asked.runs, folder, asked.quick)
    rows, figures = [], {}
    for name in asked.only:
        train_and_score(asked.runs, folder, name, {}, tokens, 0, trained_on := min(scored, 100_000))
        spec = configuration(asked.runs, {}, tokens, 0).stage(name, "only")
        figures[name] = alone, *learning = measured(folder, spec, scored, trained_on, asked.quick)
        rows.append([name, "", "", f"{alone['bpb']:.4f}", "", ""])
        for one in learning:
            gain, cost = one["bpb"] - alone["bpb"], one["seconds"] / alone["seconds"]
            where = ["", f"{one['lr']:g}", f"{one['chunk']:,}"]
            rows.append([*where, f"{one['bpb']:.4f}", f"{gain:+.4f}", f"{cost:.1f}"])
    title = f"{tokens:,} tokens each, {scored:,} held-out bytes"
    columns = ["run", "lr", "chunk", "bits per byte", "change", "times the cost"]
    report(title, columns, rows, figures, asked, ["torch"])


if __name__ == "__main__":
    main()
