"""Start a command once for every process that is to train, as ``torchrun`` does on one machine.

``torchrun`` itself works as well, and is what several machines need; but it ends with status 1 whatever its
processes ended with. Here 75 stays 75, so a scheduler can tell "start me again" from "look at me".
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spider.training.errors import RESUME_ME

log = logging.getLogger(__name__)

#: Seconds that a training has to save after a signal before it is killed; what is saved is saved whole.
_GRACE = "600"


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``python ARGUMENTS`` in so many processes that know of each other, and wait for them.

    SIGTERM, SIGINT and SIGUSR1 are passed on to them.

    Returns:
        the exit status: 0 if all succeeded, `RESUME_ME` if they were told to stop, else 1.
    """
    logging.disable(logging.ERROR)  # what there is to say the processes say
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        run_id=f"spider-{os.getpid()}",
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException:
        return RESUME_ME
    except ChildFailedError as error:
        logging.disable(logging.NOTSET)
        failures = error.failures.values()
        for failure in failures:
            if failure.exitcode == -signal.SIGKILL:
                log.error("process %d was killed (is there memory enough?)", failure.local_rank)
        return RESUME_ME if RESUME_ME in {failure.exitcode for failure in failures} else 1
    return 0
