"""``python -m spider.tracking``: the processes that `spider.tracking.sender` starts."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from spider.tracking.sender import PENDING, follow
from spider.tracking.spool import REMEDY
from spider.tracking.sync import sync


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spider.tracking", description="send spooled records to MLflow"
    )
    parser.add_argument("verb", choices=("sync", "follow"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--timeout", type=float, help="sync: seconds to go on for at most")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if options.verb == "follow":
        return follow(options.results)
    report = sync(options.results, timeout=options.timeout)
    if report.error:
        logging.warning("%s; %s", report, REMEDY)
    return PENDING if report.pending else 0


if __name__ == "__main__":
    sys.exit(main())
