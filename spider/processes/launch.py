"""Start a command once for every process that is to train, as ``torchrun`` does.

On several machines of a Slurm job ``srun`` starts this module once on each, and these meet at the address of
the one where ``srun`` was called. ``torchrun`` itself works as well, but ends with status 1 whatever its
processes ended with; here 75 stays 75, so a scheduler can tell "start me again" from "look at me".
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spider.errors import RESUME_ME

log = logging.getLogger(__name__)


def launch(processes: int, arguments: Sequence[str], nodes: int = 1, threads: int | None = None) -> int:
    """Run ``python ARGUMENTS`` in so many processes that know of each other, on all nodes of this Slurm job
    together, and wait for them. They may use ``threads`` CPUs of each node; ``srun`` would give one. Returns
    the exit status: 0 if all succeeded, `RESUME_ME` if they were told to stop, else 1; raises `ValueError`
    where the nodes cannot share the processes evenly, or there is no ``srun``."""
    if nodes == 1:
        return _launch_here(processes, arguments, 1, "localhost:0")
    mine, rest = divmod(processes, nodes)
    if rest:
        raise ValueError(f"{nodes} nodes cannot share {processes} processes evenly")
    if not shutil.which("srun") or "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            f"training on {nodes} nodes is started by Slurm's srun, and this is no Slurm job; elsewhere "
            "start torchrun on each machine (docs/cluster.md)"
        )
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    command += [f"--cpus-per-task={threads}"] if threads else []
    command += [sys.executable, "-m", __name__, str(nodes), str(mine), *arguments]
    # A signal reaches what srun started by itself; srun, which would end it, must not follow it.
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    return subprocess.call(command)


def _launch_here(processes: int, arguments: Sequence[str], nodes: int, meeting_place: str) -> int:
    """The part of `launch` on one of the nodes, which meet at ``HOST:PORT``; signals are passed on."""
    logging.disable(logging.ERROR)  # what there is to say the processes say
    # Seconds that a training has to save after a signal before it is killed.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting_place,
        local_addr="localhost" if nodes == 1 else None,
        max_restarts=0,
        run_id=f"spider-{os.environ['SLURM_JOB_ID'] if nodes > 1 else os.getpid()}",
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


def main() -> None:
    """What ``srun`` starts on each node: NODES PROCESSES-OF-THIS-NODE ARGUMENT..."""
    nodes, processes, *arguments = sys.argv[1:]
    # A port that two jobs on one node are unlikely to share.
    port = 20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000
    host = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    sys.exit(_launch_here(int(processes), arguments, int(nodes), f"{host}:{port}"))


if __name__ == "__main__":
    main()
