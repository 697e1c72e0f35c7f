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
    totals = sampler.stop()  # before its rows are looked at: the thread may be thinning them
    return sampler.rows, totals


def test_what_a_busy_process_takes_is_seen():
    rows = [row for _, row in sampled(0.1, 1)[0]]
    assert 2 <= len(rows) <= 10
    assert max(row["system/cpu_percent"] for row in rows) > 5 and rows[0]["system/rss_mb"] > 10
    assert 0 < rows[0]["system/machine_memory_percent"] < 100
    assert max(row["system/machine_cpu_percent"] for row in rows) > 5


def test_a_long_job_is_covered_from_end_to_end_by_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(machine, "LIMIT", 8)
    began = time.time()
    rows, _ = sampled(0.02, 1.5)
    assert 3 <= len(rows) < 8
    assert rows[0][0] - began < 0.8 and time.time() - rows[-1][0] < 0.8
    assert [at for at, _ in rows] == sorted(at for at, _ in rows)


class FourGpus:
    """NVML as far as it is used here, of a machine with GPUs 0 to 3; this one has none. 100 W each."""

    NVMLError = pynvml.NVMLError

    def __init__(self):
        self.began = time.monotonic()
        for name, answer in {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: 4,
            "DeviceGetHandleByIndex": lambda n: n,
            "DeviceGetHandleByUUID": lambda name: {"GPU-b": 1}[name],
            "DeviceGetMemoryInfo": lambda n: SimpleNamespace(used=n * 1_000_000),
            "DeviceGetUtilizationRates": lambda n: SimpleNamespace(gpu=10 * n),
            "DeviceGetPowerUsage": self.no_power_meter,
            "DeviceGetTotalEnergyConsumption": lambda n: int(1e5 * (time.monotonic() - self.began)),
        }.items():
            setattr(self, f"nvml{name}", answer)

    def no_power_meter(self, n):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize("visible, used", [("3,GPU-b", [3, 1]), ("", []), (None, [0, 1, 2, 3])])
def test_the_gpus_of_this_process_are_read_and_their_energy_counted(monkeypatch, visible, used):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", FourGpus())
    rows, totals = sampled(0.1, 0.5)
    row, energy = rows[-1][1], totals.get("system/gpu_energy_joules")
    assert [row[f"system/gpu_{n}_memory_mb"] for n in range(len(used))] == used
    assert [row[f"system/gpu_{n}_percent"] for n in range(len(used))] == [10 * n for n in used]
    assert not any("watts" in name for name in row)
    assert energy is None if not used else energy == pytest.approx(50 * len(used), rel=0.5)


def test_figures_of_all_attempts_at_a_job_are_one_curve_each(results, store, in_workflow, monkeypatch):
    monkeypatch.setattr("spider.tracking.runs.Sampler", lambda: Sampler(0.3))
    for fails in (True, True, False):
        ends = pytest.raises(RuntimeError) if fails else nullcontext()
        with ends, job("train", "x", results=results) as running:
            running.metric("bytes", 7)
            time.sleep(1.1)
            if fails:
                raise RuntimeError("out of memory")
    assert sync(results).error is None  # the store was away until now
    there = store()
    run_id = there.find_run(running.identity, "Pipeline")
    assert there.client.get_run(run_id).info.status == "FINISHED"
    for key in ("seconds", "bytes", "system/cpu_seconds"):
        assert [m.step for m in there.client.get_metric_history(run_id, key)] == [0, 1, 2]
    memory = there.client.get_metric_history(run_id, "system/rss_mb")
    assert [m.step for m in memory] == sorted(m.step for m in memory) and memory[-1].step >= 3
