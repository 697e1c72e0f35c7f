"""Which training a command means: its stage as set, the folder it happens in, and what it starts from.

A stage as the configuration has it trains where the workflow would train it. Any other training is a run of
its own, ``{run}-{digest of what differs}``, beside the configuration's in the results folder: the workflow
never finds its own checkpoints replaced by an experiment's, and the same command goes on with the same
experiment. Only ``ckpt_dir`` puts it elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from spider.checkpoints.load import Checkpoint
from spider.config import Config, ConfigError, StageSpec
from spider.data.metadata import load_metadata
from spider.data.mock import MOCK, make_mock_data
from spider.files import digest
from spider.results import Results


class Places(NamedTuple):
    """What a training starts from and where it happens: the options of these names of ``spider train``."""

    data_dir: Path | None = None
    mock_data: bool = False
    resume: Path | None = None
    reset_steps: bool = False
    ckpt_dir: Path | None = None


class Plan(NamedTuple):
    """One training, ready to start: what `spider.training.stage.train` is given."""

    spec: StageSpec
    folder: Path
    data: Path
    previous: Path | None
    resume: Path | None
    """A checkpoint: looked for once, since finding the newest good one reads it whole."""
    reset_steps: bool
    warmup: Path | None


def plan(config: Config, changed: Config, run: str, stage: str, places: Places) -> Plan:
    """Work out one training; makes the mock data if that is asked for, and nothing else.

    Args:
        config: as it is in the file.
        changed: with the settings that are given on the spot.

    Raises:
        ConfigError: the places contradict each other, or the stage before is not trained.
        ValueError: ``data_dir`` holds no encoded dataset.
        CheckpointError: there is no checkpoint at ``resume``.
    """
    _check(places)
    spec = changed.stage(run, stage)
    results = Results(Path(config.results))
    data, elsewhere = results.shards(spec.data), None
    if places.mock_data:
        spec = _on(spec, MOCK)
    elif places.data_dir is not None and places.data_dir.resolve() != data.resolve():
        data = elsewhere = places.data_dir
        spec = _on(spec, load_metadata(data).dataset)
    warmup = results.warmup(run, spec.shape)
    previous = None if places.resume else _receipt_before(config, results, run, spec)

    starts = [str(path.resolve()) if path else None for path in (elsewhere, places.resume)]
    another = spec.identity != config.stage(run, stage).identity or any(starts) or places.mock_data
    if another and places.ckpt_dir is None:
        mark = digest([spec.identity, *starts, places.reset_steps])[:8]
        spec = spec.model_copy(update={"run": f"{run}-{mark}"})
    folder = places.ckpt_dir or results.stage(spec.run, stage).path
    resume = Checkpoint.at(places.resume, quick=True).path if places.resume else None
    if resume and resume.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--resume {resume}: lies in the folder that is trained in, {folder}. Leave --resume out to go "
            "on with that training, or name another folder with --ckpt_dir to begin another from there"
        )
    if places.mock_data:
        data = folder / "mock_data"
        make_mock_data(data)
    measured = warmup if warmup.exists() else None
    return Plan(spec, folder, data, previous, resume, places.reset_steps, measured)


def _receipt_before(config: Config, results: Results, run: str, spec: StageSpec) -> Path | None:
    """The receipt of the stage before; of the first stage, None."""
    if spec.index == 0:
        return None
    before = config.run(run).stages[spec.index - 1].name
    receipt = results.stage(run, before).receipt
    if not receipt.exists():
        raise ConfigError(
            f"{run}/{spec.stage}: starts from stage {before}, which is not trained ({receipt} is missing); "
            "train that first, or name with --resume what to start from"
        )
    return receipt


def _check(places: Places) -> None:
    if places.mock_data and places.data_dir:
        raise ConfigError("give --mock_data or --data_dir, not both")
    if places.reset_steps and not places.resume:
        raise ConfigError("--reset_steps: needs --resume, it says what to take from there")
    if places.resume and places.resume.suffix == ".pt":
        raise ConfigError(
            f"--resume {places.resume}: bring it into a folder first (spider checkpoint import "
            f"{places.resume} FOLDER), then --resume FOLDER"
        )


def _on(spec: StageSpec, data: str) -> StageSpec:
    """The stage on shards that the configuration does not know."""
    settings = spec.settings.model_copy(update={"data": data})
    return spec.model_copy(update={"data": data, "stream": None, "settings": settings})
