"""One training: where it happens and what it starts from, then from the lock on its folder to its receipt.

A stage as the configuration has it trains where the workflow would train it. Any other training is a run of
its own, ``{run}-{digest of what differs}``, beside the configuration's in the results folder: the workflow
never finds its own checkpoints replaced by an experiment's, and the same command goes on with the same
experiment. Only ``ckpt_dir`` puts it elsewhere.

What is half done goes on from its newest good checkpoint. What is finished is not trained again: the receipt
is a pure function of the final checkpoint's manifest, and is only written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from spider import files
from spider.checkpoints.claim import claim, hold
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Origin, Receipt
from spider.config import Config, ConfigError, StageSpec
from spider.data.metadata import load_metadata
from spider.errors import TrainingError
from spider.processes.stopping import StopSignals
from spider.processes.world import ALONE, World
from spider.results import Results, StageFolder
from spider.sources.mock import MOCK, make_mock_data
from spider.training.loop import Trainer


class Places(NamedTuple):
    """What a training starts from and where it happens: the options of these names of ``spider train``."""

    data_dir: Path | None = None
    mock_data: bool = False
    resume: Path | None = None
    reset_steps: bool = False
    ckpt_dir: Path | None = None


class Plan(NamedTuple):
    """One training, ready to start: what `train` is given."""

    spec: StageSpec
    folder: Path
    """``runs/{run}/{stage}``; checkpoints, metrics and the receipt ``train.json`` go there."""
    data: Path
    """``shards/{dataset}``."""
    previous: Path | None
    """Receipt of the stage before; its weights and optimizer state are where this one starts."""
    resume: Path | None
    """A checkpoint to start from instead; with this optimizer's state its step count goes on as well. It is
    looked for once, since finding the newest good one reads it whole."""
    reset_steps: bool
    """Of ``resume`` take the weights only."""
    warmup: Path | None
    """What was measured for this stage's shape."""
    indexes: tuple[Path, Path] | None
    """Folders of the index that it reads, and of that with the training text merged in, which all others
    read; None for a model without."""


def plan(config: Config, changed: Config, run: str, stage: str, places: Places) -> Plan:
    """Work out one training, of ``config`` as the file has it, ``changed`` by the settings given on the spot;
    makes the mock data if that is asked for, and nothing else.

    Raises:
        ConfigError: the places contradict each other, or the stage before is not trained.
        ValueError: ``data_dir`` holds no encoded dataset.
        CheckpointError: there is no checkpoint at ``resume``.
    """
    data_dir, mock_data, start, reset_steps, ckpt_dir = places
    if mock_data and data_dir:
        raise ConfigError("give --mock_data or --data_dir, not both")
    if reset_steps and not start:
        raise ConfigError("--reset_steps: needs --resume, it says what to take from there")
    spec, results = changed.stage(run, stage), Results(Path(config.results))
    data, elsewhere, unknown = results.shards(spec.data), None, MOCK if mock_data else None
    if data_dir is not None and data_dir.resolve() != data.resolve():
        data = elsewhere = data_dir
        unknown = load_metadata(data).dataset
    if unknown:  # to the configuration
        settings = spec.settings.model_copy(update={"data": unknown})
        spec = spec.model_copy(update={"data": unknown, "stream": None, "settings": settings})
    warmup = results.warmup(run, spec.shape)
    previous = None
    if spec.index and not start:
        before = config.run(run).stages[spec.index - 1].name
        previous = results.stage(run, before).receipt
        if not previous.exists():
            raise ConfigError(
                f"{run}/{stage}: starts from stage {before}, which is not trained ({previous} is missing); "
                "train that first, or name with --resume what to start from"
            )

    starts = [str(path.resolve()) if path else None for path in (elsewhere, start)]
    another = spec.identity != config.stage(run, stage).identity or any(starts) or mock_data
    if mock_data and spec.model.vocab_size is not None:
        raise ConfigError(
            "--mock_data: is of bytes, and this run reads a tokenizer's ids; train it on its own data"
        )
    if another and ckpt_dir is None:
        mark = files.digest([spec.identity, *starts, reset_steps])[:8]
        spec = spec.model_copy(update={"run": f"{run}-{mark}"})
    folder = ckpt_dir or results.stage(spec.run, stage).path
    resume = Checkpoint.at(start, quick=True).path if start else None
    if resume and resume.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--resume {resume}: lies in the folder that is trained in, {folder}. Leave --resume out to go "
            "on with that training, or name another folder with --ckpt_dir to begin another from there"
        )
    if mock_data:
        data = folder / "mock_data"
        make_mock_data(data, 0.5 if spec.model.ngram else 0.0)
    indexes = _index_folders(results, MOCK if mock_data else config.run(run).data, spec)
    if mock_data and indexes and spec.model.ngram:
        from spider.ngram.store import build_indexes  # numba: half a second of each start

        build_indexes(data, spec.model.ngram, *indexes)
    warmup_there = warmup if warmup.exists() else None
    return Plan(spec, folder, data, previous, resume, reset_steps, warmup_there, indexes)


