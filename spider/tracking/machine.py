"""What a job takes from its machine, sampled while it runs: processor, memory, GPUs.

A thread takes a row every few seconds. Of a job that runs for days at most `LIMIT` rows are kept: when there
are that many every second one goes, and from then on they are taken half as often. So the memory is bounded,
the whole of the job is covered, and nothing is written before it ends.

GPUs are read through NVML, those that ``CUDA_VISIBLE_DEVICES`` leaves to this process; where there is no
driver there are none. Their energy is counted by the device, whoever uses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import psutil

INTERVAL = 5.0
"""Seconds between rows, at first."""
LIMIT = 120


class Sampler:
    """Rows of ``system/*`` figures from `start` to `stop`.

    Megabytes are 10^6 bytes, percentages of one processor for this process, of all for the machine.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self.rows: list[tuple[float, dict[str, float]]] = []
        """(time in seconds since the epoch, figures)"""
        self.energy: float | None = None
        """Joules that the GPUs took from start to stop; None without a GPU that counts them."""
        self._interval = interval
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def start(self) -> Sampler:
        self._process.cpu_percent()  # counts from here to the first row
        psutil.cpu_percent()
        self._gpus = _Gpus()
        self._energy_before = self._gpus.energy()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        after = self._gpus.energy()
        if after is not None and self._energy_before is not None:
            self.energy = after - self._energy_before
        self._gpus.close()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            self.rows.append((time.time(), self._row()))
            if len(self.rows) == LIMIT:
                self.rows = self.rows[1::2]
                self._interval *= 2

    def _row(self) -> dict[str, float]:
        return {
            "system/cpu_percent": self._process.cpu_percent(),
            "system/rss_mb": self._process.memory_info().rss / 1e6,
            "system/machine_cpu_percent": psutil.cpu_percent(),
            "system/machine_memory_percent": psutil.virtual_memory().percent,
            **self._gpus.row(),
        }


class _Gpus:
    """The GPUs of this process; none where NVML is not there or fails, which costs figures and no job."""

    def __init__(self) -> None:
        self._devices: list[tuple[str, Any]] = []
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._devices = [(str(n), self._handle(name)) for n, name in enumerate(self._visible())]
        except pynvml.NVMLError:
            self._devices = []

    def _visible(self) -> list[str]:
        """Names of the devices as CUDA numbers them: positions, or UUIDs."""
        told = os.environ.get("CUDA_VISIBLE_DEVICES")
        if told is None:
            return [str(n) for n in range(self._nvml.nvmlDeviceGetCount())]
        return [name.strip() for name in told.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def row(self) -> dict[str, float]:
        row: dict[str, float] = {}
        for n, device in self._devices:
            # One that is cut into parts (MIG) or cannot measure its power tells what it can.
            with contextlib.suppress(self._nvml.NVMLError):
                row[f"system/gpu_{n}_memory_mb"] = self._nvml.nvmlDeviceGetMemoryInfo(device).used / 1e6
            with contextlib.suppress(self._nvml.NVMLError):
                row[f"system/gpu_{n}_percent"] = self._nvml.nvmlDeviceGetUtilizationRates(device).gpu
            with contextlib.suppress(self._nvml.NVMLError):
                row[f"system/gpu_{n}_watts"] = self._nvml.nvmlDeviceGetPowerUsage(device) / 1e3
        return row

    def energy(self) -> float | None:
        """Joules since the driver was loaded, of all devices together."""
        try:
            spent = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) for _, device in self._devices]
        except self._nvml.NVMLError:
            return None
        return sum(spent) / 1e3 if spent else None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
