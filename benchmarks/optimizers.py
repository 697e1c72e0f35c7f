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

from collections.abc import Callable
from dataclasses import asdict

from variants import Comparison, Outcome, Task, equal_time, key

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
        sweep = {lr: bpb[key(task)] for lr, task in tasks.items()}
        best = min(sweep, key=sweep.__getitem__)
        if best not in (min(rates), max(rates)):
            return sweep
        rates.append(best / 2 if best == min(rates) else best * 2)


def main() -> None:
    asked = Comparison("optimizers", __doc__.splitlines()[0], rounds=25)
    tokens = asked.tokens
    known: dict[str, float] = {}

    def score(tasks: list[Task]) -> dict[str, float]:
        known.update(asked.bpb([task for task in tasks if key(task) not in known]))
        return known

    timed = {kind: task_of(kind, 1e-3, 0, tokens) for kind in GRIDS}
    seconds = asked.step_seconds(timed, [asked.spec_of(task).identity for task in timed.values()])
    in_time = equal_time(tokens, seconds, "muon")
    sweeps = {kind: tune(kind, len(asked.seeds), tokens, score) for kind in GRIDS}
    best = {kind: min(sweep, key=sweep.__getitem__) for kind, sweep in sweeps.items()}
    plan = {
        (kind, budget): [task_of(kind, best[kind], seed, count) for seed in asked.seeds]
        for kind in GRIDS
        for budget, count in (("bytes", tokens), ("time", in_time[kind]))
    }
    unique = {key(task): task for tasks in plan.values() for task in tasks}
    score(list(unique.values()))

    def outcome(kind: str) -> Outcome:
        by_bytes, by_time = ([known[key(task)] for task in plan[kind, b]] for b in ("bytes", "time"))
        return Outcome(seconds[kind], in_time[kind], by_bytes, by_time)

    rows, figures = [], {}
    for kind in GRIDS:
        tried = "\n".join(f"{lr:g}: {value:.3f}" for lr, value in sweeps[kind].items())
        rows.append([NAMES[kind], tried, *outcome(kind).row(outcome("muon"))])
        figures[kind] = {"sweep": sweeps[kind], "lr": best[kind]} | asdict(outcome(kind))
    asked.report(["optimizer", "lr: bpb"], "Muon", rows, figures)


if __name__ == "__main__":
    main()
