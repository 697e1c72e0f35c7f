"""One training: its folder and its start, then everything from the lock on the folder to the receipt.

A stage as the configuration defines it trains in the workflow's folder. Any other training is a run of its
own, ``{run}-{digest of the differences}``, in the same results folder. So an experiment never replaces the
workflow's checkpoints, and the same command resumes the same experiment. Only ``ckpt_dir`` sets the folder.

An unfinished training resumes from its newest good checkpoint. A finished one is not trained again: the
receipt is a pure function of the final checkpoint's manifest, and is only written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Origin, Receipt, Warmup
from spider.checkpoints.save import claim, hold
from spider.common import files
from spider.common.errors import TrainingError
from spider.common.results import Results, StageFolder
from spider.config import Config, ConfigError, StageSpec
from spider.data.shards import load_metadata
from spider.data.sources.mock import MOCK, make_mock_data
from spider.processes.shutdown import StopSignals
from spider.processes.world import ALONE, World
from spider.training.loop import Trainer
from spider.training.memory import fitted


class Places(NamedTuple):
    """Data, start and folder of a training: the options of these names of ``spider train``."""

    data_dir: Path | None = None
    mock_data: bool = False
    resume: Path | None = None
    reset_steps: bool = False
    ckpt_dir: Path | None = None


class Plan(NamedTuple):
    """The arguments of `train` for one training."""

    spec: StageSpec
    folder: Path
    """``runs/{run}/{stage}``; checkpoints, metrics and the receipt ``train.json`` go there."""
    data: Path
    """``shards/{dataset}``; for a stream with a tokenizer, the folder of that."""
    previous: Path | None
    """Receipt of the previous stage; this stage starts from its weights and optimizer state."""
    resume: Path | None
    """A checkpoint to start from instead. If it holds this optimizer's state, its step count continues."""
    reset_steps: bool
    """Take only the weights of ``resume``."""
    warmup: Path | None
    """Record of the warm-up for this stage's shape."""
    indexes: tuple[Path, Path] | None
    """Folders of the n-gram indexes without and with the training text; None for a model that reads none."""


