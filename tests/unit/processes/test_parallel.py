"""Two and four processes reach the result of one, with the real `torchrun` and the real gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from spider.checkpoints.load import Checkpoint
from spider.common import files
from spider.config import ConfigError
from spider.data.loader import Loader
from spider.data.packing import PackedRows
from spider.data.shards import Shards
from spider.model import build_model
from spider.processes.parallel import unit_parameters
from spider.training import loop, stage
from tests.forkserver import python
from tests.unit.model.small_gpt import build_gpt
from tests.unit.processes.parallel_job import emulate_fp8
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import rows

HERE = Path(__file__).parent
KINDS = ("ddp", "fsdp")
MOVING = {"muon_momentum_start": 0.8, "muon_momentum_steps": 5, "weight_decay_end": 0.0}
GROUPS = {"matrices": {"decay": "scaled"}, "tables": {"decay": "l2", "weight_decay": 0.1}}
SPECS = {
    "muon": {
        "optimizer": {"kind": "muon", "muon_beta2": 0.95, "groups": GROUPS, **MOVING},
        "ema": {"decay": 0.9, "start_step": 2},
    },
    "adamw8bit": {"optimizer": "adamw8bit", "model": {"hidden": 64}, "max_steps": 2},
    "bf16": {"precision": "bf16", "max_steps": 2},
    "fp8": {"optimizer": "adamw8bit", "precision": "fp8", "model": {"hidden": 64}, "max_steps": 2},
}
#: Relative difference of a metric from one process's. Training amplifies the other order of sums.
TOLERANCE = {"muon": 1e-4, "adamw8bit": 1e-4, "bf16": 2e-2, "fp8": 2e-2}


def run_together(processes, jobs, scratch, fails=False):
    listed = scratch / f"jobs-{processes}.json"
    listed.write_text(json.dumps(jobs))
    # A connection that the machine resets is not what is tested, and a second start resumes the trainings.
    # It would also resume a training that is killed after its checkpoint, which then ends well.
    options = ["--standalone", f"--max-restarts={0 if fails else 1}", f"--nproc-per-node={processes}"]
    launch = [python(), "-m", "torch.distributed.run", *options]
    done = subprocess.run(
        [*launch, str(HERE / "parallel_job.py"), str(listed)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def specs(make_spec):
    shared = {"micro_batch": 2, "grad_accum": 4, "ckpt_every": 2, "log_every": 1, "max_steps": 6}
    shared |= {"val_every": 2, "val_bytes": 100}
    return {name: make_spec(**{**shared, **changes}) for name, changes in SPECS.items()}


def job(root, spec, name, kind, data, **more):
    (root / name).mkdir(exist_ok=True)
    plain = spec.model_copy(update={"parallel": kind}).model_dump(mode="json")
    return {"spec": plain, "folder": str(root / name), "data": str(data), **more}


@pytest.fixture(scope="module")
def emulated():
    """Undo a patch at the end of these tests, also when the fixture that patches fails."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards, specs, talk, talk_spec, emulated):
    """Return the folder of all trainings.

    ``{spec}-one`` is trained by one process, ``{spec}-ddp`` and ``{spec}-fsdp`` by two, and
    ``muon-replayed`` by two that replay their passes. ``muon-whole`` has no units. Two processes train
    ``moved-{kind}`` to step 2, four to step 4, and one finishes it. ``talk-{kind}`` is a GPT on packed
    answers: one process trains it to step 4, two to step 8, and one finishes it.
    """
    root = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    emulate_fp8(emulated)
    for name, spec in specs.items():
        stage.train(spec, root / f"{name}-one", shards)
    stage.train(talk_spec, root / "talk-one", talk)
    talks = [(root, talk_spec, f"talk-{kind}", kind, talk) for kind in KINDS]
    for _, _, name, *_ in talks:
        with pytest.raises(Stop):
            stage.train(talk_spec, root / name, talk, on_step=crash_at(4))
    whole = [
        job(root, spec, f"{name}-{kind}", kind, shards, record=name == "muon")
        for name, spec in specs.items()
        for kind in KINDS
    ]
    whole.append(job(root, specs["muon"], "muon-replayed", "ddp", shards, record=False, replayed=True))
    whole.append(job(root, specs["muon"], "muon-whole", "fsdp", shards, record=False, whole=True))
    moved = [(root, specs["muon"], f"moved-{kind}", kind, shards) for kind in KINDS]
    stopped = [*(job(*m, stop=2) for m in moved), *(job(*t, stop=8, record=False) for t in talks)]
    run_together(2, [*whole, *stopped], root)
    run_together(4, [job(*m, stop=4) for m in moved], root)
    for _, spec, name, _, data in [*moved, *talks]:
        stage.train(spec, root / name, data)
    emulated.undo()
    return root


