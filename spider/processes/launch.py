"""Start one process for each share of a training, as ``torchrun`` does.

On several nodes of a Slurm job, ``srun`` starts this module once on each node. The nodes meet at the first
one, where ``srun`` was called. The launcher tells each node its address and its network, because many
machines map their own name to 127.0.1.1, where no other machine can reach them. ``torchrun`` itself also
works, but it exits with status 1 for any failure. This launcher passes status 75 on, so that a scheduler can
distinguish "run again" from an error.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spider.common.errors import RESUME_ME
from spider.processes.device import require_gpus
from spider.processes.gpus import claimed

log = logging.getLogger(__name__)

#: Seconds that a node waits for an answer of the first one.
ANSWER = 60


def launch(
    processes: int, arguments: Sequence[str], nodes: int = 1, threads: int | None = None, gpus: int = 0
) -> int:
    """Run ``python ARGUMENTS`` in several processes of one process group and wait for them.

    Args:
        processes: number of processes on all nodes together.
        nodes: nodes of this Slurm job to use; with 1, only this machine.
        threads: CPUs that the processes of one node may use. (``srun`` gives one by default.)
        gpus: GPUs of all nodes together, which the processes share.

    Returns:
        The exit status: 0 if all processes succeeded, `RESUME_ME` if a signal stopped them, else 1.

    Raises:
        ValueError: the nodes cannot share the processes evenly, or this is not a Slurm job with ``srun``.
        TrainingError: torch can use no GPU here, and some are requested.
    """
    if nodes == 1:
        here = {"min_nodes": 1, "max_nodes": 1, "run_id": f"spider-{os.getpid()}"}
        here |= {"rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        return _launch_here(processes, arguments, gpus, here)
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
    command += [sys.executable, "-m", __name__, str(nodes), str(per_node), str(gpus // nodes), *arguments]
    # Slurm sends the signal to the tasks itself. srun must ignore it, because it would kill the tasks.
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    return subprocess.call(command)


def _launch_here(processes: int, arguments: Sequence[str], gpus: int, meeting: dict[str, Any]) -> int:
    """Run this node's part of `launch`, on this number of its GPUs; signals are passed on.

    ``meeting`` is where the nodes meet, as arguments of torch's ``LaunchConfig``.
    """
    # Seconds that a training has to save after a signal before it is killed.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # Each process would print that DDP searches for unused parameters in vain (`parallel.replicate`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = LaunchConfig(
        **meeting,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
    )
    with claimed(min(gpus, processes)):
        require_gpus(gpus)
        logging.disable(logging.ERROR)  # the processes write their own logs
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


def meeting_point(nodes: int) -> dict[str, Any]:
    """Return where this number of nodes of a Slurm job meet, as arguments of torch's ``LaunchConfig``.

    Torch would recognize the first node by looking up its name, and gloo would listen there.
    """
    job, host = os.environ["SLURM_JOB_ID"], os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    port = 20_000 + int(job) % 10_000  # two jobs on one node are unlikely to share it
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        own = probe.getsockname()[0]
    for network, addresses in psutil.net_if_addrs().items():
        if own in [one.address for one in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    return {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "run_id": f"spider-{job}",
        "rdzv_endpoint": f"{host}:{port}",
        "rdzv_configs": {"is_host": os.environ["SLURM_NODEID"] == "0", "read_timeout": ANSWER},
        "local_addr": own,
    }


def main() -> None:
    """Launch one node's processes. ``srun`` calls it: NODES, the node's PROCESSES and GPUS, ARGUMENT..."""
    nodes, processes, gpus = map(int, sys.argv[1:4])
    meeting = meeting_point(nodes)
    try:
        sys.exit(_launch_here(processes, sys.argv[4:], gpus, meeting))
    except RendezvousError as error:
        sys.exit(
            f"error: {socket.gethostname()} did not meet the other nodes of the job at "
            f"{meeting['rdzv_endpoint']}, the first of them: {error} Look whether a node failed, and "
            "whether each of them reaches all ports of the others"
        )


if __name__ == "__main__":
    main()
