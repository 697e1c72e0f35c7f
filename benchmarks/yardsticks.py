"""What a critic would compare a finished run with: one table from one text.

Every compressor alone and given the training text in full (all of it, and what the last stage was trained on
where that is much less), the run by stage, the share of copies and the figures outside of them, and the four
quarters of the documents by how much of their wording the training text holds. Then what the yardsticks cost:
all stages evaluated with those of the default setting and with none, nothing kept from before.

    python benchmarks/yardsticks.py [--config config.yaml] [--run demo] [--cost] [--quick] [--json FILE]

``--cost`` tells the last alone: the table takes many minutes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser, report, show

from spider.config import Config, load_config
from spider.evaluation.artifact import Evaluation, quarters
from spider.processes.spinning import share_the_processor
from spider.results import Results

#: Bytes that no text has, and no sixteenth of it.
EVERYTHING = 1 << 50


def in_full(config: Config, run: str, limit: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Every compressor, given ``limit`` bytes of text."""
    from spider.data.shards import Shards
    from spider.evaluation.held_out import validation_stream
    from spider.evaluation.overlap import Text
    from spider.evaluation.training_text import learned_from, training_texts
    from spider.evaluation.yardsticks import measure

    results, last = Results(Path(config.results)), len(config.run(run).stages) - 1
    spec = config.stage(run, config.run(run).stages[last].name)
    data = results.shards(spec.evaluation.data or spec.data)
    tokens_N, _ = validation_stream(data, spec.evaluation.max_bytes)
    text = Text.of(tokens_N, Shards(data, "validation").alphabet)
    stage, split, why = training_texts(learned_from(config, run, spec.stage), limit, limit)
    if stage is None or split is None:
        raise SystemExit("; ".join(why))
    measured = measure(text, stage, split, limit, results.root / "yardsticks")
    rows = [
        [one.label, f"{one.bpb:.4f}", "" if one.fresh is None else f"{one.fresh:.4f}"]
        for one in sorted(measured.table, key=lambda one: one.bpb)
    ]
    return rows, {one.key: [one.bpb, one.fresh] for one in measured.table}


def cost(config: Config, run: str) -> dict[str, float]:
    """Seconds to evaluate all stages, with the yardsticks of the default setting and with none given."""
    from spider.evaluation.evaluate import evaluate
    from spider.evaluation.training_text import LearnedFrom, learned_from

    results = Results(Path(config.results))
    seconds = {"with yardsticks": 0.0, "without": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for stage in config.run(run).stages:
            spec = config.stage(run, stage.name)
            data = results.shards(spec.evaluation.data or spec.data)
            for name in seconds:
                texts = learned_from(config, run, stage.name) if name == "with yardsticks" else LearnedFrom()
                kept = Path(folder) / name
                began = time.perf_counter()
                evaluate(
                    results.stage(run, stage.name).receipt, spec, data, Path(folder) / "out",
                    learned_from=texts, kept=kept,
                )  # fmt: skip
                seconds[name] += time.perf_counter() - began
    return seconds


def told(spent: dict[str, float]) -> None:
    with_them, without = spent["with yardsticks"], spent["without"]
    print(f"all stages: {with_them:.1f} s, without {without:.1f} s ({with_them / without - 1:+.0%})")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=Path("config.yaml"))
    options.add_argument("--run", default="demo")
    options.add_argument("--cost", action="store_true", help="what the yardsticks cost, and no table")
    asked = options.parse_args()
    share_the_processor()  # as every command of Spider does, before torch is loaded
    config = load_config(asked.config)
    if asked.cost:
        told(cost(config, asked.run))
        return
    results = Results(Path(config.results))
    rows, figures = in_full(config, asked.run, 1_000_000 if asked.quick else EVERYTHING)
    stages = [
        Evaluation.read(results.stage(asked.run, s.name).evaluation) for s in config.run(asked.run).stages
    ]
    for one in stages:
        news = "" if one.copies is None or one.copies.bpb is None else f"{one.copies.bpb:.4f}"
        rows.append([f"{asked.run}, after {one.stage}, windows of {one.seq_len}", f"{one.bpb:.4f}", news])
        figures[one.stage] = [one.bpb, one.copies and one.copies.bpb]
    last = stages[-1]
    assert last.copies is not None and last.by_document is not None, "evaluated before there were yardsticks"
    figures |= {"copied": last.copies.copied, "bytes": last.bytes}
    parts = quarters(last.by_document)
    show(
        f"Documents by the share of their wording that the training text holds ({last.stage})",
        ["common", "bytes", "in copies", asked.run, "ppmd, as the evaluation gave it text"],
        [
            [
                f"{q.least:.0%} to {q.most:.0%}",
                f"{q.bytes:,}",
                f"{q.copied:.1%}",
                f"{q.bpb:.3f}",
                f"{q.ppmd:.3f}",
            ]
            for q in parts
        ],
    )
    figures["quarters"] = [q.model_dump() for q in parts]
    spent = figures["seconds"] = cost(config, asked.run)
    told(spent)
    title = (
        f"{last.bytes:,} held-out bytes, {last.copies.copied:.1%} of them in copies of {last.copies.length}"
    )
    report(title, ["bits per byte", "all", "outside copies"], rows, figures, asked, ["torch", "pyppmd"])


if __name__ == "__main__":
    main()
