"""Check that the machine has the GPUs that a run asks for, and look up how fast a GPU could be.

torch computes on the CPU without a message where it finds no GPU, so a cluster's GPU would idle for days. It
can say why it finds none (a build for CPUs, no device, a driver older than its CUDA), but only on request.
`require_gpus` therefore checks before anything is trained.
"""

from __future__ import annotations

import re
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


#: Dense TFLOP/s of products in bf16 with sums in fp32. An entry is for devices with all of its words in their
#: name, and the first that matches holds. Where a data sheet counts sparsity, its figure is twice as high.
_PEAK_BF16: dict[str, float] = {
    "GB200": 2500,  # NVIDIA GB200 NVL72 data sheet: 360 PFLOPS of 72 GPUs, with sparsity
    "B200": 2250,  # NVIDIA DGX B200 data sheet: 36 PFLOPS of 8 GPUs, with sparsity
    "B100": 1750,  # NVIDIA Blackwell Architecture Technical Brief, HGX B100: 3.5 PFLOPS, with sparsity
    "GH200": 989,  # NVIDIA GH200 Grace Hopper data sheet: 1,979, with sparsity
    "H200 NVL": 835,  # NVIDIA H200 data sheet: 1,671, with sparsity
    "H200": 989,  # the same: 1,979, with sparsity
    "H100 NVL": 835,  # NVIDIA H100 data sheet: 1,671, with sparsity
    "H100 PCIe": 756,  # the same: 1,513, with sparsity
    "H100": 989,  # the same: 1,979, with sparsity
    "H800 PCIe": 756,  # NVIDIA H800 data sheet: 1,513, with sparsity
    "H800": 989,  # the same: 1,979, with sparsity
    "A100": 312,  # NVIDIA A100 data sheet
    "A800": 312,  # NVIDIA A800 data sheet: 624, with sparsity
    "A40": 149.7,  # NVIDIA A40 data sheet: 299.4, with sparsity
    "A30": 165,  # NVIDIA A30 data sheet: 330, with sparsity
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
    "MI325X": 1307.4,  # AMD Instinct MI325X data sheet
    "MI355X": 2516.6,  # AMD Instinct MI355X data sheet
    "L40S": 362,  # NVIDIA L40S data sheet: 733, with sparsity
    "L40": 181,  # NVIDIA L40 data sheet
    "L4": 121,  # NVIDIA L4 data sheet: 242, with sparsity
    "A10G": 70,  # NVIDIA A10G data sheet
    "RTX PRO 6000 Max Q": 439,  # NVIDIA RTX Blackwell PRO architecture, as are the next
    "RTX PRO 6000": 503,
    "RTX 6000 Ada": 364,  # NVIDIA Ada GPU architecture
    "RTX A6000": 155,  # NVIDIA RTX A6000 data sheet: 309.7, with sparsity
    "RTX 5090": 210,  # NVIDIA RTX Blackwell GPU architecture
    "RTX 4090": 165,  # NVIDIA Ada GPU architecture
    "RTX 3090": 71,  # NVIDIA Ampere GA102 GPU architecture
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the dense FLOP/s that a device could reach in ``bf16`` or ``fp8`` (twice that), or None where
    that is not known."""
    words = set(re.findall(r"\w+", device))
    if precision != "fp32" and not words & {"Laptop", "MIG"}:  # a slower chip, or a share of one
        for name, peak in _PEAK_BF16.items():
            if words.issuperset(name.split()):
                return peak * 1e12 * (2 if precision == "fp8" else 1)
    return None


def _main() -> None:
    """Look for as many GPUs as the command line says; leave with what is wrong, if they are not there."""
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