def _index_folders(results: Results, dataset: str, spec: StageSpec) -> tuple[Path, Path] | None:
    """Where the indexes of a dataset lie that a stage's model reads, if it reads any."""
    if spec.model.ngram is None:
        return None
    named = dataset, spec.model.ngram.counted
    return results.ngram(*named, "split"), results.ngram(*named, "full")


def train(
    spec: StageSpec,
    folder: Path,
    data: Path,
    *,
    previous: Path | None = None,
    resume: Path | None = None,
    reset_steps: bool = False,
    warmup: Path | None = None,
    indexes: tuple[Path, Path] | None = None,
    on_step: Callable[[int], None] | None = None,
    world: World = ALONE,
) -> Receipt:
    """Train one stage, or go on with it, or, if it is finished, write its receipt again.

    Args:
        resume: as in `Plan`, or anything that `Checkpoint.at` takes.
        on_step: called after every step (and its checkpoint) with the number of steps done in this stage.
        world: the processes that train it together; each calls this with the same arguments.

    Raises:
        TrainingError: cannot start or go on; says why and what to do.
        CheckpointError: a checkpoint could not be written, or ``previous`` or ``resume`` could not be read.
        Preempted: a signal asked to stop; everything is saved, run again to go on.
        Ended: another of several processes raised one of these.
    """
    if spec.index and previous is None and resume is None:
        raise TrainingError(
            f"{spec.run}/{spec.stage}: needs the receipt of the stage before (it is stage {spec.index})"
        )
    with contextlib.ExitStack() as held, StopSignals() as stop:
        world.from_first(lambda: held.enter_context(hold(folder)))
        origin = {"data_digest": data_digest(spec, data), "parent_weights": None}
        read = None
        if spec.model.ngram is not None:
            from spider.ngram.store import open_index

            assert indexes is not None, "planned with the rest"
            read = split, full = open_index(indexes[0]), open_index(indexes[1])
            for one, splits in ((split, ["ngram"]), (full, ["ngram", "train"])):
                one.check(origin["data_digest"], splits)
            origin |= {"ngram": split.description.digest, "full_index": full.description.digest}
        if resume is not None:
            origin["parent_weights"] = Checkpoint.at(resume, quick=True).manifest.weights
            origin["resumed"] = "weights" if reset_steps else "training"
        elif previous is not None:
            origin["parent_weights"] = Receipt.read(previous).weights
        if chats := _conversations(spec, data, resume or previous):
            origin["conversations"] = chats
        try:
            fields = {**spec.deciding(), **origin}
            own = Origin(format=Origin.FORMAT, identity=spec.identity, fields=fields)
            good = world.from_first(lambda: claim(folder, own))
            if good is None or not good.training.final:
                parent = resume or previous
                trainer = Trainer(spec, folder, data, origin, parent, good, warmup, world, read)
                good = trainer.run(stop, on_step)

            def finish() -> Receipt:
                assert good is not None, "the first process holds what it saved"
                receipt = Receipt.of(good.training, good.path.relative_to(folder).as_posix())
                return receipt.write(StageFolder(folder).receipt)

            return world.from_first(finish)
        except OSError as error:
            raise TrainingError(
                f"{error.filename or folder}: {error.strerror or error}; what was saved is intact, run again"
            ) from error


def _conversations(spec: StageSpec, data: Path, start: Path | None) -> str | None:
    """The dataset of conversations that is trained on, or, else, was before."""
    if spec.stream is None and load_metadata(data).written_as == "chat":
        return spec.data
    return Checkpoint.at(start, quick=True).manifest.conversations if start else None


def data_digest(spec: StageSpec, data: Path) -> str:
    """What the training data is known by: its index, or, of a stream, its definition."""
    return load_metadata(data).digest if spec.stream is None else files.digest(spec.stream.changed())
