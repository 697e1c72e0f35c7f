"""Whether the machine has the GPU that a run asks for, asked before anything is trained.

A torch that finds no GPU computes on the CPU without a word: a cluster's GPU would idle for days. torch knows
why it finds none (a build for CPUs, no device, a driver older than its CUDA), and says so only when pressed.
"""

from __future__ import annotations

import torch

from spider.errors import TrainingError

_BUILD = 'install a build of torch for its CUDA (docs/guide.md, "torch for a GPU")'
#: What to do, by a word of torch's reason.
_REMEDIES = {
    "compiled": _BUILD,
    "too old": f"update the driver, or {_BUILD.replace('its CUDA', 'the CUDA that it has')}",
    "no NVIDIA driver": "start on a machine with a GPU and its driver",
}


def require_gpus(gpus: int) -> None:
    """`TrainingError` where a run asks for so many GPUs (``resources.gpus``) and torch can use none here."""
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
