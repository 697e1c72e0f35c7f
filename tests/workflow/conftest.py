"""Real `snakemake` runs of the real Snakefile, on a model and a text small enough for a test."""

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

from spider.files import read_json

from .forked import run_snakemake

ROOT = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"

#: Seconds after which a workflow run is taken to hang.
PATIENCE = 500

#: Of the command line's settings; no job of a workflow may heed them.
SEEDS_VARIABLES = {"LR": "0.5", "SEQ_LEN": "no number"}

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
                "engram": {"layers": [0], "orders": [3], "heads": 2, "head_dim": 8, "table_size": 512},
                "recurrence": {"layers": 1, "loops": 2},
            },
            "precision": "fp32",
            "optimizer": {"kind": "muon"},
            "defaults": {"seq_len": 32, "micro_batch": 4, "lr": 1e-3, "log_every": 5, "ckpt_every": 10},
            "stages": [
                {"name": "first", "max_steps": 30, "schedule": "constant", "warmup_steps": 5},
                {"name": "second", "max_steps": 30, "schedule": "linear", "warmup_steps": 0},
            ],
            "evaluation": {"max_bytes": 4000, "loops_bytes": 500, "sample_bytes": 20},
            "resources": {"threads": 1},
        }
    },
}


def finished(
    process: subprocess.Popen[str], patience: float, waits_for: Callable[[], str] = lambda: ""
) -> tuple[str, int]:
    """What a snakemake printed and its exit status; if it hangs, it is killed with all that it started.

    Each minute it is printed what it waits for, so that a test that hangs says on what.
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


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Until it holds, while the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def said(log: Path) -> str:
    """What a log holds; nothing while Snakemake deletes that of the attempt before."""
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
    """A folder with a configuration and a text, in which the project's workflow is run."""

    #: Whether a run may be forked (`run_snakemake`).
    forked = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = copy.deepcopy(SMALL)
        if (folder / "text.jsonl").exists():  # a copy's is as old as what was made of it
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

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start snakemake in a process group of its own, so that a test can kill all of it."""
        return subprocess.Popen(
            self.command(*arguments),
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

        With variables of its own it starts as a user would start it. Else it is forked, which is quicker.
        """
        if environment or not self.forked:
            output, status = finished(self.start(*arguments, **environment), patience, self.waits_for)
        else:
            command = self.command(*arguments)
            output, status = run_snakemake(command, self.folder, dict(os.environ), patience)
        assert (status != 0) == fails, output
        return output

    def waits_for(self) -> str:
        """Why it is not done yet, as far as can be known."""
        return "still running"

    def planned(self, *targets: str) -> dict[str, int]:
        """Return the jobs by rule that a run would do now, without the parts of the workflow themselves."""
        jobs = jobs_in(self("--dry-run", *targets))
        return {rule: count for rule, count in jobs.items() if rule not in targets}


def untracked(folder: Path) -> Workflow:
    """Tracking is off, so that what is timed and killed is the pipeline alone."""
    made = Workflow(folder)
    made.config["tracking"] = {"enabled": False}
    return made


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    """A fresh folder."""
    return untracked(tmp_path)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder to be copied, made by the first that asks in any process of this run of the tests."""
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
    """All is done but the trainings."""

    def make(folder: Path) -> None:
        untracked(folder)("--until", "index", "warmup")

    return made_once(tmp_path_factory, "prepared", make)


@pytest.fixture(scope="session")
def trained_folder(prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All is done, beside variables of the environment that must not matter."""

    def make(folder: Path) -> None:
        shutil.copytree(prepared_folder, folder, dirs_exist_ok=True, symlinks=True)
        untracked(folder)(**SEEDS_VARIABLES)

    return made_once(tmp_path_factory, "trained", make)


@pytest.fixture
def prepared(prepared_folder: Path, tmp_path: Path) -> Workflow:
    """A copy of the folder in which all is done but the trainings: what a test is about begins at once."""
    shutil.copytree(prepared_folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    return untracked(tmp_path)


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path) -> Workflow:
    """A copy of the folder in which all is done."""
    shutil.copytree(trained_folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    return untracked(tmp_path)
