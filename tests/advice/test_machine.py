"""Advice about the machine: GPUs (of a made list), precision, memory, disks, signals and folders."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from spider.common.errors import Preempted
from spider.common.files import read_json, snakemake, write_json
from spider.common.results import MARK, Results, check_root, write_config
from spider.processes.device import require_all, require_gpus
from spider.training.memory import check_fits
from spider.training.precision import compiles, decide
from spider.training.stage import train
from spider.workflow import doctor

from .conftest import SHORT
from .followed import advised, refused

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_run_without_its_gpus_gets_as_many_as_there_are(monkeypatch):
    if not torch.cuda.is_available():
        with refused("processes/device.py", "To do: {}; or set resources.gpus: 0, to train on the CPU"):
            require_gpus(1)
    require_gpus(0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("processes/device.py", "To do: set resources.gpus: {}, or start where"):
        require_all(2)
    require_all(1)


@pytest.fixture
def capability(monkeypatch):
    """Return a function that sets the compute capability of the GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def set_to(*version: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)

    return set_to


def test_another_precision_is_set(capability, make_spec):
    capability(8, 0)
    with refused("training/precision.py", "such as H100 or RTX 40); set precision: auto or bf16"):
        decide("fp8", GPU, None)
    assert {decide(kind, GPU, None).kind for kind in ("auto", "bf16")} == {"bf16"}
    capability(7, 5)
    with refused("training/precision.py", "precision: bf16 cannot run on {}; set precision: fp32"):
        decide("bf16", GPU, None)
    assert decide("fp32", GPU, None).kind == "fp32"
    with refused("training/precision.py", "precision: {} selects {} on {}, and {}; or leave compile out"):
        compiles(make_spec(precision="auto", compile=True), "fp32", CPU)
    assert not compiles(make_spec(precision="auto"), "fp32", CPU)


def test_a_training_far_above_the_memory_gets_shorter_rows_or_fewer(make_spec):
    with refused("training/memory.py", "lower seq_len ({}) or micro_batch ({}), or take a smaller model"):
        check_fits(make_spec(seq_len=2**16, micro_batch=2**14), "fp32", CPU)
    for change in ({"seq_len": 32, "micro_batch": 4}, {"seq_len": 2**10, "micro_batch": 4}):
        check_fits(make_spec(**change), "fp32", CPU)


def test_the_doctor_is_content_after_the_change(tmp_path):
    mark, said = doctor._compared("16 GB", 1e9, {"r": 2e9})
    assert mark == "warning"
    advised(said, "workflow/doctor.py", "end other programs, or lower micro_batch or seq_len")
    assert (
        doctor._compared("16 GB", 3e9, {"r": 2e9})[0] == doctor._compared("16 GB", 1e9, {"r": 5e8})[0] == "ok"
    )
    mark, said = doctor._disk(Results(tmp_path), {"docs": (1e18, 1e18)})
    advised(said, "workflow/doctor.py", "free some, or name a folder on another disk (results:)")
    assert mark == "problem" and doctor._disk(Results(tmp_path), {"docs": (1e3, 1e3)})[0] == "ok"
    mark, said = doctor._partitions(Path(doctor.__file__).parents[2] / "profiles/default")
    assert mark == "problem"
    advised(said, "workflow/doctor.py", "so jobs run on this machine: leave the profile out")


@contextlib.contextmanager
def largest_file(size: int):
    """Let no file be larger, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_training_goes_on_when_there_is_space(tmp_path, make_spec, shards):
    spec = make_spec(**SHORT, ckpt_every=2)
    with (
        refused(
            "checkpoints/save.py", "Earlier checkpoints are intact: free some space and run again to continue"
        ),
        largest_file(50_000),
    ):
        train(spec, tmp_path / "a", shards)
    assert train(spec, tmp_path / "a", shards).steps == 6
    with refused("training/stage.py", "{}: {}; what was saved is intact, run again"), largest_file(100):
        train(spec, tmp_path / "b", shards)
    assert train(spec, tmp_path / "b", shards).steps == 6


def test_a_stopped_training_goes_on(tmp_path, make_spec, shards):
    def stop(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with refused("common/errors.py", "{}: stopped after step {}, run again to go on", error=Preempted):
        train(make_spec(**SHORT), tmp_path / "a", shards, on_step=stop)
    assert train(make_spec(**SHORT), tmp_path / "a", shards).steps == 6


def test_a_results_folder_of_another_version_or_without_permission_is_left(tmp_path):
    root = tmp_path / "results"
    root.mkdir()
    write_json(root / MARK, {"format": 99})
    with refused("common/results.py", "or move this one away"):
        check_root(root)
    check_root(tmp_path / "other")
    root.rename(tmp_path / "aside")
    check_root(root)
    (tmp_path / "file").touch()
    with refused("common/results.py", "or name another folder under `results:` in the configuration"):
        write_config(tmp_path / "file/results", {})
    write_config(root, {})


def test_the_path_in_a_command_is_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        snakemake(tmp_path / "results/a b") == snakemake(Path("results/a b")) == "`snakemake 'results/a b'`"
    )
    assert snakemake(Path("/data/results/a")) == "`snakemake /data/results/a`"


def test_a_damaged_file_is_deleted(tmp_path):
    (tmp_path / MARK).write_text("{")
    with refused("common/files.py", "delete it and run again"):
        read_json(tmp_path / MARK)
    (tmp_path / MARK).unlink()
    write_config(tmp_path, {})