def plan(config: Config, changed: Config, run: str, stage: str, options: Places) -> Plan:
    """Plan one training. The only thing that this writes is the mock data, if requested.

    Args:
        config: the configuration of the file.
        changed: the configuration with the command line's settings.

    Raises:
        ConfigError: the options contradict each other, or the stage before is not trained.
        ValueError: ``data_dir`` does not hold an encoded dataset.
        CheckpointError: ``resume`` does not lead to a checkpoint.
    """
    start, ckpt_dir = options.resume, options.ckpt_dir
    if options.mock_data and options.data_dir:
        raise ConfigError("give --mock-data or --data-dir, not both")
    if options.reset_steps and not start:
        raise ConfigError("--reset-steps: needs --resume, it says what to take from there")
    spec, results = changed.stage(run, stage), Results(Path(config.results))
    data = results.shards(spec.data)
    if spec.stream and spec.stream.tokenizer:
        data = results.tokenizer(spec.stream.tokenizer).parent
    other_data = None
    dataset = MOCK if options.mock_data else None  # of a name that the configuration does not define
    if options.data_dir is not None and options.data_dir.resolve() != data.resolve():
        data = other_data = options.data_dir
        dataset = load_metadata(data).dataset
    if dataset:
        settings = spec.settings.model_copy(update={"data": dataset})
        spec = spec.model_copy(update={"data": dataset, "stream": None, "settings": settings})
    warmup = results.warmup(run, spec.shape)
    previous = None
    if spec.index and not start:
        before = config.run(run).stages[spec.index - 1].name
        previous = results.stage(run, before).receipt
        if not previous.exists():
            raise ConfigError(
                f"{run}/{stage}: starts from stage {before}, which is not trained ({previous} is missing); "
                "train that first, or name a checkpoint to start from with --resume"
            )

    if options.mock_data and spec.model.vocab_size is not None:
        raise ConfigError("--mock-data: holds bytes, but this run has a tokenizer; train it on its own data")
    starts = [str(path.resolve()) if path else None for path in (other_data, start)]
    differs = spec.identity != config.stage(run, stage).identity or any(starts) or options.mock_data
    if differs and ckpt_dir is None:
        digests = [files.digest([one, *starts, options.reset_steps])[:8] for one in spec.identities]
        names = [f"{run}-{digest}" for digest in digests]
        began = (name for name in names if results.stage(name, stage).origin.exists())
        spec = spec.model_copy(update={"run": next(began, names[0])})
    folder = ckpt_dir or results.stage(spec.run, stage).path
    resume = Checkpoint.at(start, whole=True).path if start else None
    if resume and resume.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--resume {resume}: is in this training's own folder, {folder}. Leave --resume out to continue "
            "that training, or name another folder with --ckpt-dir to start a new training from it"
        )
    if options.mock_data:
        data = folder / "mock_data"
        make_mock_data(data, 0.5 if spec.model.ngram else 0.0)
    indexes = None
    if spec.model.ngram is not None:
        counted = spec.model.ngram.counted
        text = MOCK if options.mock_data else config.run(run).dataset
        indexes = results.ngram(text, counted, "split"), results.ngram(text, counted, "full")
        if options.mock_data:
            from spider.data.ngram.store import build_indexes  # numba: half a second of each start

            build_indexes(data, spec.model.ngram, *indexes)
    return Plan(
        spec=spec,
        folder=folder,
        data=data,
        previous=previous,
        resume=resume,
        reset_steps=options.reset_steps,
        warmup=warmup if warmup.exists() else None,
        indexes=indexes,
    )


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
    code: str | None = None,
    on_step: Callable[[int], None] | None = None,
    world: World = ALONE,
) -> Receipt:
    """Train or resume one stage and write its receipt; a finished stage only gets its receipt again.

    The arguments are those of `Plan`.

    Args:
        resume: as in `Plan`, or any path that `Checkpoint.at` accepts.
        code: digest of the code, if a training by other code is not to be continued.
        on_step: called after every step (and its checkpoint) with the number of completed steps.
        world: the processes that train together; each calls this with the same arguments.

    Raises:
        TrainingError: the training cannot start or continue; the message says why and what to do.
        CheckpointError: a checkpoint could not be written, or ``previous`` or ``resume`` could not be read.
        Preempted: a signal stopped the training; everything is saved, and the next call resumes it.
        Ended: another process raised one of these.
    """
    if spec.index and previous is None and resume is None:
        raise TrainingError(
            f"{spec.run}/{spec.stage}: needs the receipt of the stage before (it is stage {spec.index})"
        )
    with contextlib.ExitStack() as stack, StopSignals() as stop:
        world.from_first(lambda: stack.enter_context(hold(folder)))
        origin = {"data_digest": data_digest(spec, data), "parent_weights": None}
        opened = None
        if spec.model.ngram is not None:
            from spider.data.ngram.store import open_index

            assert indexes is not None, "a plan for this model names its indexes"
            split, full = open_index(indexes[0]), open_index(indexes[1])
            counted = load_metadata(data).digest  # of a mixture the first dataset
            split.check(counted, ["ngram"])
            full.check(counted, ["ngram", "train"])
            opened = (split, full)
            origin |= {"ngram": split.description.digest, "full_index": full.description.digest}
        if resume is not None:
            origin["parent_weights"] = Checkpoint.at(resume).manifest.weights
            origin["resumed"] = "weights" if reset_steps else "training"
        elif previous is not None:
            origin["parent_weights"] = Receipt.read(previous).weights
        if chats := _conversations(spec, data, resume or previous):
            origin["conversations"] = chats
        try:
            fields = {**spec.deciding(), **origin, **({"code": code} if code else {})}
            own = Origin(format=Origin.FORMAT, identity=spec.identity, fields=fields)
            good = world.from_first(lambda: claim(folder, own))
            if good is None or not good.training.final:
                began = good.training if good else None
                record = Warmup.read(warmup) if warmup else None
                fit = partial(fitted, spec, world.size, world.device, began=began, warmup=record)
                trainer = Trainer(
                    world.from_first(fit),
                    folder,
                    data,
                    origin,
                    identity=spec.identity,
                    parent=resume or previous,
                    good=good,
                    warmup=warmup,
                    world=world,
                    indexes=opened,
                )
                good = trainer.run(stop, on_step)

            def finish() -> Receipt:
                assert good is not None, "the first process returns its final checkpoint"
                receipt = Receipt.of(good.training, good.path.relative_to(folder).as_posix())
                return receipt.write(StageFolder(folder).receipt)

            return world.from_first(finish)
        except OSError as error:
            raise TrainingError(
                f"{error.filename or folder}: {error.strerror or error}; what was saved is intact, run again"
            ) from error


def _conversations(spec: StageSpec, data: Path, start: Path | None) -> str | None:
    """Return the dataset of conversations that the stage, or else its parent, is trained on."""
    if spec.stream is None:
        for name, folder in spec.folders(data).items():
            if load_metadata(folder).written_as == "chat":
                return name
    return Checkpoint.at(start).manifest.conversations if start else None


def data_digest(spec: StageSpec, data: Path) -> str:
    """Return the digest of the training data; for a stream, that of its definition.

    That of a mixture covers its datasets and not their weights.
    """
    if spec.stream is not None:
        return files.digest(spec.stream.changed())
    digests = {name: load_metadata(folder).digest for name, folder in spec.folders(data).items()}
    return files.digest(digests) if spec.mixed else digests[spec.data]
