"""The training curve on disk, and the means that go into it.

``metrics.jsonl`` is append-only: one line a log step, ``{"step", "time", "metrics"}``, written in one call so
that a kill tears at most the last line, which the next start cuts off. A resumed run walks again through
steps already logged: equal to the first time, so they are skipped and the curve has neither gaps nor
duplicates.

Means are over every step since the last line. Their running sums are part of a checkpoint, hence exact across
a resume.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


class MetricsLog:
    """Append rows to ``metrics.jsonl``; rows up to `last` are there already and are not written again."""

    def __init__(self, path: Path) -> None:
        self.last = _cut_torn_tail(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.last:
            row = {"step": step, "time": time.time(), "metrics": dict(metrics)}
            line = (json.dumps(row) + "\n").encode()
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
            self.last = step

    def close(self) -> None:
        self._file.close()


def _cut_torn_tail(path: Path) -> int:
    """Truncate after the last whole row; returns its step (-1: there is none)."""
    if not path.exists():
        return -1
    whole, last = 0, -1
    with open(path, "rb") as f:
        for line in f:
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            whole, last = whole + len(line), step
    if path.stat().st_size != whole:
        os.truncate(path, whole)
    return last


class Means:
    """Running sums of device scalars: no host synchronisation until they are read."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        self.count += 1
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self) -> dict[str, float]:
        if not self.count:
            return {}
        names = list(self._sums)
        values = (torch.stack([self._sums[n] for n in names]) / self.count).tolist()
        return dict(zip(names, values, strict=True))

    def state(self) -> dict[str, object]:
        return {"count": self.count, "sums": {n: s.item() for n, s in self._sums.items()}}

    @classmethod
    def restore(cls, state: dict, device: torch.device) -> Means:
        means = cls()
        means.count = state["count"]
        means._sums = {
            n: torch.tensor(s, dtype=torch.float64, device=device) for n, s in state["sums"].items()
        }
        return means


@dataclass
class Window:
    """Steps since the last log line, of this process only: rates are over work that this process did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds of these that went by waiting for data."""

    def rates(self, steps_left: int) -> dict[str, float]:
        return {
            "train/bytes_per_second": self.tokens / self.seconds,
            "train/data_wait_share": self.waited / self.seconds,
            "train/eta_seconds": steps_left * self.seconds / self.steps,
        }


#: Dense bf16 FLOP/s of common GPUs, from their data sheets; the first name found in the device's name counts.
_PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX PRO 6000": 503e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: str, precision: str) -> float | None:
    """Dense FLOP/s that a device could reach in ``bf16`` or ``fp8`` (twice that); None where we do not
    know."""
    if precision == "fp32":
        return None
    for name, peak in _PEAK_BF16.items():
        if name in device:
            return peak * (2 if precision == "fp8" else 1)
    return None
