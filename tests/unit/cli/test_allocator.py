"""How the processes of the command line allocate memory."""

import os
import subprocess
import sys

import pytest

SHOW = """
import sys
from spider.cli import cli, main

@cli.command("show")
def show():
    import torch
    print(torch._C._accelerator_getAllocatorSettings())

sys.argv = ["spider", "show"]
main()
"""


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}, "max_split_size_mb:32"),
    ],
)
def test_segments_of_gpu_memory_grow_unless_the_user_sets_the_allocator(own, settings):
    """The value is what torch's allocator reads in a process of the command line."""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    said = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment | own, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == settings
