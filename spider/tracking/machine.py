"""Sample the processor, the memory and the GPUs while a job runs.

A thread takes a row every few seconds and keeps fewer than `LIMIT` rows. When it has that many, it drops
every second row and doubles the interval. So the rows cover the whole job with bounded memory, and nothing is
written before the job ends.

NVML reads the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process; without a driver there are none. A
device counts the energy of all its processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from spider.processes.gpus import visible

LIMIT = 120


class Sampler:
    """Collect rows of ``system/*`` metrics until `stop`, at first every ``interval`` seconds.

    A megabyte is 10^6 bytes. The percentage of this process is of one processor, that of the machine of all.
    """

    def __init__(self, interval: float = 5.0) -> None:
        import pynvml

        self.rows: list[tuple[float, dict[str, float]]] = []  # seconds since the epoch, and metrics
        self._interval = interval
        self._process = psutil.Process()
        self._nvml = pynvml
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
        self._process.cpu_percent()  # starts the measurement of the first row
        psutil.cpu_percent()
        self._gpus: list[Any] = []
        with contextlib.suppress(pynvml.NVMLError):  # the driver is missing
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in visible().values()]
        self._before = self._counters()
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Stop, and return the totals: processor seconds, peak memory in bytes and joules of the GPUs.

        The first two are of this process and its ended children. GPUs without an energy counter have none.
        """
        self._done.set()
        self._thread.join()
        now = self._counters()
        totals = {name: now[name] - self._before[name] for name in now.keys() & self._before.keys()}
        return totals | {"system/peak_rss_bytes": max(usage.ru_maxrss for usage in _usage()) * 1024.0}

    def _counters(self) -> dict[str, float]:
        """Return the counters that only grow; GPUs count from the time when their driver was loaded."""
        counters = {"system/cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in _usage())}
        with contextlib.suppress(self._nvml.NVMLError):
            millijoules = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus]
            if millijoules:
                counters["system/gpu_energy_joules"] = sum(millijoules) / 1e3
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
                # A GPU in parts (MIG) or without a power meter lacks some of these metrics.
                with contextlib.suppress(self._nvml.NVMLError):
                    row[f"system/gpu_{n}_{name}"] = read(gpu)
            self.rows.append((time.time(), row))
            if len(self.rows) == LIMIT:
                self.rows = self.rows[1::2]
                self._interval *= 2


def _usage() -> list[resource.struct_rusage]:
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


@functools.cache
def processor() -> str:
    """Return the name of the processor, such as ``AMD EPYC 9R14``."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def threads() -> int:
    """Return the number of threads that this process computes with."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else len(os.sched_getaffinity(0))
