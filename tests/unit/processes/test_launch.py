"""The launcher on one node. tests/workflow/test_slurm.py starts several nodes on a real Slurm."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spider.processes.launch import launch, main


@pytest.fixture(autouse=True)
def restored_log():
    """Restore the log, which the launcher disables for the whole process of the tests."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def hosts():
    """Make two hosts in network namespaces, each with an address, and a name that means 127.0.1.1 there."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"spider-{number}-{os.getpid()}" for number in range(2)]
    ends = [f"sp{number}{os.getpid()}" for number in range(2)]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    files = [Path("/etc/netns", name, "hosts") for name in names]
    try:
        for name, file in zip(names, files, strict=True):
            if made := ip("netns", "add", name).stderr:
                pytest.skip(f"no network namespaces here: {made}")
            file.parent.mkdir(parents=True)
            file.write_text("127.0.0.1 localhost\n127.0.1.1 node\n")
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield names
    finally:
        for name, file in zip(names, files, strict=True):
            ip("netns", "del", name)
            shutil.rmtree(file.parent, ignore_errors=True)


def test_two_hosts_meet_whose_names_mean_loopback(hosts, tmp_path):
    """A process group of gloo and the store of torch cross the network."""
    job = (
        "from spider.processes.world import join\nwith join() as world: print(world.sum_ints(world.rank + 1))"
    )
    command = [sys.executable, "-m", "spider.processes.launch", "2", "1", "0", "-c", job]
    shared = {"SLURM_JOB_ID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1", "OMP_NUM_THREADS": "1"}
    processes = []
    for node, name in enumerate(hosts):
        there = f"ip netns exec {name} unshare --uts sh -c 'hostname node; exec \"$@\"' sh"
        env = {**os.environ, **shared, "SLURM_NODEID": str(node)}
        words = [*shlex.split(there), *command]
        processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["[3]", "[3]"]


def test_a_node_that_cannot_reach_the_first_says_so(monkeypatch):
    monkeypatch.setattr("spider.processes.launch.ANSWER", 1)
    monkeypatch.setattr("sys.argv", ["launch", "2", "1", "0", "-c", "pass"])
    for name, value in {"JOB_ID": "1", "NODEID": "1", "LAUNCH_NODE_IPADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        SystemExit, match=r"did not meet the other nodes of the job at 127\.0\.0\.1:20001, the first"
    ):
        main()


def test_the_launcher_returns_the_exit_status_of_its_processes(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch(2, ["-c", "raise SystemExit(75)"]) == 75
    assert launch(2, ["-c", "raise SystemExit(3)"]) == 1


def test_several_nodes_without_slurm_or_with_uneven_shares_are_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="this is not a Slurm job; elsewhere start torchrun on each machine"):
        launch(4, ["-c", "pass"], nodes=2)
    with pytest.raises(ValueError, match="2 nodes cannot share 3 processes evenly"):
        launch(3, ["-c", "pass"], nodes=2)
