"""``python -m spider.tracking RESULTS``: the process that `spider.tracking.sender` starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from spider.tracking.sender import follow

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    sys.exit(follow(Path(sys.argv[1])))
