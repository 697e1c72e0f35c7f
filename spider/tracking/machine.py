"""What a job takes from its machine, sampled while it runs: processor, memory, GPUs.

A thread takes a row every few seconds. Of a job that runs for days at most `LIMIT` rows are kept: when there
are that many every second one goes, and from then on they are taken half as often. So the memory is bounded,
the whole of the job is covered, and nothing is written before it ends.

GPUs are read through NVML, those that ``CUDA_VISIBLE_DEVICES`` leaves to this process; where there is no
driver there are none. Their energy is counted by the device, whoever uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from typing import Any

import psutil

LIMIT = 120
NO_DEVICE = ("", "-1", "NoDevFiles")  # what CUDA_VISIBLE_DEVICES says of none


class Sampler:
    """Rows of ``system/*`` figures from when it is made to `stop`, ``interval`` seconds apart at first.

    Megabytes are 10^6 bytes, percentages of one processor for this process, of all for the machine.
    """

    def __init__(self, interval: float = 5.0) -> None:
        import pynvml

        self.rows: list[tuple[float, dict[str, float]]] = []  # seconds since the epoch, figures
        self._interval, self._process, self._nvml = interval, psutil.Process(), pynvml
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
        self._process.cpu_percent()  # counts from here to the first row
        psutil.cpu_percent()
        self._gpus: list[Any] = []
        with contextlib.suppress(pynvml.NVMLError):  # no driver: no figures of GPUs
            pynvml.nvmlInit()
            told = os.environ.get("CUDA_VISIBLE_DEVICES")  # as CUDA numbers them: positions, or UUIDs
            names = map(str, range(pynvml.nvmlDeviceGetCount())) if told is None else told.split(",")
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            used = [n for name in names if (n := name.strip()) not in NO_DEVICE]
            self._gpus = [by_index(int(n)) if n.isdigit() else by_uuid(n) for n in used]
        self._before = self._counters()
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Processor seconds and peak memory (bytes), of this process and its children that ended, and joules
        that the GPUs took, where they count them."""
        self._done.set()
        self._thread.join()
        now, before = self._counters(), self._before
        totals = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        return totals | {"system/peak_rss_bytes": max(usage.ru_maxrss for usage in _usage()) * 1024.0}

    def _counters(self) -> dict[str, float]:
        """What only grows; the GPUs count since their driver was loaded."""
        counters = {"system/cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in _usage())}
        with contextlib.suppress(self._nvml.NVMLError):
            if spent := [self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus]:
                counters["system/gpu_energy_joules"] = sum(spent) / 1e3
        return counters

    def _run(self) -> None:
        gauges = {
            "memory_mb": lambda gpu: self._nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6,
            "percent": lambda gpu: self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "watts": lambda gpu: self._nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        }
        while not self._done.wait(self._interval):
            row = {
                "system/cpu_percent": self._process.cpu_percent(),
                "system/rss_mb": self._process.memory_info().rss / 1e6,
                "system/machine_cpu_percent": psutil.cpu_percent(),
                "system/machine_memory_percent": psutil.virtual_memory().percent,
            }
            for (n, gpu), (name, read) in itertools.product(enumerate(self._gpus), gauges.items()):
                # One that is cut into parts (MIG) or cannot measure its power tells what it can.
                with contextlib.suppress(self._nvml.NVMLError):
                    row[f"system/gpu_{n}_{name}"] = read(gpu)
            self.rows.append((time.time(), row))
            if len(self.rows) == LIMIT:
                self.rows = self.rows[1::2]
                self._interval *= 2


def _usage() -> list[resource.struct_rusage]:
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
