"""Two processes share Muon's polar factors, with the real `torchrun` and the real gloo."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.forkserver import python
from tests.unit.training import shared_polar
from tests.unit.training.shared_polar import LONE, STEPS, WAYS

MATRICES = {**dict.fromkeys(WAYS, 18), LONE: 1}
IN_STACKS = {**dict.fromkeys(WAYS, 6), LONE: 0}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Return the results of `shared_polar` for each way and kind, by rank."""
    folder = tmp_path_factory.mktemp("shared")
    launch = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(Path(shared_polar.__file__)), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {
        (way, kind): [torch.load(folder / f"{way}-{kind}-{rank}.pt") for rank in range(2)]
        for way in WAYS
        for kind in ("ddp", "fsdp")
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_reach_the_weights_of_one_and_each_computes_half_of_the_polar_factors(
    together, way, kind
):
    """A single matrix has one owner. Under FSDP the first process owns two of a stack's three matrices."""
    alone = shared_polar.train(way, kind)
    assert alone["computed"] == [MATRICES[way]] * STEPS
    for found in together[way, kind]:
        for what in ("weights", "state"):
            assert found[what].keys() == alone[what].keys()
            for name, tensor in found[what].items():
                torch.testing.assert_close(tensor, alone[what][name], rtol=0, atol=1e-6, msg=name)
    stacked = IN_STACKS[way] if kind == "fsdp" else 0
    shared = MATRICES[way] - stacked
    counts = [set(found["computed"]) for found in together[way, kind]]
    assert counts == [{(shared + 1) // 2 + stacked * 2 // 3}, {shared // 2 + stacked // 3}]
