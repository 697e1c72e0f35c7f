"""Configurations of trainings, and the first steps of one.

A configuration is that of a preset or of `gpt.yaml`, changed as a row says. It is taken from the tree that is
measured, which may be another checkout (``GPU_TREE``) than that of these scripts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nodevice
import yaml
from bundle import FOLDER, TREE
from texts import text_for

from spider.config import Config, StageSpec, load_config, merged
from spider.training import stage

BF16 = {"precision": "bf16", "compile": True}
#: The shape of the original's headline figure, and a preset of nanochat's.
HEADLINE = {"micro_batch": 112, "seq_len": 256, "grad_accum": 4, "n_loops": 6}
PATHS = {"headline": TREE / "presets/spider-1b.yaml", "gpt-d12": Path(__file__).with_name("gpt.yaml")}
#: A stage that never ends and never saves.
ENDLESS = {**dict.fromkeys(("max_steps", "ckpt_every", "log_every"), 10**6), "schedule": "constant"}


def config_of(what: str, changes: dict[str, Any] | None = None, **settings: Any) -> Config:
    """Return a configuration of one run with one stage and without an n-gram index.

    Args:
        what: ``headline``, ``gpt-d12`` (that of `gpt.yaml`), or a preset's name.
        changes: merged into the run, which is compiled and in bf16.
        settings: of the stage (default: `ENDLESS`).

    Raises:
        SystemExit: there is no such preset.
    """
    path = PATHS.get(what, TREE / f"presets/{what}.yaml")
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise SystemExit(f"{what}: no preset; choose headline or one of {known}")
    raw = yaml.safe_load(path.read_text())
    name, run = next(iter(raw["runs"].items()))
    if isinstance(run["model"], str):
        run["model"] = {"preset": run["model"]}
    run["model"]["ngram"] = None
    run.pop("evaluation", None)
    changes = merged({**BF16, "defaults": HEADLINE} if what == "headline" else BF16, changes or {})
    if "grad_accum" in changes.get("defaults", {}):  # in place of a shape that the device would decide
        run["defaults"].pop("windows_per_step", None)
    run = merged(run, changes)
    run["stages"] = [{"name": "steps", "ckpt_minutes": None, **(settings or ENDLESS)}]
    return load_config(raw | {"runs": {name: run}})


def spec_of(config: Config) -> StageSpec:
    """Return the one stage of `config_of`."""
    return config.stage(next(iter(config.runs)), "steps")


def train(spec: StageSpec, steps: int, on_step: Callable[[int], None]) -> None:
    """Train the first steps of a stage; ``on_step`` is called after each."""

    class Enough(Exception):
        pass

    def after(number: int) -> None:
        on_step(number)
        if number == steps:
            raise Enough

    if nodevice.ACTIVE:
        nodevice.pretend()
    folder = FOLDER / "work/steps"
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(Enough):
        stage.train(spec, folder, text_for(spec), on_step=after)
    shutil.rmtree(folder, ignore_errors=True)