def assert_alike(folder, one, tolerance):
    """Compare the curves row by row, and the tensors of the last checkpoints."""
    curve, its = rows(folder), rows(one)
    assert [row["step"] for row in curve] == [row["step"] for row in its]
    for row, other in zip(curve, its, strict=True):
        # The fullest expert's load changes by whole tokens. In fp8 tokens near a tie go to another expert.
        loads = [metrics.pop("train/moe_load_max", 0) for metrics in (row["metrics"], other["metrics"])]
        assert loads[0] == pytest.approx(loads[1], rel=5 * tolerance)
        assert row["metrics"] == pytest.approx(other["metrics"], rel=tolerance, abs=1e-6), row["step"]
    found, others = tensors(folder), tensors(one)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in others.items()
    }
    for name, tensor in found.items():
        # The experts' bias changes by whole steps, and a single token can cause one.
        if name.startswith(("model.", "ema.")) and not name.endswith("balance_bias"):
            off = (tensor.double() - others[name].double()).norm()
            assert off <= 10 * tolerance * others[name].double().norm() + 1e-6, name


def tensors(folder):
    """Return the tensors of the last checkpoint; those that are cut are joined by hand."""
    checkpoint = Checkpoint.at(folder / "train.json")
    held = {n: t for file in checkpoint.path.glob("*.safetensors") for n, t in load_file(file).items()}
    slices = {n: [held[key] for key in keys] for n, keys in checkpoint.keys_of.items()}
    return {n: torch.cat(s) if len(s) > 1 else s[0] for n, s in slices.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_two_processes_reach_the_result_of_one(trained, name, kind):
    assert_alike(trained / f"{name}-{kind}", trained / f"{name}-one", TOLERANCE[name])


def test_two_processes_that_replay_their_passes_reach_the_bits_of_ddp(trained):
    called, replayed = tensors(trained / "muon-ddp"), tensors(trained / "muon-replayed")
    assert called.keys() == replayed.keys()
    assert [name for name, tensor in called.items() if not torch.equal(tensor, replayed[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_then_four_then_one_process_reach_the_result_of_one(trained, kind):
    """A signal to one process stops all at one step, and any number of processes resumes their checkpoint."""
    assert_alike(trained / f"moved-{kind}", trained / "muon-one", TOLERANCE["muon"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_then_two_then_one_process_train_on_the_same_packed_answers(trained, talk, talk_spec, kind):
    """The GPT has skips that are never used, whose gradients DDP would wait for."""
    folder = trained / f"talk-{kind}"
    assert_alike(folder, trained / "talk-one", TOLERANCE["muon"])
    shares = [np.load(folder / f"seen-2-{rank}.npy") for rank in range(2)]
    shards = Shards(talk, "train")
    order = files.read_json(folder / "train.json")["position"]
    packed = PackedRows.open(talk, shards, order["seq_len"])
    alone = Loader(shards, seq_len=32, rows=8, seed=order["seed"], packed=packed)
    expected = np.stack([next(alone).rows_BT1 for _ in range(8)])[4:]
    assert np.array_equal(np.concatenate(shares, axis=1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_see_the_windows_of_one_in_the_same_order(tmp_path, trained, specs, shards, kind):
    spec = specs["muon"]
    alone = loop.Trainer(spec, tmp_path, shards, {"data_digest": ""}).loader
    expected = np.stack([next(alone).rows_BT1 for _ in range(4)])
    folder, found = trained / f"moved-{kind}", []
    for processes in (2, 4):
        shares = [np.load(folder / f"seen-{processes}-{rank}.npy") for rank in range(processes)]
        assert all(len(share) == 2 for share in shares)
        found.append(np.concatenate(shares, axis=1))
    assert np.array_equal(np.concatenate(found), expected)


def test_ddp_holds_all_parameters_and_fsdp_a_slice(trained):
    for processes in (2, 4):
        for kind in KINDS:
            records = [
                files.read_json(trained / f"moved-{kind}" / f"record-{processes}-{rank}.json")
                for rank in range(processes)
            ]
            held = [record["held"] / record["all"] for record in records]
            assert sum(held) == pytest.approx(processes if kind == "ddp" else 1)
            assert max(held) < (1.01 if kind == "ddp" else 1.2 / processes)


def test_units_that_gather_in_fp32_reach_the_bits_of_a_model_without(trained):
    units, whole = tensors(trained / "muon-fsdp"), tensors(trained / "muon-whole")
    assert units.keys() == whole.keys()
    assert [name for name, tensor in units.items() if not torch.equal(tensor, whole[name])] == []


def test_a_process_holds_the_weights_of_a_unit_only_in_its_call(trained, specs):
    model = build_model(specs["muon"].model)
    dense = [f"{part}.{i}" for part in ("prelude", "coda") for i in range(len(getattr(model, part)))]
    for processes in (2, 4):
        units = files.read_json(trained / f"moved-fsdp/record-{processes}-0.json")["units"]
        assert units.keys() == {"core", *dense}
        for inside, after in units.values():
            assert inside == 1 and after < 1.2 / processes


def test_units_of_a_gpt_are_its_layers_and_hold_nearly_all_of_it():
    model = build_gpt(qk_gain=1.0)
    owned = unit_parameters(model)
    assert list(owned) == list(model.blocks)
    rest = set(model.parameters()).difference(*(part for parts in owned.values() for part in parts))
    named = {name for name, p in model.named_parameters() if p in rest}
    assert {"embedding", "head.weight"} <= named
    assert all(re.search(r"embedding|head|mix|gate|gain|scale", name) for name in named)


def test_ddp_exchanges_gradients_in_the_last_micro_batch_of_a_step_and_fsdp_in_each(trained):
    for kind, alike in {"ddp": [False, True], "fsdp": [True, True]}.items():
        for rank in range(2):
            record = files.read_json(trained / f"muon-{kind}" / f"record-2-{rank}.json")
            assert record["alike"] == alike


@pytest.mark.long
@pytest.mark.inductor
def test_a_compiled_sharded_model_reaches_the_result_of_one_process(tmp_path, make_spec, shards):
    """The model lacks experts and random boundaries, so that fp32 compiles without random numbers."""
    model = {"moe": None, "boundary": {"kind": "whitespace"}}
    settings = {"micro_batch": 2, "grad_accum": 2, "max_steps": 3, "log_every": 1, "model": model}
    stage.train(make_spec(**settings), tmp_path / "one", shards)
    run_together(2, [job(tmp_path, make_spec(**settings, compile=True), "two", "fsdp", shards)], tmp_path)
    assert_alike(tmp_path / "two", tmp_path / "one", TOLERANCE["muon"])


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 12))
def test_micro_batches_are_equal_and_as_large_as_allowed(specs, processes, micro_batch, grad_accum):
    settings = specs["muon"].settings.model_copy(
        update={"micro_batch": micro_batch, "grad_accum": grad_accum * processes}
    )
    spec = specs["muon"].model_copy(update={"settings": settings})
    assert spec.micro_batch(1) == spec.micro_batch(processes) == micro_batch
    for others in range(1, 9):
        mine, rest = divmod(spec.windows_per_step, others)
        if rest:
            with pytest.raises(ConfigError, match=f"windows, which {others} processes cannot share evenly"):
                spec.micro_batch(others)
        else:
            found = spec.micro_batch(others)
            assert mine % found == 0 and found <= micro_batch
            assert all(mine % n for n in range(found + 1, min(mine, micro_batch) + 1))


def test_all_processes_of_a_training_that_diverges_end_with_the_remedy(tmp_path, make_spec, shards):
    spec = make_spec(**SPECS["muon"], lr=1e12, warmup_steps=0, ckpt_every=1, micro_batch=2, grad_accum=2)
    said = run_together(2, [job(tmp_path, spec, "a", "fsdp", shards)], tmp_path, fails=True)
    assert "the last good checkpoint is" in said and "lower lr" in said
    assert not (tmp_path / "a/train.json").exists()
    for path in (tmp_path / "a/checkpoints").glob("step-*/*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(path).values() if t.is_floating_point())
