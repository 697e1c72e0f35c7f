"""``python -m spider.tracking RESULTS``: the process that `sync.Sender` starts."""

import sys
from pathlib import Path

from spider.tracking.sync import follow

sys.exit(follow(Path(sys.argv[1])))
