"""Muon + AdamW against AdamW alone on the default run's model, at equal bytes and at equal time.

Each trains with the default run's settings of the optimizer and its own best learning rate. That is found on
a seed which is not scored after: a grid of doublings, gone on with while an end of it is best. With it both
are trained once a seed, on equally many bytes, and AdamW once more on as many as fit into Muon's time (one
thread; step times are processor time, measured in turn).

One learning rate is tuned for either. Muon's ratio between the matrices' rate and the rest's, which AdamW
has not, is the configured one.

    python benchmarks/optimizers.py [--quick] [--json FILE] [--folder FOLDER] [--seeds N] [--jobs N]

An hour on one core at full size; what is done is kept in ``--folder`` and not done again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from common import report
from variants import (
    EVALUATED_BYTES,
    Task,
    difference,
    equal_time,
    key,
    prepare_data,
    run_all,
    spec_of,
    spread,
    step_seconds,
    trainings_parser,
)

from spider.files import digest, read_json, write_json

#: Learning rates to begin with.
GRIDS = {"muon": (4e-3, 8e-3, 1.6e-2), "adamw": (1e-3, 2e-3, 4e-3, 8e-3)}
NAMES = {"muon": "Muon + AdamW", "adamw": "AdamW"}


def task_of(kind: str, lr: float, seed: int, tokens: int) -> Task:
    changes = {"optimizer": {"kind": kind}, "defaults": {"lr": lr}}
    return Task(f"{NAMES[kind]} at {lr:g}", changes, seed, tokens)


def tune(
    kind: str, seed: int, tokens: int, score: Callable[[list[Task]], dict[str, float]]
) -> dict[float, float]:
    """Bits per byte by learning rate, the best of which has a worse one on either side."""
    rates = list(GRIDS[kind])
    while True:
        tasks = {lr: task_of(kind, lr, seed, tokens) for lr in sorted(rates)}
        bpb = score(list(tasks.values()))
        found = {lr: bpb[key(task)] for lr, task in tasks.items()}
        best = min(found, key=found.__getitem__)
        if best not in (min(rates), max(rates)):
            return found
        rates.append(best / 2 if best == min(rates) else best * 2)


def main() -> None:
    options = trainings_parser(__doc__.splitlines()[0]).parse_args()
    tokens, seeds, rounds, scored_bytes = options.tokens, range(options.seeds), 25, EVALUATED_BYTES
    if options.quick:
        tokens, seeds, rounds, scored_bytes = 20_000, range(1), 3, 5_000
    folder = options.folder or Path(tempfile.mkdtemp(prefix="optimizers-"))
    folder.mkdir(parents=True, exist_ok=True)
    shards = prepare_data(folder)
    known: dict[str, float] = {}

    def score(tasks: list[Task]) -> dict[str, float]:
        new = [task for task in tasks if key(task) not in known]
        where = (shards, folder, options.precision, scored_bytes)
        known.update({name: found["bpb"] for name, found in run_all(new, options.jobs, *where).items()})
        return known

    specs = {kind: spec_of(task_of(kind, 1e-3, 0, tokens), options.precision) for kind in GRIDS}
    timed = folder / f"step-seconds-{digest([spec.identity for spec in specs.values()])}.json"
    if not timed.exists():
        write_json(timed, step_seconds(specs, rounds))
    seconds = read_json(timed)
    in_time = equal_time(tokens, seconds, "muon")
    sweeps = {kind: tune(kind, len(seeds), tokens, score) for kind in GRIDS}
    best = {kind: min(sweep, key=sweep.__getitem__) for kind, sweep in sweeps.items()}
    plan = {
        (kind, budget): [task_of(kind, best[kind], seed, count) for seed in seeds]
        for kind in GRIDS
        for budget, count in (("bytes", tokens), ("time", in_time[kind]))
    }
    unique = {key(task): task for tasks in plan.values() for task in tasks}
    score(list(unique.values()))

    def bpb(kind: str, budget: str) -> list[float]:
        return [known[key(task)] for task in plan[kind, budget]]

    rows, figures = [], {}
    for kind in GRIDS:
        by_bytes, by_time = bpb(kind, "bytes"), bpb(kind, "time")
        rows.append(
            [
                NAMES[kind],
                "\n".join(f"{lr:g}: {value:.3f}" for lr, value in sweeps[kind].items()),
                f"{seconds[kind] / seconds['muon']:.2f}",
                spread(by_bytes),
                difference(by_bytes, bpb("muon", "bytes")),
                f"{in_time[kind] / 1e6:.2f}",
                spread(by_time),
                difference(by_time, bpb("muon", "time")),
            ]
        )
        figures[kind] = {
            "sweep": sweeps[kind],
            "lr": best[kind],
            "step_seconds": seconds[kind],
            "tokens_in_time": in_time[kind],
            "bpb_equal_bytes": by_bytes,
            "bpb_equal_time": by_time,
        }
    report(
        f"{tokens:,} tokens, {len(seeds)} seeds, {options.precision}: bits per byte, mean +- deviation",
        ["optimizer", "lr: bpb", "step", "equal bytes", "vs Muon", "MB in time", "equal time", "vs Muon"],
        rows,
        figures,
        options,
        ["torch"],
    )


if __name__ == "__main__":
    main()
