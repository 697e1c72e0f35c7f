"""How long the slots of a finished workflow stand still: empty, or held by a job that only waits.

    make run && python benchmarks/slots.py results

A job of one thread that computes uses a second of processor time in a second. In the rest of its time it
waits for a lock, a disk or another job. Other programs take processor time as well, so the machine has to be
quiet.

``--scored A B`` also prints what scoring checkpoints costs: two runs of the workflow have the same settings,
but B has ``evaluation: {checkpoints: 0}``. It is the processor time of the jobs train and evaluate of A
beyond that of B, as a share of the training of B.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from common import parser, report

from spider.provenance.made import jobs, usage


def main() -> None:
    options = parser(__doc__)
    options.add_argument("results", type=Path)
    options.add_argument("--slots", type=int, default=2, help="jobs of one thread at once (default: 2)")
    options.add_argument(
        "--scored", nargs=2, metavar=("A", "B"), help="a run that scores checkpoints, and one without"
    )
    options = options.parse_args()
    ended = [job for job in jobs(options.results) if job.ended is not None]
    last = [job for job in ended if job.workflow == ended[-1].workflow]
    span = max(job.ended for job in last) - min(job.started for job in last)
    moments = sorted({time for job in last for time in (job.started, job.ended)})
    running = [sum(job.started <= a < job.ended for job in last) for a in moments]
    held = defaultdict[int, float](float)
    for a, b, n in zip(moments, moments[1:], running, strict=False):
        held[min(n, options.slots)] += b - a
    empty = sum((options.slots - n) * seconds for n, seconds in held.items())
    waited = defaultdict[str, float](float)
    for job in last:
        if {"s", "cpu_time"} <= {*(took := usage(options.results, job))}:
            waited[job.rule] += max(0.0, took["s"] - took["cpu_time"])
    all_slots = options.slots * span
    figures = {
        "seconds": span,
        "no job runs": held[0] / span,
        "empty slots": empty / all_slots,
        "waiting jobs": sum(waited.values()) / all_slots,
    }
    rows = [["seconds of the workflow", f"{span:.0f}"]]
    rows += [[name, f"{share:.1%}"] for name, share in list(figures.items())[1:]]
    rows += [[f"waiting {rule}", f"{s:.1f} s"] for rule, s in sorted(waited.items(), key=lambda x: -x[1])[:5]]
    if options.scored:
        newest = {job.benchmark: job for job in ended if job.status == "finished"}
        cost = {
            (rule, run): sum(
                usage(options.results, job)["cpu_time"]
                for job in newest.values()
                if job.rule == rule and job.wildcards["run"] == run
            )
            for rule in ("train", "evaluate")
            for run in options.scored
        }
        one, other = options.scored
        for rule in ("train", "evaluate"):
            more = (cost[rule, one] - cost[rule, other]) / cost["train", other]
            figures[f"scoring checkpoints, {rule}"] = more
            rows.append([f"scoring checkpoints, {rule}", f"{more:.1%} of the training"])
    report("Slots of a workflow", ["", "of all slots"], rows, figures, options)


if __name__ == "__main__":
    main()
