"""Ids a second of one text and of several that are generated at once, by each model of a finished workflow.

    make run && python benchmarks/streams.py [--results results] [--count 16] [--ids 160] [--json FILE]

Each model writes on one thread, without a prompt, in turns: one text, then ``--count`` texts. If texts end
early, as many others follow. A figure is the median of the turns, by processor time.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
from common import parser, report

from spider.checkpoints.load import Checkpoint
from spider.cli.session import prepare_torch
from spider.evaluation.generate import generate_many
from spider.model.interface import Model
from spider.report.summary import Summary


def ids_a_second(model: Model, seeds: range, ids: int, context: int) -> float:
    """Return the ids a processor second of texts that are written at once."""
    began, written = time.process_time(), 0
    settings = {"max_bytes": 1 << 20, "max_ids": ids, "context": context}
    while written < ids * len(seeds):
        written += sum(map(len, generate_many(model, "", seeds=seeds, **settings)))
        seeds = range(seeds.stop, seeds.stop + len(seeds))
    return written / (time.process_time() - began)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--results", type=Path, default=Path("results"))
    options.add_argument("--count", type=int, default=16)
    options.add_argument("--ids", type=int, default=160)
    options.add_argument("--turns", type=int, default=5)
    options = options.parse_args()
    ids, turns = (16, 1) if options.quick else (options.ids, options.turns)
    prepare_torch(1)
    rows, figures = [], {}
    for run, compared in Summary.read(options.results / "report/summary.json").runs.items():
        checkpoint = Checkpoint.at(options.results / "runs" / run / compared.order[-1])
        model = checkpoint.model(torch.device("cpu"))
        each = [
            [
                ids_a_second(model, range(count), ids, checkpoint.manifest.window)
                for count in (1, options.count)
            ]
            for _ in range(turns)
        ]
        ratio = median(many / one for one, many in each)
        rows.append([run, *(f"{median(rates):,.0f}" for rates in zip(*each, strict=True)), f"{ratio:.1f}"])
        figures[run] = {"rates": each, "ratio": ratio}
    columns = ["ids a processor second", "one text", f"{options.count} texts", "ratio"]
    report("Texts written at once", columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
