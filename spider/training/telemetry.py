"""Report a running training: a row of metrics for each log interval, a log line and a progress bar.

The row goes into ``metrics.jsonl`` and from there to MLflow; the line shows the same figures to a reader. On
a terminal the bar replaces the lines, and other log records appear above it.

Model FLOPs utilisation (Chowdhery et al., arXiv:2204.02311, appendix B) is the model's FLOP/s over the
device's peak. The peak comes from the data sheet, without sparsity, so that figures of several machines
compare. For a device that the table lacks, MFU is unknown rather than estimated.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import starmap

import psutil
import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from spider.training.precision import device_name

log = logging.getLogger(__name__)


@dataclass
class Window:
    """Work since the last log line. It counts this process's own steps, not those before a resume."""

    steps: int = 0
    tokens: int = 0
    bytes: int = 0
    """Bytes that the targets stand for."""
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds of waiting for data, which are part of ``seconds``."""
    pauses: float = 0.0
    """Seconds of checkpoints and validations for each step, on average over the stage."""


#: Bits of an operand of most matrix products, so that a metric can show the precision.
PRECISION_BITS = {"fp32": 32, "bf16": 16, "fp8": 8}


def target_counts(targets: int, bytes_: int, device: torch.device) -> dict[str, Tensor]:
    """Return a step's targets and the bytes that they stand for, as scalars on the device.

    They are averaged as losses are, so that a resume within a log interval keeps them.
    """
    counts = {"targets": targets, "bytes": bytes_}
    return {name: torch.full((), n, dtype=torch.float64, device=device) for name, n in counts.items()}


class Telemetry:
    """Compute the rows of one training.

    Args:
        flops_per_token: FLOPs of forward and backward of this process.
        learned: whether the vocabulary is learned; a byte rate then counts the bytes that ids stand for.
    """

    def __init__(
        self, device: torch.device, precision: str, flops_per_token: float, learned: bool = False
    ) -> None:
        name = device_name(device)
        self.device = device
        self.flops_per_token = flops_per_token
        self.learned = learned
        self.precision = precision
        self.peak = peak_flops(name, precision)
        if self.peak is None:
            log.info("mfu: unknown, the peak FLOP/s of %s on %s is not on record", precision, name)
        else:
            peak = f"{self.peak / 1e12:.0f} TFLOP/s"
            log.info("mfu: of %s, dense %s by the data sheet of %s", peak, precision, name)
        self._process = psutil.Process()
        self._process.cpu_percent()  # starts the interval of the first row

    def row(
        self,
        means: dict[str, float],
        now: dict[str, float],
        window: Window,
        steps_left: int,
    ) -> dict[str, float]:
        """Return all metrics of a log interval.

        Losses are in nats a target, ``bpb`` in bits a byte, megabytes are 10^6 bytes, shares are of 1.

        Args:
            means: means over the interval; empty if every update of it was skipped.
            now: values after the last step, by name: epoch, tokens, seconds, rates, skipped steps.
        """
        row = {f"train/{name}": value for name, value in means.items()}
        if row:
            targets = row.pop("train/targets", 1.0)
            bytes_ = row.pop("train/bytes", 1.0)
            bits = row.get("train/cross_entropy", row["train/loss"]) / math.log(2)
            row["train/bpb"] = bits * targets / (bytes_ or 1.0)
        row |= {f"train/{name}": value for name, value in now.items()}
        row |= {
            "train/precision_bits": PRECISION_BITS[self.precision],
            "system/rss_mb": self._process.memory_info().rss / 1e6,
            "system/cpu_percent": self._process.cpu_percent(),
            "train/bytes_per_second": (window.bytes if self.learned else window.tokens) / window.seconds,
            "train/step_seconds": window.seconds / window.steps,
            "train/data_wait_share": window.waited / window.seconds,
            "train/eta_seconds": steps_left * (window.seconds / window.steps + window.pauses),
        }
        if self.device.type == "cuda":
            row["system/gpu_memory_mb"] = torch.cuda.max_memory_allocated(self.device) / 1e6
        tokens_per_second = window.tokens / window.seconds
        if self.learned:
            row["train/tokens_per_second"] = tokens_per_second
        if self.peak is not None:
            row["train/mfu"] = tokens_per_second * self.flops_per_token / self.peak
        return row


def _tokens(count: float) -> str:
    """Return a number of tokens, from a million on in millions."""
    return f"{count:,.0f} tokens" if count < 1e6 else f"{count / 1e6:,.2f}M tokens"


def _precision(bits: float) -> str:
    """Return the name of the precision that a row holds as a number of bits."""
    return next(name for name, known in PRECISION_BITS.items() if known == bits)


#: Groups of the line before the model's own: metrics with their formats. Missing metrics are left out.
_GROUPS: tuple[dict[str, str | Callable[[float], str]], ...] = (
    {"train/epoch": "epoch {:.3g}", "train/tokens": _tokens},
    {"train/bpb": "bpb {:.3f}", "train/loss": "loss {:.3f}"},
    {"train/lr": "lr {:.2e}", "train/muon_lr": "muon {:.2e}", "train/grad_norm": "grad {:.3g}"},
    {
        "train/precision_bits": _precision,
        "train/bytes_per_second": "{:,.0f} bytes/s",
        "train/tokens_per_second": "{:,.0f} ids/s",
        "train/step_seconds": "{:.3g} s/step",
        "train/mfu": "mfu {:.1%}",
        "train/data_wait_share": "data wait {:.1%}",
    },
    {"system/gpu_memory_mb": "gpu {:,.0f} MB", "system/rss_mb": "ram {:,.0f} MB"},
)


def line(row: Mapping[str, float], step: int, end: int, shown: Mapping[str, str]) -> str:
    """Format a row after ``step`` of ``end`` steps; ``shown`` has the formats of the model's own metrics."""
    own: dict[str, str | Callable[[float], str]] = {f"train/{name}": form for name, form in shown.items()}

    def formatted(name: str, form: str | Callable[[float], str]) -> str:
        if name not in row:
            return ""
        return form.format(row[name]) if isinstance(form, str) else form(row[name])

    groups = ["  ".join(filter(None, starmap(formatted, group.items()))) for group in (*_GROUPS, own)]
    skipped = f"{row['train/skipped_steps']:.0f} steps skipped" if row["train/skipped_steps"] else ""
    spent, left = (timedelta(seconds=round(row[f"train/{name}"])) for name in ("seconds", "eta_seconds"))
    time = f"{step / end:.1%} done  time {spent}  eta {left}"
    return " | ".join(part for part in (f"step {step}/{end}", *groups, skipped, time) if part)


