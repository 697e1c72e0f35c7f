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
