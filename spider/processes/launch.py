"""Start one process for each share of a training, as ``torchrun`` does.

On several nodes of a Slurm job, ``srun`` starts this module once on each node. The nodes meet at the address
of the node where ``srun`` was called. ``torchrun`` itself also works, but it exits with status 1 for any
failure. This launcher passes status 75 on, so that a scheduler can distinguish "run again" from
an error.
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
    """Run ``python ARGUMENTS`` in several processes of one process group and wait for them.

    Args:
        processes: number of processes on all nodes together.
        nodes: nodes of this Slurm job to use; with 1, only this machine.
        threads: CPUs that the processes of one node may use. (``srun`` gives one by default.)

    Returns:
        The exit status: 0 if all processes succeeded, `RESUME_ME` if a signal stopped them, else 1.

    Raises:
        ValueError: the nodes cannot share the processes evenly, or this is not a Slurm job with ``srun``.
    """
    if nodes == 1:
        return _launch_here(processes, arguments, 1, "localhost:0")
    per_node, rest = divmod(processes, nodes)
    if rest:
        raise ValueError(f"{nodes} nodes cannot share {processes} processes evenly")
    if not shutil.which("srun") or "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            f"training on {nodes} nodes is started by Slurm's srun, and this is not a Slurm job; elsewhere "
            "start torchrun on each machine (docs/cluster.md)"
        )
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    if threads:
        command.append(f"--cpus-per-task={threads}")
    command += [sys.executable, "-m", __name__, str(nodes), str(per_node), *arguments]
    # Slurm sends the signal to the tasks itself. srun must ignore it, because it would kill the tasks.
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    return subprocess.call(command)


def _launch_here(processes: int, arguments: Sequence[str], nodes: int, endpoint: str) -> int:
    """Run this node's part of `launch`. The nodes meet at ``endpoint`` (HOST:PORT); signals are passed on."""
    logging.disable(logging.ERROR)  # the processes write their own logs
    # Seconds that a training has to save after a signal before it is killed.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # Each process would print that DDP searches for unused parameters in vain (`parallel.replicate`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
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
    """Launch one node's processes. ``srun`` calls it: NODES PROCESSES-OF-THIS-NODE ARGUMENT..."""
    nodes, processes, *arguments = sys.argv[1:]
    # A port that two jobs on one node are unlikely to share.
    port = 20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000
    host = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    sys.exit(_launch_here(int(processes), arguments, int(nodes), f"{host}:{port}"))


if __name__ == "__main__":
    main()