@contextlib.contextmanager
def progress_bar(step: int, end: int | None, *, hidden: bool = False) -> Iterator[tqdm]:
    """Show a bar over the steps on a terminal; elsewhere yield a disabled one.

    Log records appear above the bar, except this module's lines, which the bar replaces.
    """
    off = hidden or not sys.stderr.isatty()
    with (
        contextlib.nullcontext() if off else logging_redirect_tqdm(),
        tqdm(total=end, initial=step, unit="step", disable=off) as bar,
    ):
        if not off:
            # The handler is tqdm's own; the filter disappears with it.
            logging.root.handlers[-1].addFilter(lambda record: record.name != __name__)
        yield bar


def show(row: Mapping[str, float], step: int, end: int, bar: tqdm, shown: Mapping[str, str]) -> None:
    """Log the row's line and show its main metrics beside the bar."""
    log.info(line(row, step, end, shown))
    bpb, speed = row.get("train/bpb", math.nan), row["train/bytes_per_second"]
    bar.set_postfix_str(f"bpb {bpb:.3f}, {speed:,.0f} bytes/s")


#: Dense TFLOP/s of products in bf16 with sums in fp32. An entry matches devices whose name has all its words;
#: the first match counts. A data sheet's figure "with sparsity" is twice as high.
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
    "MI250": 181.05,  # AMD Instinct MI250 data sheet: 362.1 of two chips; torch counts each as a device
    "MI250X": 191.5,  # AMD Instinct MI250X data sheet: 383 of two chips
    "MI300A": 980.6,  # AMD Instinct MI300A data sheet
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
    """Return a device's peak dense FLOP/s in ``bf16`` or ``fp8`` (twice that), or None if unknown."""
    words = set(re.findall(r"\w+", device))
    if precision != "fp32" and not words & {"Laptop", "MIG"}:  # a slower chip, or a part of one
        for name, peak in _PEAK_BF16.items():
            if words.issuperset(name.split()):
                return peak * 1e12 * (2 if precision == "fp8" else 1)
    return None
