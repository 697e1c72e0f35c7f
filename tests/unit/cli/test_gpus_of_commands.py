"""Each command that computes takes GPUs by its run's `resources.gpus`, and none with `gpus: 0`."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner

from spider.checkpoints.load import Checkpoint
from spider.cli import cli
from spider.processes.gpus import VISIBLE
from tests.unit.processes.test_gpus import made  # noqa: F401 (fixture)
from tests.unit.small_training import DEFAULTS, MODEL

COMMANDS = [
    "warmup r/a",
    "train r/a",
    "train r/a --processes 2",
    "train r/a lr=2e-3",
    "evaluate r/a",
    "evaluate r/a --compressed",
    "evaluate --model foreign r/a",
    "sample r/a",
    "compress r/a",
    "verify r",
    "generate model",
    "chat model",
    "boundaries model text",
]


@pytest.fixture(params=[0, 1, 2])
def gpus(request, made):  # noqa: F811
    """Return the GPUs that a run requests, on a machine with two; the configuration is in this folder."""
    run = {"data": "toy", "model": MODEL, "resources": {"gpus": request.param}}
    stages = [{"name": "a"}]
    plain = {"datasets": {"toy": {"source": {"kind": "pydocs"}}}}
    plain["runs"] = {"r": {**run, "defaults": DEFAULTS, "stages": stages}}
    Path("config.yaml").write_text(yaml.safe_dump(plain))
    Path("text").write_text("a text")
    return request.param


class Reached(Exception):
    """The command has its GPUs and begins to use torch."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_sees_what_it_takes(monkeypatch, gpus, command):
    found = []

    def require_gpus(asked):
        found.append((asked, os.environ[VISIBLE]))
        raise Reached

    monkeypatch.setattr("spider.processes.device.require_gpus", require_gpus)
    monkeypatch.setattr("spider.processes.launch.require_gpus", require_gpus)
    manifest = SimpleNamespace(run="r-0123abcd", window=8, conversations="toy")  # of `train r/a lr=2e-3`
    monkeypatch.setattr(Checkpoint, "at", lambda path: SimpleNamespace(manifest=manifest))
    assert isinstance(CliRunner().invoke(cli, command.split()).exception, Reached)
    several = "--processes" in command
    assert found == [(gpus, ["", "0", "0,1" if several else "0"][gpus])]
    assert VISIBLE not in os.environ


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_model_of_another_configuration_gets_a_gpu_if_there_is_one(monkeypatch, gpus, made):  # noqa: F811
    found = []
    monkeypatch.setattr("spider.processes.device.require_gpus", found.append)
    manifest = SimpleNamespace(run="other", window=8, conversations=None)
    computed = SimpleNamespace(manifest=manifest, model=lambda device: found.append(os.environ[VISIBLE]))
    monkeypatch.setattr(Checkpoint, "at", lambda path: computed)
    for number, config, expected in (
        (2, "config.yaml", [2, "0"]),
        (0, "config.yaml", [0, ""]),
        (2, "none", [2, "0"]),
    ):
        made(number)
        CliRunner().invoke(cli, ["--config", config, "generate", "model"])
        assert found == expected
        found.clear()


#: What commands import before they take their GPUs.
IMPORTED = ["checkpoints.load", "evaluation.evaluate", "evaluation.generate", "verify.score"]
IMPORTED += ["checkpoints.compress.pipeline", "processes.launch", "training.stage", "training.warmup"]

#: Imports modules, and ends if one of them asks torch for GPUs.
IMPORTS = """
import importlib, sys, torch
for name in ("is_available", "device_count", "init", "current_device"):
    setattr(torch.cuda, name, lambda *given: sys.exit("asked"))
for name in sys.argv[1:]:
    importlib.import_module("spider." + name)
"""


def test_no_import_asks_for_gpus_before_a_command_has_taken_its_own():
    """CUDA reads its variable when it is first asked, and ignores later values."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, *IMPORTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
