"""Forty planted runs: `spider audit` has to find twenty frauds, and give no alarm for twenty clean runs.

python -m extras.trust.benchmarks.audit [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import show
from extras.trust.tests.planted import CLEAN, FRAUDS, audited, make, verdict
from tests import forkserver


def measure_audit(folder: Path | None = None) -> None:
    """Make the runs with the workflow, and print what the audit of each finds."""
    server = forkserver.start()
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        try:
            make(place, [*FRAUDS, *CLEAN])
            for title, planted in (("frauds found", FRAUDS), ("clean runs without an alarm", CLEAN)):
                rows, right = [], 0
                for one in planted:
                    began = time.perf_counter()
                    good, line = verdict(one, audited(place, one))
                    right += good
                    mark = "yes" if good else "NO"
                    rows.append([one.name, mark, f"{time.perf_counter() - began:.1f}", line])
                show(f"{title}: {right} of {len(planted)}", ["run", "right", "seconds", "printed"], rows)
        finally:
            if server:
                forkserver.stop(server)


if __name__ == "__main__":
    measure_audit(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
