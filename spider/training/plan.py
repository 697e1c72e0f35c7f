"""Training by hand: a stage of the configuration with some of its settings given on the spot.

Settings come, under the seeds' names, from the command line, else from the environment, else from the
configuration. What they make of it is validated as a configuration again, so a flag can ask for nothing that
a file could not, and the messages are the same.

A stage as the configuration has it trains where the workflow would train it. Any other training is a run of
its own, ``{run}-{digest of what differs}``, beside the configuration's in the results folder: the workflow
never finds its own checkpoints replaced by an experiment's, and the same command goes on with the same
experiment. Only ``ckpt_dir`` puts it elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.checkpoints.load import locate
from spider.config import Config, ConfigError, StageSpec, load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata, load_metadata
from spider.files import digest, replacing
from spider.results import Results

#: The command line's names of settings that a stage has (``target_tokens`` is its ``tokens``), and a run.
STAGE_SETTINGS = (
    "seq_len",
    "micro_batch",
    "grad_accum",
    "n_loops",
    "lr",
    "max_steps",
    "target_tokens",
    "ckpt_every",
)
RUN_SETTINGS = ("precision", "fp8_recipe", "parallel", "compile", "kernels")

MOCK = "mock"
_MOCK_DOCUMENTS = 2000
_MOCK_WORDS = (
    "time",
    "way",
    "day",
    "thing",
    "world",
    "life",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "point",
)


@dataclass(frozen=True)
class Places:
    """What a training starts from and where it happens, as far as the command line says."""

    data_dir: Path | None = None
    """Encoded shards to train on."""
    mock_data: bool = False
    """Train on made-up text, made in the folder of the training."""
    resume: Path | None = None
    """Checkpoint, stage folder, receipt or exported folder to start from."""
    reset_steps: bool = False
    """Of that, the weights only."""
    ckpt_dir: Path | None = None
    """Folder of the training."""


@dataclass(frozen=True)
class Job:
    """One training, ready to start."""

    spec: StageSpec
    folder: Path
    data: Path
    previous: Path | None
    """Receipt of the stage before, where the stage starts from it."""
    resume: Path | None
    """Checkpoint to start from instead: found once, because finding the newest good one reads it whole."""
    warmup: Path
    """Where the measurements of a stage of this shape are, if they were made."""


def choose(config: Config, run: str | None, stage: str | None) -> tuple[str, str]:
    """The run and stage meant: where none is named, the configuration's only run, and a run's first stage.

    Raises:
        ConfigError: no run is named and there are several.
    """
    if run is None:
        if len(config.runs) > 1:
            raise ConfigError(f"which run? The configuration has several, name one: {', '.join(config.runs)}")
        run = next(iter(config.runs))
    return run, stage or config.run(run).stages[0].name


def override(config: Config, run: str, stage: str, given: Mapping[str, Any]) -> Config:
    """The configuration with these settings of one stage, by their names on the command line.

    ``max_steps`` 0 means no such limit, as the seeds had it.

    Raises:
        ConfigError: they do not go together, or with the rest of the configuration.
    """
    index = config.stage(run, stage).index
    plain = config.model_dump(mode="json", exclude_unset=True, exclude={"scaling"})  # no grids are left here
    its_run = plain["runs"][run]
    its_stage = its_run["stages"][index]
    for name in given.keys() & set(STAGE_SETTINGS):
        its_stage["tokens" if name == "target_tokens" else name] = given[name]
    if given.get("max_steps") == 0:
        its_stage["max_steps"] = None
    its_run |= {name: given[name] for name in RUN_SETTINGS if name in given}
    if given.get("no_gradient_checkpointing"):
        its_run["model"].setdefault("recurrence", {})["checkpointing"] = False
    return load_config(plain)


def plan(config: Config, run: str, stage: str, given: Mapping[str, Any], places: Places) -> Job:
    """Work out one training; makes the mock data if that is asked for, and nothing else.

    Raises:
        ConfigError: the settings make no sense, or the places contradict each other.
        ValueError: ``data_dir`` holds no encoded dataset.
        CheckpointError: there is no checkpoint at ``resume``.
    """
    _check(places)
    configured = config.stage(run, stage)
    spec = override(config, run, stage, given).stage(run, stage)
    results = Results(Path(config.results))
    data = results.shards(spec.data)
    if places.mock_data:
        spec = _on(spec, MOCK)
    elif places.data_dir is not None and places.data_dir.resolve() != data.resolve():
        data = places.data_dir
        spec = _on(spec, load_metadata(data)["dataset"])
    foreign = places.mock_data or data is places.data_dir
    warmup = results.warmup(run, spec.shape)
    before = config.run(run).stages[: spec.index]
    previous = results.stage(run, before[-1].name) / "train.json" if before else None
    if previous is not None and places.resume is None and not previous.exists():
        raise ConfigError(
            f"{run}/{stage}: starts from stage {before[-1].name}, which is not trained ({previous} is "
            "missing); train that first, or name with --resume what to start from"
        )

    if places.ckpt_dir is not None:
        folder = places.ckpt_dir
    else:
        if spec.identity != configured.identity or foreign or places.resume is not None:
            elsewhere = places.data_dir if foreign else None
            starts = [str(path.resolve()) if path else None for path in (elsewhere, places.resume)]
            mark = digest([spec.deciding(), *starts, places.reset_steps])[:8]
            spec = spec.model_copy(update={"run": f"{run}-{mark}"})
        folder = results.stage(spec.run, stage)
    resume = locate(places.resume) if places.resume is not None else None
    if resume is not None:
        _check_apart(resume, folder)
    if places.mock_data:
        data = folder / "mock_data"
        make_mock_data(data)
    return Job(spec, folder, data, None if resume else previous, resume, warmup)


def _check(places: Places) -> None:
    if places.mock_data and places.data_dir is not None:
        raise ConfigError("give --mock_data or --data_dir, not both")
    if places.reset_steps and places.resume is None:
        raise ConfigError("--reset_steps: needs --resume, it says what to take from there")
    if places.resume is not None and places.resume.suffix == ".pt":
        raise ConfigError(
            f"--resume {places.resume}: bring it into a folder first (spider checkpoint import "
            f"{places.resume} FOLDER), then --resume FOLDER"
        )


def _check_apart(start: Path, folder: Path) -> None:
    if start.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--resume {start}: lies in the folder that is trained in, {folder}. Leave --resume out to go on "
            "with that training, or name another folder with --ckpt_dir to begin another from there"
        )


def _on(spec: StageSpec, data: str) -> StageSpec:
    """The stage on shards that the configuration does not know."""
    settings = spec.settings.model_copy(update={"data": data})
    return spec.model_copy(update={"data": data, "stream": None, "settings": settings})


def make_mock_data(folder: Path) -> None:
    """Encode a megabyte of made-up text into ``folder``, the same in every call; keep it if it is there."""
    if (folder / "metadata.json").exists():
        load_metadata(folder)
        return
    parquet = folder / "000.parquet"
    with replacing(parquet) as beside:
        texts = list(_mock_texts())
        pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(len(texts))]}), beside)
    encode_part(parquet, folder, "000")
    build_metadata(folder, MOCK, source={"kind": MOCK, "documents": _MOCK_DOCUMENTS}, parts=["000"])


def _mock_texts() -> Iterator[str]:
    """Sentences of common words, drawn so that some are far likelier than others, as in any language."""
    draw = random.Random(0)
    weights = [1 / rank for rank in range(1, len(_MOCK_WORDS) + 1)]
    for _ in range(_MOCK_DOCUMENTS):
        words = draw.choices(_MOCK_WORDS, weights, k=draw.randint(20, 200))
        yield " ".join(words).capitalize() + ".\n"
