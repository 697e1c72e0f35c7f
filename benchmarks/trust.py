"""Measure what the commands about a result find, and how long they take.

    python benchmarks/trust.py diff        # 40 pairs of runs that differ in one thing
    python benchmarks/trust.py audit       # twenty planted frauds, and twenty clean runs
    python benchmarks/trust.py order       # batches found again, and the cost of their digests

Each measurement is a function ``measure_NAME`` in ``benchmarks/trust_NAME.py``, which prints a table.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> None:
    sys.path.insert(1, str(FOLDER.parent))  # for tests/forkserver.py
    names = sorted(path.stem.removeprefix("trust_") for path in FOLDER.glob("trust_*.py"))
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("name", choices=names, help="what is measured")
    name = options.parse_args().name
    getattr(import_module(f"trust_{name}"), f"measure_{name}")()


if __name__ == "__main__":
    main()
