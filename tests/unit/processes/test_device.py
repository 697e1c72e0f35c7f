"""A missing or too small GPU stops a training before it begins, with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from packaging.requirements import Requirement
from torch.nn.attention import _registry

from spider.common.errors import TrainingError
from spider.processes import device
from spider.processes.device import choose_attention, choose_tf32, make_deterministic, require_gpus
from spider.training import memory
from spider.training.memory import check_fits

REASONS = {
    "Torch not compiled with CUDA enabled": "install a build of torch for its CUDA",
    "Found no NVIDIA driver on your system. Please check": "start on a machine with a GPU and its driver",
    "No CUDA GPUs are available": r"start where there is one \(nvidia-smi, CUDA_VISIBLE_DEVICES\)",
    "The NVIDIA driver on your system is too old (found version 12040).": "update the driver, or install",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_missing_gpu_is_reported_with_reason_and_remedy(monkeypatch, reason):
    def init():
        raise (AssertionError if "compiled" in reason else RuntimeError)(f"{reason}\nmore of it")

    monkeypatch.setattr(torch.cuda, "init", init)
    require_gpus(0)
    with pytest.raises(
        TrainingError, match=f"resources.gpus: the run asks for 2, .*{REASONS[reason]}"
    ) as error:
        require_gpus(2)
    assert f": {reason.rstrip('.')}. To do: " in str(error.value) and "more of it" not in str(error.value)
    assert str(error.value).endswith("or set resources.gpus: 0, to train on the CPU")


def test_the_constraints_allow_a_build_of_torch_for_any_cuda():
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    pinned = {
        r.name: r.specifier
        for r in map(Requirement, filter(lambda line: line[:1] != "#", filter(None, lines)))
    }
    version = torch.__version__.partition("+")[0]
    assert all(pinned["torch"].contains(f"{version}{build}") for build in ("", "+cpu", "+cu126", "+cu130"))
    assert not [name for name in pinned if name.startswith(("nvidia-c", "cuda"))]  # each build brings its own


GPU = torch.device("cuda")


def test_a_gpu_uses_deterministic_algorithms_and_a_cpu_does_not(monkeypatch):
    """The switch also stops torch's compiler from timing several ways to sum."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        make_deterministic(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        make_deterministic(GPU)
        assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert (
            os.environ["CUBLAS_WORKSPACE_CONFIG"] and not torch.utils.deterministic.fill_uninitialized_memory
        )
    finally:
        torch.use_deterministic_algorithms(False)


class Package:
    """A package of flash attention, as torch sees it."""

    def __init__(self, missing: bool) -> None:
        self.active, self.missing = 0, missing

    def __call__(self) -> Package:
        if self.missing:
            raise ModuleNotFoundError("No module named 'flash_attn_interface'")
        self.active += 1
        return self

    def remove(self) -> None:
        self.active -= 1


@pytest.mark.parametrize(
    ("fa3", "fa4", "deterministic", "chosen"),
    [
        ("works", "works", False, "FA3"),
        ("missing", "works", False, "FA4"),
        ("works", "works", True, "FA2"),
        ("missing", "fails", False, "FA2"),
    ],
)
def test_a_flash_attention_that_is_installed_and_works_is_selected(
    monkeypatch, caplog, fa3, fa4, deterministic, chosen
):
    caplog.set_level("INFO")
    implementations = {"FA3": fa3, "FA4": fa4}
    packages = {name: Package(how == "missing") for name, how in implementations.items()}
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(packages))

    def attend(device):
        tried = [name for name, package in packages.items() if package.active]
        if implementations[tried[-1]] == "fails":
            raise RuntimeError("backward unsupported: windowed attention not supported\nmore of it")

    monkeypatch.setattr(device, "_try_attention", attend)
    assert choose_attention(torch.device("cpu"), deterministic=False) == "none" and not caplog.text
    assert choose_attention(GPU, deterministic=deterministic) == chosen
    assert [name for name, package in packages.items() if package.active] == [chosen] * (chosen != "FA2")
    reasons = {"missing": "No module named 'flash_attn_interface'", "fails": "backward unsupported"}
    for name, how in implementations.items():
        reason = reasons.get(how)
        assert bool(reason) == (f"attention: {name} is not used: {reason}" in caplog.text)
    assert choose_attention(GPU, deterministic=True) == "FA2"
    assert not any(package.active for package in packages.values())


def test_a_training_too_large_for_the_gpu_is_refused_or_warned_of_with_what_needs_less(
    gpu, needed, make_spec, caplog
):
    spec, least, likely = needed
    gpu(1.01 * likely, 1.01 * likely)
    check_fits(spec, "bf16", GPU)
    assert not caplog.text
    gpu((least + likely) / 2, (least + likely) / 2)
    check_fits(spec, "bf16", GPU)
    assert "memory: this training may need" in caplog.text and "RTX 3060 has" in caplog.text
    gpu(0.9 * least, 0.9 * least)
    auto = r"set windows_per_step: 64, micro_batch: auto, model.recurrence.checkpointing: full; or take"
    with pytest.raises(TrainingError, match=auto) as error:
        check_fits(spec, "bf16", GPU)
    assert "another process" not in str(error.value)
    gpu(1e4, 1e4)
    smallest = make_spec(micro_batch=1, model={"recurrence": {"checkpointing": "full"}})
    with pytest.raises(TrainingError, match=r"10\.0 kB; take optimizer\.kind: adamw8bit, a smaller"):
        check_fits(smallest, "bf16", GPU)


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_sets_the_switches_of_the_gpu_and_changes_no_product_of_a_cpu(tf32, caplog, allowed):
    caplog.set_level("INFO")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    a, b = torch.randn(2, 64, 64)
    before, narrow = a @ b, torch.backends.mkldnn.matmul.fp32_precision
    for backend in (matmul, cudnn):
        backend.allow_tf32 = not allowed
    choose_tf32(None)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (not allowed, not allowed) and not caplog.text
    choose_tf32(allowed)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    assert torch.equal(a @ b, before) and torch.backends.mkldnn.matmul.fp32_precision == narrow
    cpu = "" if torch.cuda.is_available() else ", without effect on a CPU"
    assert caplog.messages == [f"tf32: {'on' if allowed else 'off'}{cpu}"]


@pytest.fixture
def gpu(monkeypatch):
    """Return a function ``gpu(free, total)`` that simulates a GPU with this much memory in bytes."""

    def has(free, total):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(total)))

    monkeypatch.setattr(memory, "device_name", lambda device: "RTX 3060")
    return has


@pytest.fixture
def needed(make_spec):
    """Return a training with its least and its likely bytes."""
    spec = make_spec(micro_batch=64, model={"recurrence": {"checkpointing": False}})
    least, likely = memory._needs(spec, "bf16", "cuda")
    return spec, least, likely
