"""A real Slurm of two nodes on loopback, for the tests that need a cluster.

munged, slurmctld and a slurmd for each node run in the foreground as children of the test process. They have
their own ports, key, socket and folder, and stop with that process. It uses neither cgroups nor an accounting
database, so it runs in a container. Two files stand for the two GPUs of a node.

Slurm's programs read their configuration in /etc/slurm, and inside a job they get no environment variables of
the tests. So the tests put a link there. On a machine with its own Slurm they skip.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from ..debian import need

_LINKS = [Path("/etc/slurm/slurm.conf"), Path("/etc/slurm/gres.conf")]
_PREFIX = "spider-slurm-"
NODES = ("one", "two")

_CONF = """
ClusterName=spider
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=300
KillWait=20
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=one NodeHostname=localhost NodeAddr=127.0.0.1 Port={one} CPUs=8 RealMemory=64000 Gres=gpu:2
NodeName=two NodeHostname=localhost NodeAddr=127.0.0.1 Port={two} CPUs=8 RealMemory=64000 Gres=gpu:2
PartitionName=cpu Nodes=one,two Default=YES MaxTime=120
PartitionName=gpu Nodes=one,two MaxTime=120
PartitionName=urgent Nodes=one,two PriorityTier=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


class Slurm:
    """Commands of Slurm, and questions of tests about its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *command: str) -> str:
        """Return the output of a command of Slurm."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self, rule: str, folder: Path) -> list[str]:
        """Return the ids of a rule's jobs that run in a folder. Their comment names the rule."""
        lines = self("squeue", "--noheader", "--states=RUNNING", "--format=%i %k %Z").splitlines()
        found = [line.split(maxsplit=2) for line in lines]  # A folder may have a space in its name.
        return [
            number
            for number, comment, where in found
            if comment.startswith(f"rule_{rule}") and where == str(folder)
        ]

    def described(self, number: str) -> dict[str, str]:
        """Return the controller's description of a job, which it keeps for some minutes after the end."""
        words = self("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def queue() -> str:
    """Return the jobs that have not ended, each with the reason why it waits."""
    command = ["squeue", "--noheader", "--format=%i %k %T %r"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr.strip() or "no job is queued"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _until(ready: str, command: list[str], seconds: float = 20) -> None:
    """Wait until the output of a command has a word."""
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run(command, capture_output=True, text=True)
        if ready in done.stdout:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"{' '.join(command)} never printed {ready!r}: {done.stdout}{done.stderr}")
        time.sleep(0.1)


def _link(folder: Path) -> None:
    """Link our configuration in /etc/slurm, unless the machine has its own there."""
    for link in _LINKS:
        ours = link.is_symlink() and _PREFIX in os.readlink(link)
        if (link.exists() or link.is_symlink()) and not ours:
            pytest.skip(f"NOT RUN: {link} is this machine's own Slurm, which tests do not touch")
        link.unlink(missing_ok=True)  # Killed tests leave their link, and the lock is free.
        link.symlink_to(folder / link.name)


@contextmanager
def running() -> Iterator[Slurm]:
    """Start Slurm, and stop it at the end."""
    need({"slurm-wlm": "/usr/sbin/slurmctld", "munge": "/usr/sbin/munged"})
    if os.geteuid():
        pytest.skip("NOT RUN: Slurm's daemons and the link in /etc/slurm need root")
    with ExitStack() as stack:
        stack.enter_context(FileLock("/tmp/spider-tests-slurm.lock", mode=0o666))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "state").mkdir()
        stack.callback(lambda: [link.unlink(missing_ok=True) for link in _LINKS])
        _link(folder)
        ports = {name: _free_port() for name in ("controller", *NODES)}
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, host=socket.gethostname(), **ports))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        here = {name: f"{folder}/munge.{name}" for name in ("socket", "log", "pid", "seed")}
        files = [
            f"--{name.replace('log', 'log-file').replace('pid', 'pid-file')}={path}"
            for name, path in here.items()
        ]
        files = [word.replace("--seed=", "--seed-file=") for word in files]
        munged = ["munged", "--force", "--foreground", f"--key-file={key}", *files]
        daemons = {"munged": munged, "slurmctld": ["slurmctld", "-D"]}
        daemons |= {node: ["slurmd", "-D", "-N", node] for node in NODES}
        for name, (program, *options) in daemons.items():
            with open(folder / f"{name}.out", "w") as output:
                daemon = subprocess.Popen(
                    [f"/usr/sbin/{program}", *options], stdout=output, stderr=output, start_new_session=True
                )
            stack.callback(_stop, daemon)
        _until("2 idle", ["sinfo", "--noheader", "--partition=cpu", "--format=%D %T"])
        yield Slurm(folder)
        subprocess.run(["scancel", "--full", "--user=root"], capture_output=True)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """Stop a daemon and its children."""
    family = psutil.Process(daemon.pid).children(recursive=True) if daemon.poll() is None else []
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    for process in family:
        if process.is_running():
            process.kill()
