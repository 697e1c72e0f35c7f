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

from spider.common.files import read_json
from spider.model import build_model
from spider.training import telemetry
from spider.training.precision import Precision, eligible, fp8_layers
from spider.training.stage import train
from spider.training.telemetry import Telemetry, Window, line, peak_flops
from tests.forkserver import python
from tests.unit.training.outcomes import rows

REPO = Path(__file__).parents[3]
CPU = torch.device("cpu")
WINDOW = Window(steps=4, tokens=1000, seconds=2.0, waited=0.5)
DENSE = {
    "boundary": {"kind": "none"},
    "moe": None,
    "engram": {"layers": [], "byte_orders": []},
    "recurrence": {"loops": 1, "lora_rank": 0},
}
EVERYWHERE = {"loss", "bpb", "lr", "grad_norm", "bytes_per_second", "data_wait_share", "eta_seconds"}
EVERYWHERE |= {"epoch", "tokens", "precision_bits", "step_seconds", "seconds"}
PARTS = {"bytes_per_patch", "moe_load_max", "moe_load_entropy"}


def last_row(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]


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
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439e12),
        ("AMD Instinct MI250X", 191.5e12),
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


def test_mfu_is_the_models_flops_over_the_peak_which_is_logged_once(caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(telemetry, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    row = make_row("bf16")
    assert row["train/mfu"] == pytest.approx(500 * 1e6 / 989e12)
    assert caplog.messages == ["mfu: of 989 TFLOP/s, dense bf16 by the data sheet of NVIDIA H100 80GB HBM3"]
    assert "mfu 41.2%" in line({**row, "train/mfu": 0.412}, 10, 20, {})


def test_an_unknown_peak_gives_an_unknown_mfu(caplog):
    caplog.set_level("INFO")
    row = make_row()
    assert "train/mfu" not in row
    assert caplog.messages == ["mfu: unknown, the peak FLOP/s of fp32 on cpu is not on record"]
    assert "mfu" not in line(row, 10, 20, {})


def test_skipped_updates_are_logged_and_an_interval_without_updates_has_a_line():
    assert "skipped" not in line(make_row(), 10, 20, {})
    row = make_row(means=(), skipped=10)
    assert "train/bpb" not in row
    begins = "step 10/20 | epoch 0.125  1.23M tokens | lr 1.00e-03 | fp32  500 bytes/s  0.5 s/step  data"
    assert line(row, 10, 20, {}).startswith(begins)
    assert line(row, 10, 20, {}).endswith(" | 50.0% done  time 0:01:05  eta 0:00:05")
    assert "10 steps skipped" in line(row, 10, 20, {})


def test_a_model_with_every_part_logs_every_metric(tmp_path, make_spec, shards, caplog):
    caplog.set_level("INFO")
    train(make_spec(max_steps=6), tmp_path, shards)
    row = last_row(tmp_path)
    assert {f"train/{name}" for name in EVERYWHERE | PARTS | {"muon_lr"}} <= set(row)
    assert row["train/muon_lr"] == 4 * row["train/lr"]
    assert row["system/rss_mb"] > 50 and 1 <= row["train/halt_depth"] <= 2
    lines = [m for m in caplog.messages if m.startswith("step 6/6")]
    assert len(lines) == 1
    for figure in (
        f"bpb {row['train/bpb']:.3f}  loss {row['train/loss']:.3f}",
        f"lr {row['train/lr']:.2e}  muon {row['train/muon_lr']:.2e}  grad {row['train/grad_norm']:.3g}",
        f"| fp32  {row['train/bytes_per_second']:,.0f} bytes/s  "
        f"{row['train/step_seconds']:.3g} s/step  data wait {row['train/data_wait_share']:.1%}",
        f"ram {row['system/rss_mb']:,.0f} MB",
        f"{row['train/bytes_per_patch']:.2f} bytes/patch",
        f"fullest expert {row['train/moe_load_max']:.2f}x its share",
        f"depth {row['train/halt_depth']:.2f} loops",
        "eta 0:00:00",
    ):
        assert figure in lines[0]


def test_a_dense_model_logs_no_metrics_of_missing_parts(tmp_path, make_spec, shards, caplog):
    caplog.set_level("INFO")
    train(make_spec(model=DENSE, optimizer="adamw", max_steps=3), tmp_path, shards)
    row = last_row(tmp_path)
    assert {f"train/{name}" for name in EVERYWHERE} <= set(row)
    assert not {f"train/{name}" for name in PARTS | {"muon_lr"}} & set(row)
    (said,) = (m for m in caplog.messages if m.startswith("step 3/3"))
    assert re.fullmatch(
        r"step 3/3 \| epoch [\d.]+  384 tokens \| bpb [\d.]+  loss [\d.]+ \| lr \S+  grad \S+ "
        r"\| fp32  [\d,]+ bytes/s  \S+ s/step  "
        r"data wait [\d.]+% \| ram [\d,]+ MB \| depth 1.00 loops "
        r"\| 100.0% done  time \d:\d\d:\d\d  eta \d:\d\d:\d\d",
        said,
    )


def test_epoch_and_tokens_continue_through_the_stages_of_a_run(tmp_path, make_spec, shards):
    """A step of the small training takes 4 windows of 32 tokens."""
    for stage, parent in (("a", None), ("b", tmp_path / "a/train.json")):
        train(make_spec(stage, model=DENSE, max_steps=6), tmp_path / stage, shards, previous=parent)
    windows = -(-read_json(shards / "metadata.json")["splits"]["train"]["tokens"] // 32)
    found = [row for stage in "ab" for row in rows(tmp_path / stage)]
    assert [row["step"] for row in found] == [3, 6, 9, 12]
    for row in found:
        assert row["metrics"]["train/tokens"] == row["step"] * 4 * 32
        assert row["metrics"]["train/epoch"] == pytest.approx(row["step"] * 4 / windows, rel=1e-12)
        assert row["metrics"]["train/precision_bits"] == 32


def test_the_log_names_the_model_and_each_checkpoint(tmp_path, make_spec, shards, caplog):
    caplog.set_level("INFO")
    spec = make_spec(model=DENSE, max_steps=5, grad_accum=2)
    train(spec, tmp_path, shards)
    model = build_model(spec.model)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    (parameters,) = (m for m in caplog.messages if m.startswith("parameters: "))
    total, _, parts = parameters.removeprefix("parameters: ").partition(" (")
    by_part = [int(part.rpartition(" ")[2].replace(",", "")) for part in parts.strip(")").split("; ")]
    assert int(total.replace(",", "")) == sum(by_part) == sum(p.numel() for p in model.parameters())
    assert f"fp8: 0 of {linear} linear layers" in caplog.messages
    assert "optimizer: muon, lr 0.003, 0.012 for matrices, weight decay 0.1" in caplog.messages
    assert (
        "global batch: 256 tokens a step, 8 windows of 32 (2 micro-batches of 4 on 1 process)"
        in caplog.messages
    )
    assert "attention: SDPA with a mask within windows and documents, SDPA elsewhere" in caplog.messages
    assert "checkpoints: every 5 steps" in caplog.messages
    assert "training from step 0 to step 5" in caplog.messages
    path = tmp_path / "checkpoints/step-00000005"
    size = sum(file.stat().st_size for file in path.iterdir())
    (checkpoint,) = (m for m in caplog.messages if m.startswith("checkpoint saved: "))
    match = re.fullmatch(r"checkpoint saved: (.+), ([\d.]+) MB, ([\d.]+) s", checkpoint)
    assert match and match[1] == str(path) and float(match[2]) == pytest.approx(size / 1e6, abs=0.06)


def test_the_log_counts_the_layers_in_fp8(make_spec):
    model = build_model(make_spec().model)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    chosen = sorted(eligible(model))[:3]
    experts = sorted(model.fp8_parts().layers)
    layers = frozenset([*chosen, *experts[:1]])
    Precision("fp8", "a test", layers=layers).prepare(model, emulate=True)
    assert fp8_layers(model) == f"3 of {len(linear)} linear layers, 1 of {len(experts)} other layers"


# ------------------------------------------------------------------------------------ terminal or no terminal

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


def command(tmp_path, make_spec, shards):
    spec = make_spec(model=DENSE, max_steps=6).model_dump(mode="json")
    arguments = json.dumps([spec, str(tmp_path / "stage"), str(shards)])
    return [python(), "-c", _CHILD, arguments, str(tmp_path / "train.log")]


def test_without_a_terminal_the_log_has_lines_and_no_bar(tmp_path, make_spec, shards):
    said = subprocess.run(
        command(tmp_path, make_spec, shards), cwd=REPO, capture_output=True, text=True, check=True
    ).stderr
    assert said == (tmp_path / "train.log").read_text()
    assert "\r" not in said and "step/s" not in said
    assert re.findall(r"^(step \d/6) \| epoch|^(attention)$", said, re.M) == [
        ("step 3/6", ""),
        ("", "attention"),
        ("step 6/6", ""),
    ]


def test_on_a_terminal_a_bar_replaces_the_lines_which_stay_in_the_log_file(tmp_path, make_spec, shards):
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 120))
    process = subprocess.Popen(command(tmp_path, make_spec, shards), cwd=REPO, stderr=there)
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
