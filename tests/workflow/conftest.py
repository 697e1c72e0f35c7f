"""Run the real Snakefile by the real `snakemake`, on a model and a text that are small enough for a test."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from spider.common.files import read_json
from tests.forkserver import python

ROOT = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"

#: Seconds after which a run of the workflow counts as hung.
PATIENCE = 500

#: Variables that set options of `spider train`. The jobs of a workflow must ignore them.
TRAIN_VARIABLES = {"LR": "0.5", "SEQ_LEN": "no number"}

SMALL = {
    "datasets": {"text": {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.1}},
    "runs": {
        "small": {
            "data": "text",
            "model": {
                "preset": "tiny",
                "hidden": 32,
                "prelude_layers": 1,
                "coda_layers": 1,
                "ffn_hidden": 32,
                "attention": {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16},
                "moe": {"experts": 2, "expert_hidden": 16, "shared_hidden": 16},
                "engram": {"layers": [0], "head_dim": 8, "table_size": 512},
                "recurrence": {"layers": 1, "loops": 2},
            },
            "precision": "fp32",
            "optimizer": {"kind": "muon"},
            "defaults": {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "log_every": 5, "ckpt_every": 10},
            "stages": [
                {"name": "first", "max_steps": 30, "schedule": "constant", "warmup_steps": 5},
                {"name": "second", "max_steps": 30, "schedule": "linear", "warmup_steps": 0},
            ],
            "evaluation": {"max_bytes": 4000, "loops_bytes": 500, "sample_bytes": 20, "checkpoints": 0},
            "resources": {"threads": 1},
        }
    },
}


def finished(
    process: subprocess.Popen[str], patience: float, waits_for: Callable[[], str] = lambda: ""
) -> tuple[str, int]:
    """Return what a Snakemake process printed, and its exit status. Kill it and its children if it hangs.

    Print once a minute what it waits for, which shows why a test hangs.
    """
    began = time.monotonic()
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=min(60.0, patience))
                return output, process.returncode
            except subprocess.TimeoutExpired:
                waited = time.monotonic() - began
                print(f"after {waited:.0f} s: {waits_for()}", flush=True)
                if waited >= patience:
                    raise
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = PATIENCE
) -> None:
    """Wait until a condition holds, while the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def text_of(log: Path) -> str:
    """Return the text of a log, or nothing while Snakemake deletes the log of the attempt before."""
    with contextlib.suppress(FileNotFoundError):
        return log.read_text()
    return ""


def jobs_in(output: str) -> dict[str, int]:
    """Return the jobs by rule that the output of a dry run lists."""
    lines = output.splitlines()
    if "Job stats:" not in lines:
        return {}
    table = lines[lines.index("Job stats:") + 3 :]
    rows = [line.split() for line in table[: table.index("")]]
    return {rule: int(count) for rule, count in rows if rule not in ("total", "all")}


class Workflow:
    """A folder with a configuration and a text, where the project's workflow runs."""

    #: Whether a run that is not killed is forked from a process that has made all imports.
    forked = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = copy.deepcopy(SMALL)
        if (folder / "text.jsonl").exists():  # In a copy, the text has to stay older than its outputs.
            return
        with open(folder / "text.jsonl", "w") as f:
            for i in range(200):
                text = f"Document {i} says: " + " ".join(str(i * j % 97) for j in range(40))
                f.write(json.dumps({"id": str(i), "text": text}) + "\n")

    @property
    def run(self) -> dict[str, Any]:
        return self.config["runs"]["small"]

    @property
    def results(self) -> Path:
        return self.folder / self.config.get("results", "results")

    def stage(self, name: str) -> Path:
        return self.results / "runs/small" / name

    def receipt(self, name: str) -> dict[str, Any]:
        return read_json(self.stage(name) / "train.json")

    def command(self, *arguments: str) -> list[str]:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        snakefile = ["--snakefile", str(ROOT / "Snakefile"), "--profile", str(ROOT / "profiles/default")]
        return [str(SNAKEMAKE), *snakefile, "--cores", "2", *arguments]

    def start(self, *arguments: str, forked: bool = False, **environment: str) -> subprocess.Popen[str]:
        """Start snakemake in a process group of its own, so that a test can kill all of it."""
        return subprocess.Popen(
            [python()] * forked + self.command(*arguments),
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(
        self, *arguments: str, fails: bool = False, patience: float = PATIENCE, **environment: str
    ) -> str:
        """Run Snakemake to its end and return its output, after checking that it succeeded (or failed).

        It is forked (`forkserver`), which is faster than starting it as a user does.
        """
        process = self.start(*arguments, forked=self.forked, **environment)
        output, status = finished(process, patience, self.waits_for)
        assert (status != 0) == fails, output
        return output

    def waits_for(self) -> str:
        """Return why the run has not ended yet."""
        return "still running"

    def planned(self, *targets: str) -> dict[str, int]:
        """Return the number of jobs by rule that a run would start now, without the targets themselves."""
        jobs = jobs_in(self("--dry-run", *targets))
        return {rule: count for rule, count in jobs.items() if rule not in targets}


def untracked(folder: Path) -> Workflow:
    """Return a workflow without tracking, which costs each job some seconds."""
    made = Workflow(folder)
    made.config["tracking"] = {"enabled": False}
    return made


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    """Return an untracked workflow in an empty folder."""
    return untracked(tmp_path)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder to copy. The first test that needs it makes it, in any process of this test session."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, making = root / name, root / f"{name}-making"
    with FileLock(root / f"{name}.lock"):
        if not folder.exists():
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and warm-up, and no training."""

    def make(folder: Path) -> None:
        untracked(folder)("--until", "index", "warmup")

    return made_once(tmp_path_factory, "prepared", make)


@pytest.fixture(scope="session")
def trained_folder(prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished workflow, which ran with environment variables that must not matter."""

    def make(folder: Path) -> None:
        shutil.copytree(prepared_folder, folder, dirs_exist_ok=True, symlinks=True)
        untracked(folder)(**TRAIN_VARIABLES)

    return made_once(tmp_path_factory, "trained", make)


@pytest.fixture
def prepared(prepared_folder: Path, tmp_path: Path) -> Workflow:
    """Return a copy of the folder with data and warm-up, whose next job is a training."""
    shutil.copytree(prepared_folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    return untracked(tmp_path)


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path) -> Workflow:
    """Return a copy of the folder of a finished workflow."""
    shutil.copytree(trained_folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    return untracked(tmp_path)
