"""Reports of a running training: rows, lines, and the bar on a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import termios
from pathlib import Path

import pytest
import torch

from spider.checkpoints.metrics import MetricsLog, read_rows
from spider.common.files import read_json
from spider.model import build_model
from spider.training import telemetry
from spider.training.stage import train
from spider.training.state import Means
from spider.training.telemetry import Telemetry, Window, line, peak_flops
from tests.forkserver import python
from tests.unit.training.outcomes import rows

REPO = Path(__file__).parents[3]
CPU = torch.device("cpu")
WINDOW = Window(steps=4, tokens=1000, seconds=2.0, waited=0.5)


def make_row(precision="fp32", means=(("loss", 2.0), ("grad_norm", 0.5)), skipped=0, pauses=0.0):
    telemetry = Telemetry(CPU, precision, flops_per_token=1e6)
    now = {"epoch": 0.125, "tokens": 1_234_567, "seconds": 65.2, "lr": 1e-3, "skipped_steps": skipped}
    return telemetry.row(dict(means), now, dataclasses.replace(WINDOW, pauses=pauses), 10)


def test_rates_count_only_the_steps_of_the_window():
    row = make_row()
    assert row["train/bytes_per_second"] == 500
    assert row["train/data_wait_share"] == 0.25
    assert row["train/step_seconds"] == 0.5
    assert row["train/eta_seconds"] == 5  # of ten steps
    assert make_row(pauses=0.25)["train/eta_seconds"] == 10 * (0.5 + 0.25)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_the_data_sheets_or_unknown(device, peak):
    assert peak_flops(device, "bf16") == peak
    assert peak_flops(device, "fp8") == (peak and 2 * peak)
    assert peak_flops(device, "fp32") is None


def test_mfu_is_the_models_flops_over_the_peak_or_unknown(caplog, monkeypatch):
    caplog.set_level("INFO")
    row = make_row()
    assert "train/mfu" not in row and "mfu" not in line(row, 10, 20, {})
    monkeypatch.setattr(telemetry, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    row = make_row("bf16")
    assert row["train/mfu"] == pytest.approx(500 * 1e6 / 989e12)
    assert "mfu 41.2%" in line({**row, "train/mfu": 0.412}, 10, 20, {})
    assert caplog.messages == [
        "mfu: unknown, the peak FLOP/s of fp32 on cpu is not on record",
        "mfu: of 989 TFLOP/s, dense bf16 by the data sheet of NVIDIA H100 80GB HBM3",
    ]


def test_skipped_updates_are_logged_and_an_interval_without_updates_has_a_line():
    assert "skipped" not in line(make_row(), 10, 20, {})
    row = make_row(means=(), skipped=10)
    assert "train/bpb" not in row
    begins = "step 10/20 | epoch 0.125  1.23M tokens | lr 1.00e-03 | fp32  500 bytes/s  0.5 s/step  data"
    assert line(row, 10, 20, {}).startswith(begins)
    assert line(row, 10, 20, {}).endswith(" | 50.0% done  time 0:01:05  eta 0:00:05")
    assert "10 steps skipped" in line(row, 10, 20, {})


def test_the_log_names_model_batch_and_checkpoints_and_each_line_shows_the_row(
    tmp_path, make_spec, shards, caplog, capfd
):
    caplog.set_level("INFO")
    spec = make_spec(max_steps=6, grad_accum=2, ckpt_every=6)
    train(spec, tmp_path, shards)
    row = read_rows(tmp_path / "metrics.jsonl")[-1].metrics
    assert set(row) >= PARTS and row["train/muon_lr"] == 4 * row["train/lr"]
    (said,) = [m for m in caplog.messages if m.startswith("step 6/6")]
    for figure in (
        f"bpb {row['train/bpb']:.3f}  loss {row['train/loss']:.3f}",
        f"lr {row['train/lr']:.2e}  muon {row['train/muon_lr']:.2e}  grad {row['train/grad_norm']:.3g}",
        f"| fp32  {row['train/bytes_per_second']:,.0f} bytes/s  {row['train/step_seconds']:.3g} s/step  data",
        f"ram {row['system/rss_mb']:,.0f} MB",
        f"{row['train/bytes_per_patch']:.2f} bytes/patch",
        f"fullest expert {row['train/moe_load_max']:.2f}x its share",
        f"depth {row['train/halt_depth']:.2f} loops",
        "eta 0:00:00",
    ):
        assert figure in said
    path = tmp_path / "checkpoints/step-00000006"
    text = caplog.text
    for message in (
        f"parameters: {build_model(spec.model).num_parameters():,} (",
        "optimizer: muon, lr 0.003, 0.012 for matrices, weight decay 0.1",
        "batch: 256 tokens a step, 8 windows of 32 (2 micro-batches of 4 on 1 process)",
        "attention: SDPA with a mask within windows and documents, SDPA elsewhere",
        "checkpoints: every 6 steps",
        "training from step 0 to step 6",
        f"checkpoint saved: {path}, {sum(file.stat().st_size for file in path.iterdir()) / 1e6:.1f} MB, ",
    ):
        assert message in text
    assert "\r" not in capfd.readouterr().err, "there is no bar without a terminal"


def test_epoch_and_tokens_continue_through_the_stages_of_a_run(tmp_path, make_spec, shards):
    """A step of the small training takes 4 windows of 32 tokens; a dense model has no metrics of experts."""
    for stage, parent in (("a", None), ("b", tmp_path / "a/train.json")):
        spec = make_spec(stage, model=DENSE, optimizer="adamw", max_steps=6)
        train(spec, tmp_path / stage, shards, previous=parent)
    windows = -(-read_json(shards / "metadata.json")["splits"]["train"]["tokens"] // 32)
    found = [row for stage in "ab" for row in rows(tmp_path / stage)]
    assert [row["step"] for row in found] == [3, 6, 9, 12]
    for row in found:
        assert row["metrics"]["train/tokens"] == row["step"] * 4 * 32
        assert row["metrics"]["train/epoch"] == pytest.approx(row["step"] * 4 / windows, rel=1e-12)
        assert row["metrics"]["train/precision_bits"] == 32 and not PARTS & set(row["metrics"])


_CHILD = """
import json, logging, sys
from pathlib import Path
import torch
from spider.config import StageSpec
from spider.training.stage import train
file = logging.FileHandler(sys.argv[2])
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[logging.StreamHandler(), file])
torch.set_num_threads(1)
spec, folder, data = json.loads(sys.argv[1])
warn = lambda step: logging.warning("attention") if step == 4 else None
train(StageSpec.model_validate(spec), Path(folder), Path(data), on_step=warn)
"""


def test_on_a_terminal_a_bar_replaces_the_lines_which_stay_in_the_log_file(tmp_path, make_spec, shards):
    spec = make_spec(model=DENSE, max_steps=6).model_dump(mode="json")
    arguments = json.dumps([spec, str(tmp_path / "stage"), str(shards)])
    command = [python(), "-c", _CHILD, arguments, str(tmp_path / "train.log")]
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 120))
    process = subprocess.Popen(command, cwd=REPO, stderr=there)
    os.close(there)
    shown = b""
    while True:
        try:
            piece = os.read(here, 4096)
        except OSError:  # the terminal is closed
            break
        if not piece:
            break
        shown += piece
    os.close(here)
    assert process.wait() == 0
    screen = shown.decode()
    assert "6/6" in screen and "bytes/s" in screen and "  data wait" not in screen
    assert re.search(r"\rattention\s*\r?\n", re.sub(r"\x1b\[\w", "", screen).replace(" \r", "\r"))
    lines = (tmp_path / "train.log").read_text()
    assert re.findall(r"^step \d/6", lines, re.M) == ["step 3/6", "step 6/6"] and "attention" in lines


DENSE = {
    "boundary": {"kind": "none"},
    "moe": None,
    "engram": {"layers": [], "byte_orders": []},
    "recurrence": {"loops": 1, "lora_rank": 0},
}


PARTS = {"train/bytes_per_patch", "train/moe_load_max", "train/moe_load_entropy", "train/muon_lr"}


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_logged_rows_are_not_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ((10, 20), (20, 30)):
        log = MetricsLog(path)
        for step in steps:
            log.write(step, {"train/loss": 1.0})
    assert steps_in(path) == [10, 20, 30]


@pytest.mark.parametrize("tail", [b'{"step": 30, "ti', b'{"step": 30}', b"\0\0\0\0"])
def test_a_torn_last_line_is_dropped_and_written_again(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(10, {"train/loss": 1.0})
    log.write(20, {"train/loss": 0.5})
    path.write_bytes(path.read_bytes() + tail)
    log = MetricsLog(path)
    assert log.last == 20
    log.write(30, {"train/loss": 0.25})
    assert steps_in(path) == [10, 20, 30]


FINITE = torch.tensor(True)


def test_means_are_exact_through_a_checkpoint():
    torch.manual_seed(0)
    values = [{"loss": torch.randn(()), "depth": torch.randn((), dtype=torch.float64)} for _ in range(7)]
    whole, first = Means(), Means()
    for value in values:
        whole.add(value, FINITE)
    for value in values[:3]:
        first.add(value, FINITE)
    rest = Means.restore(json.loads(json.dumps(first.plain())), torch.device("cpu"))
    for value in values[3:]:
        rest.add(value, FINITE)
    rest.add({"loss": torch.tensor(torch.nan), "depth": torch.tensor(1.0)}, ~FINITE)
    assert rest.read() == whole.read()
    assert whole.read()["loss"] == pytest.approx(sum(v["loss"].item() for v in values) / 7)
    assert Means().read() == {}
    skipped = Means()
    skipped.add({"loss": torch.tensor(torch.inf)}, ~FINITE)
    assert skipped.read() == {} and skipped.plain()["count"] == 0
