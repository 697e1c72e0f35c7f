"""What a narrow residual stream costs: the same network with its stream in fp32 and in bf16, at equal bytes.

The network is that of the ablation, deeper, for roundings of a stream add up with the number of layers that
write to it: two core layers, of which the first reads Engram, run four times, between two dense layers on
each side. Products are in bf16 in both. Seeds are paired: same data, same start, same order.

    python benchmarks/stream.py [--quick] [--json FILE] [--folder FOLDER] [--seeds N] [--jobs N]
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from common import report
from variants import Comparison, Task, key, spread

DEEP: dict[str, Any] = {
    "prelude_layers": 2,
    "coda_layers": 2,
    "engram": {"layers": [0]},
    "recurrence": {"layers": 2, "loops": 4},
}


def task_of(stream: str, seed: int, tokens: int) -> Task:
    return Task(stream, {"model": DEEP | {"stream": stream}}, seed, tokens)


def main() -> None:
    asked = Comparison("stream", __doc__.splitlines()[0], rounds=0)
    tasks = {
        stream: [task_of(stream, seed, asked.tokens) for seed in asked.seeds] for stream in ("wide", "narrow")
    }
    scored = asked.bpb([task for pair in zip(*tasks.values(), strict=True) for task in pair])
    bpb = {stream: [scored[key(task)] for task in of] for stream, of in tasks.items()}
    more = [narrow - wide for wide, narrow in zip(*bpb.values(), strict=True)]
    deviation = f" +- {stdev(more):.4f}" if len(more) > 1 else ""
    rows = [[stream, spread(values)] for stream, values in bpb.items()]
    rows.append(["narrow - wide, by seed", f"{mean(more):+.4f}{deviation}"])
    title = f"{asked.tokens:,} tokens, {len(asked.seeds)} seeds, {asked.options.precision}: bits per byte"
    report(title, ["stream", "held out"], rows, {**bpb, "difference": more}, asked.options, ["torch"])


if __name__ == "__main__":
    main()
