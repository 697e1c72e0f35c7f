"""Test the loss curve of a stage: bytes trained, missing values and smoothing."""

import json
import math

import numpy as np

from spider.checkpoints.metrics import read_rows
from spider.evaluation.records import Training
from spider.report.stages import Log, smoothed

RECEIPT = Training(steps=100, global_step=150, tokens=410_000, bytes=400_000, seconds=0)


def write(path, *rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def row(step, **metrics):
    return {"step": step, "time": 0.0, "metrics": metrics}


def log(rows, begin=0):
    return Log("demo", "main", rows, RECEIPT, begin)


def test_steps_become_bytes_trained_since_the_run_began(tmp_path):
    rows = [row(60, **{"train/bpb": 3.0}), row(150, **{"train/bpb": 2.0})]
    curve = log(read_rows(write(tmp_path / "m.jsonl", *rows)), begin=200_000)
    bytes_S, bpb_S = curve.points()
    np.testing.assert_allclose(bytes_S, [200_000 + 0.1 * 400_000, 600_000])
    np.testing.assert_allclose(bpb_S, [3.0, 2.0])
    assert (curve.begin, curve.end) == (200_000, 600_000)


def test_rows_of_other_stages_and_without_a_finite_loss_are_left_out(tmp_path):
    rows = [
        row(50, **{"train/bpb": 9.0}),
        row(70, **{"train/bpb": math.nan}),
        row(80, **{"system/rss": 1}),
        row(90, **{"train/bpb": 2.5}),
        row(151, **{"train/bpb": 9.0}),
    ]
    assert log(read_rows(write(tmp_path / "m.jsonl", *rows))).points()[1].tolist() == [2.5]


def test_smoothing_does_not_lag_and_keeps_the_ends():
    line = np.linspace(5, 2, 200)
    np.testing.assert_allclose(smoothed(line), line)
    noisy = line + np.random.default_rng(0).normal(0, 0.2, 200)
    assert np.abs(smoothed(noisy) - line)[10:-10].max() < 0.3 < np.abs(noisy - line).max()
