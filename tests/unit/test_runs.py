"""The page of what presets reach: its rows, and which results it takes."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest


@pytest.fixture
def runs(gpu_benchmarks, tmp_path, monkeypatch):
    import runs

    monkeypatch.setattr(runs, "PAGE", tmp_path / "runs.md")
    monkeypatch.setattr(runs, "FIGURES", tmp_path / "runs.json")
    return runs


REACHED = {
    "preset": "smoke",
    "run": "small",
    "device": "CPU, 1 thread",
    "seconds": 61.5,
    "bytes": 1000,
    "curve": [[400, 3.0], [600, 2.0], [1000, 1.0]],
    "ppmd": 1.5,
    "memory": 10**9,
    "digest": "ab" * 32,
    "commit": "1234567890-dirty",
}


def test_the_page_has_a_row_for_each_run_and_says_which_presets_were_not_run(runs, monkeypatch):
    now = runs.digest(runs.read_yaml(runs.ROOT / "presets/smoke.yaml"))
    before = REACHED | {"run": "old", "configuration": "0", "text": "made-up text"}
    runs.FIGURES.write_text(json.dumps([REACHED | {"configuration": now}, before]))
    monkeypatch.setattr("sys.argv", ["runs.py"])
    runs.main()
    page = runs.PAGE.read_text().splitlines()
    row, old = (line for line in page if line.startswith("| `smoke`"))
    assert old.startswith("| `smoke` as it was, old (on made-up text) |")
    cells = [one.strip() for one in row.split("|")[1:-1]]
    assert cells[:7] == ["`smoke`, small", "CPU, 1 thread", "62 s", "1.00 kB", "", "2.500", "1.000"]
    assert cells[7][0] == "█" and cells[7][-1] == "▁"
    assert cells[8:] == ["1.500", "800 B", "1.00 GB", "`abababababab`, `12345678-dirty`"]
    assert sum("*not run*" in line for line in page) == len(runs.presets()) - 1


def test_a_curve_ends_at_the_score_of_its_stage(runs, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "time": 0, "metrics": {"val/bpb": bpb}} for step, bpb in ((12, 3.0), (14, 2.0))]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = SimpleNamespace(bytes=400, steps=4, global_step=14, bpb=1.9, text_sha256="whole", checkpoints=())
    folder = SimpleNamespace(metrics=metrics)
    assert runs.curve(folder, stage) == [(200, pytest.approx(2.9)), (400, 1.9)]
    for text, moved in (("whole", 0.0), ("part", -0.1)):
        scored = [
            SimpleNamespace(bytes=at, bpb=bpb, text_sha256=text) for at, bpb in ((100, 4.0), (400, 2.0))
        ]
        stage.checkpoints = scored
        assert runs.curve(folder, stage) == [(100, pytest.approx(4.0 + moved)), (400, 1.9)]


def test_results_of_a_changed_preset_are_refused(runs, tmp_path):
    shutil.copy(runs.ROOT / "presets/smoke.yaml", tmp_path / "config.yaml")
    assert runs.preset_of(tmp_path) == "smoke"
    with open(tmp_path / "config.yaml", "a") as file:
        file.write("strict_code: true\n")
    with pytest.raises(SystemExit, match="is none of presets/"):
        runs.preset_of(tmp_path)
