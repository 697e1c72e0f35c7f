from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pynvml
import pytest

from spider.tracking import job, machine, sync
from spider.tracking.machine import Sampler


def sampled(interval, seconds):
    sampler = Sampler(interval)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(10_000))
    totals = sampler.stop()  # before reading its rows, because the thread may drop some
    return sampler.rows, totals


def test_a_busy_process_is_measured():
    rows = [row for _, row in sampled(0.1, 1)[0]]
    assert 2 <= len(rows) <= 10
    assert max(row["system/cpu_percent"] for row in rows) > 5 and rows[0]["system/rss_mb"] > 10
    assert 0 < rows[0]["system/machine_memory_percent"] < 100
    assert max(row["system/machine_cpu_percent"] for row in rows) > 5


def test_a_bounded_number_of_rows_covers_a_whole_long_job(monkeypatch):
    monkeypatch.setattr(machine, "LIMIT", 8)
    began = time.time()
    rows, _ = sampled(0.02, 1.5)
    assert 3 <= len(rows) < 8
    assert rows[0][0] - began < 0.8 and time.time() - rows[-1][0] < 0.8
    assert [at for at, _ in rows] == sorted(at for at, _ in rows)


class FourGpus:
    """The used part of NVML, for a machine with the GPUs 0 to 3, which take 100 W each."""

    NVMLError = pynvml.NVMLError

    def __init__(self):
        self.began = time.monotonic()
        for name, answer in {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: 4,
            "DeviceGetHandleByIndex": lambda n: n,
            "DeviceGetUUID": lambda n: f"GPU-{'abcd'[n]}",
            "DeviceGetHandleByUUID": lambda name: "abcd".index(name[-1]),
            "DeviceGetMigMode": self.not_supported,
            "DeviceGetMemoryInfo": lambda n: SimpleNamespace(used=n * 1_000_000),
            "DeviceGetUtilizationRates": lambda n: SimpleNamespace(gpu=10 * n),
            "DeviceGetPowerUsage": self.not_supported,
            "DeviceGetTotalEnergyConsumption": lambda n: int(1e5 * (time.monotonic() - self.began)),
        }.items():
            setattr(self, f"nvml{name}", answer)

    def not_supported(self, n):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize("visible, used", [("3,GPU-b", [3, 1]), ("", []), (None, [0, 1, 2, 3])])
def test_the_gpus_of_this_process_are_read_and_their_energy_counted(monkeypatch, visible, used):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", FourGpus())
    began = time.monotonic()
    rows, totals = sampled(0.1, 0.5)
    elapsed = time.monotonic() - began
    row, energy = rows[-1][1], totals.get("system/gpu_energy_joules")
    assert [row[f"system/gpu_{n}_memory_mb"] for n in range(len(used))] == used
    assert [row[f"system/gpu_{n}_percent"] for n in range(len(used))] == [10 * n for n in used]
    assert not any("watts" in name for name in row)
    assert energy is None if not used else 0.5 <= energy / 100 / len(used) <= elapsed


def test_the_metrics_of_all_attempts_at_a_job_are_one_curve(results, store, in_workflow, monkeypatch):
    monkeypatch.setattr("spider.tracking.runs.Sampler", lambda: Sampler(0.3))
    for fails in (True, True, False):
        ends = pytest.raises(RuntimeError) if fails else nullcontext()
        with ends, job("train", "x", results=results) as running:
            running.metric("bytes", 7)
            time.sleep(1.1)
            if fails:
                raise RuntimeError("out of memory")
    assert sync(results).error is None  # the first sync after all attempts
    connection = store()
    run_id = connection.find_run(running.identity, "Pipeline")
    assert connection.client.get_run(run_id).info.status == "FINISHED"
    for key in ("seconds", "bytes", "system/cpu_seconds"):
        assert [m.step for m in connection.client.get_metric_history(run_id, key)] == [0, 1, 2]
    memory = connection.client.get_metric_history(run_id, "system/rss_mb")
    assert [m.step for m in memory] == sorted(m.step for m in memory) and memory[-1].step >= 3
