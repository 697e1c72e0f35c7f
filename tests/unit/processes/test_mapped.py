"""A mapped file that is cut is named by the process that dies of it."""

import subprocess
import sys

import pytest

READ = """
import os, sys, threading
import numpy as np
from spider.processes.mapped import name_files_that_are_cut
name_files_that_are_cut()
ids = np.memmap(sys.argv[1], np.uint16, "r")
total = int(ids.sum())
os.truncate(sys.argv[1], 5000)
read = lambda: print(np.asarray(ids)[::7].copy().sum())
if sys.argv[2] == "thread":
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
elif sys.argv[2] == "torch":
    import torch
    print(torch.from_numpy(np.asarray(ids).view(np.int16)).float().sum())
else:
    read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS is told apart on Linux only")
@pytest.mark.parametrize("where", ["main", "thread", "torch"])
def test_a_file_that_is_cut_while_it_is_mapped_is_named(tmp_path, where):
    path = tmp_path / "my shard.bin"
    path.write_bytes(bytes(3_000_000))
    done = subprocess.run(
        [sys.executable, "-c", READ, path, where], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done
    assert f"error: {path}: was cut or lost its disk while it was read; make it again" in done.stderr
    assert done.stdout == ""
