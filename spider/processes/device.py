"""The GPUs of a training: check that a run has those it asks for, and make their sums deterministic.

Without a GPU torch computes on the CPU without a message, so a cluster's GPU would idle for days. torch
reports the reason (a build for CPUs, no device, a driver older than its CUDA) only on request. `require_gpus`
therefore checks before anything is trained.
"""

from __future__ import annotations

import os
import sys

import torch

from spider.errors import TrainingError

_BUILD = 'install a build of torch for its CUDA (docs/guide.md, "torch for a GPU")'
#: The remedy for each of torch's reasons, by a word that the reason contains.
_REMEDIES = {
    "compiled": _BUILD,
    "too old": f"update the driver, or {_BUILD.replace('its CUDA', 'the CUDA that it has')}",
    "no NVIDIA driver": "start on a machine with a GPU and its driver",
}


def require_gpus(gpus: int) -> None:
    """Raise `TrainingError` where a run asks for GPUs (``resources.gpus``) and torch can use none here."""
    if not gpus:
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        found = (remedy for word, remedy in _REMEDIES.items() if word in reason)
        remedy = next(found, "start where there is one (nvidia-smi, CUDA_VISIBLE_DEVICES)")
        raise TrainingError(
            f"resources.gpus: the run asks for {gpus}, and torch {torch.__version__} can use none here: "
            f"{reason}. To do: {remedy}; or set resources.gpus: 0, to train on the CPU"
        ) from error


def one_order(device: torch.device) -> None:
    """Make torch use deterministic algorithms in this process, if it computes on a GPU.

    Call it before anything is compiled, because the compiler's work depends on it. Otherwise torch adds
    floats in the order in which threads arrive (the gradient of the queries in FlashAttention, lookups and
    scatters that the compiler makes), and the compiler chooses among ways to divide a sum by timing them. Our
    kernels use one order anyway (`kernels`).
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # workspace of a constant size
    # Filling memory is for finding errors, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _main() -> None:
    """Check for the number of GPUs on the command line; exit with an error message if they are missing."""
    gpus = int(sys.argv[1])
    try:
        require_gpus(gpus)
    except TrainingError as error:
        sys.exit(str(error))
    if (found := torch.cuda.device_count()) < gpus:
        remedy = f"set resources.gpus: {found}, or start where there are more (profiles/slurm on a cluster)"
        sys.exit(f"resources.gpus: the run asks for {gpus}, and this machine has {found}. To do: {remedy}")


if __name__ == "__main__":
    _main()
