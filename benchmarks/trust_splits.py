"""Measure how long the check of the splits takes on 100 MB of text, and what it says.

python benchmarks/trust.py splits
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

SIZE = 100_000_000


def measure_splits() -> None:
    """Print the seconds of the full and of the quick check, on documents of made-up words."""
    from spider.audit.splits import check
    from tests.unit.audit.small_claims import World

    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, (50_000, 6), np.uint8)
    words = np.array([bytes(row).decode() for row in letters])
    rows, size = [], 0
    while size < SIZE:
        chosen = words[(rng.random(600) ** 3 * len(words)).astype(int)]
        rows.append((f"doc-{len(rows)}", " ".join(chosen)))
        size += len(rows[-1][1])
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), evaluation={"max_bytes": 2_000_000}).make(rows)
        for quick in (False, True):
            found = check(world.claim, quick)
            name = "quick" if quick else "full"
            print(f"{name:5} {size / 1e6:.0f} MB {found.seconds:6.1f} s  {found.status}: {found.reason}")


if __name__ == "__main__":
    measure_splits()
