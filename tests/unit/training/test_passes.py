"""A micro-batch that is replayed computes the bits of one that is called; a process reuses compiled code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time

import pytest
import torch

from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.training import build, compilation, loop, passes
from spider.training.loop import Trainer
from spider.training.passes import why_eager
from spider.training.stage import train
from tests.forkserver import python
from tests.unit.training.outcomes import outcome
from tests.unit.training.test_faults import without_loss

GPU = torch.device("cuda")


@pytest.fixture
def replayed(monkeypatch) -> None:
    """Replay on this CPU, where the captured function is called with the inputs that stay in place."""
    monkeypatch.setattr(build, "why_eager", lambda *given, **options: None)


def both(spec: StageSpec, folder, data, monkeypatch) -> list:
    """Return the outcome of a training that calls its passes, and of one that replays them."""
    found = [outcome_of(spec, folder / "called", data)]
    with monkeypatch.context() as patch:
        patch.setattr(build, "why_eager", lambda *given, **options: None)
        return [*found, outcome_of(spec, folder / "replayed", data)]


def outcome_of(spec: StageSpec, folder, data):
    train(spec, folder, data)
    return outcome(folder)


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({"micro_batch": 2, "grad_accum": 4}, ()),
        ({"optimizer": {"kind": "muon", "muon_beta2": 0.9}, "ema": {"decay": 0.9}, "val_every": 3}, (2, 5)),
        (
            {
                "optimizer": {"clip": None},
                "model": {"recurrence": {"checkpointing": "selective"}},
                "compile": True,
                "precision": "bf16",
            },
            (),
        ),
    ],
    ids=["micro-batches", "muon, average, validation, skipped steps", "compiled, without a clip"],
)
def test_a_replay_ends_with_the_bytes_of_the_calls(
    tmp_path, make_spec, shards, monkeypatch, graphs, changes, bad
):
    without_loss(monkeypatch, *bad)
    called, replayed = both(make_spec(max_steps=6, ckpt_every=6, **changes), tmp_path, shards, monkeypatch)
    assert called == replayed


def test_packed_rows_are_replayed(tmp_path, talk, talk_spec, monkeypatch):
    called, replayed = both(talk_spec, tmp_path, talk, monkeypatch)
    assert called == replayed


def test_a_micro_batch_of_another_shape_is_called(tmp_path, make_spec, shards, replayed, caplog):
    trainer = Trainer(make_spec(micro_batch=4), tmp_path, shards, {"data_digest": ""})
    trainer.model.train()
    batch = next(trainer.loader)
    fewer = dataclasses.replace(batch, rows_BT1=batch.rows_BT1[:2])
    losses = []
    for micro in (batch, batch, fewer, batch):
        trainer._seed("micro-batch", 1)
        losses.append(trainer.passes(micro, 1.0, trainer.model.tokens.pad, last=True)["loss"].item())
    assert losses[0] == losses[1] == losses[3] != losses[2]
    assert "a micro-batch of 2 x" in caplog.text


def test_passes_that_cannot_be_captured_name_the_switch(tmp_path, make_spec, shards, replayed, monkeypatch):
    def refuse(*given):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(passes, "Graph", refuse)
    with pytest.raises(TrainingError, match=r"cannot be captured here .*is capturing\); set graphs: off"):
        train(make_spec(max_steps=4), tmp_path, shards)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"graphs": "off"}, "graphs: off"),
        ({"parallel": "fsdp"}, "fsdp"),
        ({"settings": {"rollouts": {}}}, "answers"),
    ],
)
def test_what_is_launched_kernel_by_kernel_says_why(make_spec, changes, reason):
    spec = StageSpec.model_validate({**make_spec().model_dump(), **changes})
    why = why_eager(spec, GPU, 2, compiled=True)
    assert (why is None) if reason is None else reason in why
    assert "not compiled" in why_eager(make_spec(), GPU, 1, compiled=False)
    assert "CPU" in why_eager(make_spec(), torch.device("cpu"), 1, compiled=True)


# The function leaves and enters autocast, as the model's router does, and has a backward pass.
COMPILE = """
import json, sys
from pathlib import Path
import torch
from spider.training import compilation
from torch._dynamo.utils import counters

@torch.compile
def step(x, w):
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        z = x.float() @ w.float()
    return (torch.nn.functional.silu(y) + z).square().mean()

def run():
    x, w = torch.ones(16, 16), torch.ones(16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        step(x, w).backward()

archive = Path(sys.argv[2])
if sys.argv[1] == "keep":
    with compilation.saved_to(archive):
        run()
else:
    compilation.unpack(archive)
    run()
print(json.dumps({"graphs": counters["inductor"], "steps": counters["aot_autograd"]}))
"""


@pytest.fixture
def compile_in(tmp_path):
    """Return a function that compiles in another process with a cache folder and returns torch's counters."""

    def begin(what, folder):
        command = [python(), "-c", COMPILE, what, str(tmp_path / "a.cache")]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return begin


@pytest.mark.inductor
def test_another_process_reuses_the_compiled_code(compile_in, tmp_path):
    cold = compile_in("keep", "cold")
    assert cold["graphs"]["fxgraph_cache_miss"] == 2 and cold["steps"]["autograd_cache_saved"] == 1
    began = time.time()
    warm = compile_in("take", "warm")
    assert warm["steps"]["autograd_cache_hit"] == 1 and "fxgraph_cache_miss" not in warm["graphs"]
    libraries = list((tmp_path / "warm").rglob("*.so"))
    assert libraries and all(path.stat().st_mtime < began for path in libraries)


def test_a_compiler_that_fails_is_named_with_the_remedy(tmp_path, make_spec, shards, monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(*given, **options):
        raise BackendCompilerFailed(lambda: None, RuntimeError("PassManager::run failed"), None)

    monkeypatch.setattr(loop.Trainer, "_forward_backward", fail)
    with pytest.raises(TrainingError, match=r"cannot compile this model here .*PassManager.*compile: false"):
        train(make_spec(), tmp_path, shards)
    assert compilation.compiler_failed(RuntimeError("other")) is None
