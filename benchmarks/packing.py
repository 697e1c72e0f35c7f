"""Packing documents into rows: slots filled, seconds and memory of planning, and what the seed's rule loses.

On a million lengths of a log-normal like FineWeb's, and on those of an encoded dataset. Beside our plan
rules that crop: nanochat's best-fit (a buffer of documents; the largest that fits goes in; where none does,
the shortest is cut to fill the row and its rest is lost), and greedy rows that cut what does not fit.

    python benchmarks/packing.py [--quick] [--json FILE] [--shards FOLDER]

``--shards`` is an encoded dataset whose lengths to take beside the log-normal.
"""

from __future__ import annotations

import bisect
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report

from spider.data.packing import cut, plan

#: nanochat's buffer, and its rows.
BUFFER, SEQ_LEN = 1000, 2048


def log_normal(count: int) -> np.ndarray:
    """Ids of documents: median 561, and some quarter of all ids beyond 2,048."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(561), 0.8, count))
    return np.maximum(3, lengths).astype(np.int64)


def of_shards(folder: Path) -> np.ndarray:
    """Ids of the documents of a training split."""
    from spider.data.shards import Shards

    shards = Shards(folder, "train")
    begins = [border + shards.begins(s) for s, border in enumerate(shards.borders[:-1].tolist())]
    return np.diff(np.append(np.concatenate(begins), shards.tokens))


def ours(lengths: np.ndarray, seq_len: int) -> dict[str, float]:
    begins = np.cumsum(lengths) - lengths
    began = time.perf_counter()
    pieces = cut(begins, int(lengths.sum()), seq_len)
    made = plan(pieces, seq_len)
    seconds = time.perf_counter() - began
    slots = (len(made.rows) - 1) * (seq_len + 1)
    tracemalloc.start()
    plan(cut(begins, int(lengths.sum()), seq_len), seq_len)
    peak = tracemalloc.get_traced_memory()[1] / len(pieces)
    tracemalloc.stop()
    held = int(pieces["length"].sum())
    learned = held - len(pieces)
    assert learned == int((lengths - 1).sum()), "each id but a document's first is a target once"
    size = made.pieces.nbytes + made.rows.nbytes
    share = size / (2 * int(lengths.sum()))
    return {"lost": 0.0, "filled": held / slots, "seconds": seconds, "plan": share, "peak": peak}


def best_fit_crop(lengths: np.ndarray, seq_len: int) -> dict[str, float]:
    """nanochat's rule, by its rows; what is cut off is gone."""
    began, row, todo = time.perf_counter(), seq_len + 1, iter(lengths.tolist())
    buffer = sorted(length for _, length in zip(range(BUFFER), todo, strict=False))
    used = read = 0
    while len(buffer) == BUFFER:
        room = row
        while room and len(buffer) == BUFFER:
            at = bisect.bisect_right(buffer, room) - 1
            length = buffer.pop(at if at >= 0 else 0)
            read, used, room = read + length, used + min(length, room), room - min(length, room)
            if (further := next(todo, None)) is not None:
                bisect.insort(buffer, further)
    return {"lost": 1 - used / read, "filled": 1.0, "seconds": time.perf_counter() - began, "plan": 0.0}


def greedy_crop(lengths: np.ndarray, seq_len: int) -> dict[str, float]:
    """Documents in order; what goes beyond the row is cut off."""
    began, used, room = time.perf_counter(), 0, seq_len + 1
    for length in lengths.tolist():
        used += min(length, room)
        room -= min(length, room)
        room = room or seq_len + 1
    lost = 1 - used / int(lengths.sum())
    return {"lost": lost, "filled": 1.0, "seconds": time.perf_counter() - began, "plan": 0.0}


RULES = {"ours": ours, "nanochat's best-fit, cropped": best_fit_crop, "greedy, cropped": greedy_crop}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shards", type=Path)
    asked = options.parse_args()
    texts = {"log-normal": (log_normal(20_000 if asked.quick else 1_000_000), SEQ_LEN)}
    if asked.shards:
        lengths = of_shards(asked.shards)
        texts |= {f"{asked.shards.name}, {seq_len}": (lengths, seq_len) for seq_len in (256, 512, SEQ_LEN)}
    rows, figures = [], {}
    for name, (lengths, seq_len) in texts.items():
        long = lengths[lengths > seq_len + 1].sum() / lengths.sum()
        for rule, measure in RULES.items():
            came_to: dict[str, Any] = measure(lengths, seq_len)
            lost, filled = f"{came_to['lost']:.1%}", f"{came_to['filled']:.2%}"
            cost = (
                f"{came_to['seconds']:.2f} s",
                f"{came_to['plan']:.1%}",
                f"{came_to['peak']:.0f}" if "peak" in came_to else "",
            )
            rows.append([name, f"{len(lengths):,}", f"{long:.0%}", rule, lost, filled, *cost])
            figures[f"{name}: {rule}"] = came_to | {"documents": len(lengths), "long": float(long)}
    columns = [
        "text",
        "documents",
        "ids in longer ones",
        "rule",
        "lost",
        "filled",
        "planning",
        "plan / shards",
        "peak, bytes a piece",
    ]
    report("Rows of documents", columns, rows, figures, asked, ["numpy"])


if __name__ == "__main__":
    main()
