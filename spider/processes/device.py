"""Check that a training has the GPUs it requests, and set how they multiply and add.

Without a usable GPU, torch computes on the CPU without a message, and a cluster's GPU would idle for days.
Torch reports the reason (a build for CPUs, no device, a driver older than its CUDA) only on request.
`require_gpus` therefore checks before the training begins.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from spider.common.errors import TrainingError

log = logging.getLogger(__name__)

_BUILD = 'install a build of torch for its CUDA (docs/guide.md, "torch for a GPU")'
#: The remedy by a word of torch's reason.
_REMEDIES = {
    "compiled": _BUILD,
    "too old": f"update the driver, or {_BUILD.replace('its CUDA', 'the CUDA that it has')}",
    "no NVIDIA driver": "start on a machine with a GPU and its driver",
}


def available() -> str:
    """Return the device that a process computes on: the first GPU that it sees, or else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_gpus(gpus: int) -> None:
    """Raise `TrainingError` if a run requests GPUs (``resources.gpus``) and torch can use none here."""
    if not gpus:
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        found = (remedy for word, remedy in _REMEDIES.items() if word in reason)
        remedy = next(found, "start where there is one (nvidia-smi, CUDA_VISIBLE_DEVICES)")
        raise TrainingError(
            f"resources.gpus: the run asks for {gpus}, but torch {torch.__version__} can use none here: "
            f"{reason}. To do: {remedy}; or set resources.gpus: 0, to train on the CPU"
        ) from error


def require_all(gpus: int) -> None:
    """Raise `TrainingError` if this machine has fewer GPUs than a run requests, or torch can use none."""
    require_gpus(gpus)
    found = torch.cuda.device_count() if gpus else 0
    if found < gpus:
        raise TrainingError(
            f"resources.gpus: the run asks for {gpus}, but this machine has {found}. To do: set "
            f"resources.gpus: {found}, or start where there are more (profiles/slurm on a cluster)"
        )


def make_deterministic(device: torch.device, on: bool = True) -> None:
    """Make torch use deterministic algorithms in this process, or not, if it computes on a GPU.

    Call it before anything is compiled, because the compiler's output depends on it. Without it torch adds
    floats in the order of arriving threads (the gradient of the queries in FlashAttention, lookups and
    scatters that the compiler generates), and the compiler times several ways to split a sum. The project's
    own kernels (`kernels`) always use one order.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # workspace of a constant size
    # Filling memory only helps to find errors, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(on)


def choose_attention(device: torch.device, *, deterministic: bool) -> str:
    """Select the implementation of flash attention in this process, log it, and return its name.

    torch has FlashAttention-2 of its own, and takes FlashAttention-3 or 4 from a package that is installed.
    They are faster and are selected unless sums must have one order, each only after a trial on the device: a
    package may not suit torch, and FlashAttention-4 of torch 2.11 has no gradient within windows.
    """
    if device.type != "cuda":
        return "none"
    from torch.nn import attention

    attention.restore_flash_attention_impl(_raise_warn=False)  # of an earlier training of this process
    for name in () if deterministic else ("FA3", "FA4"):
        try:
            attention.activate_flash_attention_impl(name)
            _try_attention(device)
        except Exception as error:  # whatever a package of another version raises
            attention.restore_flash_attention_impl(_raise_warn=False)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.info("attention: %s is not used: %s", name, reason)
        else:
            log.info("attention: %s", name)
            return name
    return "FA2"


def _try_attention(device: torch.device) -> None:
    """Attend within two sequences, in all of one and in a window, forward and backward."""
    from torch.nn.attention.varlen import varlen_attn

    x_MHK = torch.zeros(192, 2, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    offset_S = torch.tensor([0, 100, 192], dtype=torch.int32, device=device)
    for window in (-1, 64):
        y_MHK = varlen_attn(x_MHK, x_MHK, x_MHK, offset_S, offset_S, 192, 192, window_size=(window, 0))
        assert isinstance(y_MHK, torch.Tensor), "without return_aux there is one result"
        torch.autograd.grad(y_MHK, x_MHK, torch.zeros_like(y_MHK))
    torch.cuda.synchronize(device)


def choose_tf32(allowed: bool | None) -> None:
    """Set whether a GPU rounds the factors of fp32 products to TF32 in this process, and log it.

    None leaves torch's own choice. Only switches of the GPU are set, because torch's common switch would also
    change the products of some CPUs.
    """
    if allowed is None:
        return
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    effect = "" if torch.cuda.is_available() else ", without effect on a CPU"
    log.info("tf32: %s%s", "on" if allowed else "off", effect)


def _main() -> None:
    """Check for the number of GPUs on the command line; exit with an error message if they are missing."""
    try:
        require_all(int(sys.argv[1]))
    except TrainingError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
