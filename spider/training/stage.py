"""One stage, from the lock on its folder to its receipt.

What is half done goes on from its newest good checkpoint. What is finished is not trained again: the receipt
is a pure function of the final checkpoint's manifest, and is only written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from spider import files
from spider.checkpoints.claim import claim, hold
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Origin, Receipt
from spider.config import StageSpec
from spider.data.metadata import load_metadata
from spider.errors import TrainingError
from spider.processes.stopping import StopSignals
from spider.processes.world import ALONE, World
from spider.results import StageFolder
from spider.training.loop import Trainer


def train(
    spec: StageSpec,
    folder: Path,
    data: Path,
    *,
    previous: Path | None = None,
    resume: Path | None = None,
    reset_steps: bool = False,
    warmup: Path | None = None,
    on_step: Callable[[int], None] | None = None,
    world: World = ALONE,
) -> Receipt:
    """Train one stage, or go on with it, or, if it is finished, write its receipt again.

    Args:
        folder: ``runs/{run}/{stage}``; checkpoints, metrics and the receipt ``train.json`` go there.
        data: ``shards/{dataset}``.
        previous: receipt of the stage before; its weights and optimizer state are where this one starts.
        resume: start from this instead, anything that `Checkpoint.at` takes; with this optimizer's state
            its step count goes on as well.
        reset_steps: of ``resume`` take the weights only.
        warmup: what was measured for this stage's shape.
        on_step: called after every step (and its checkpoint) with the number of steps done in this stage.
        world: the processes that train it together; each calls this with the same arguments.

    Raises:
        TrainingError: cannot start or go on; says why and what to do.
        CheckpointError: a checkpoint could not be written, or ``previous`` or ``resume`` could not be read.
        Preempted: a signal asked to stop; everything is saved, run again to go on.
        Ended: another of several processes raised one of these.
    """
    folder, data = Path(folder), Path(data)
    if spec.index and previous is None and resume is None:
        raise TrainingError(
            f"{spec.run}/{spec.stage}: needs the receipt of the stage before (it is stage {spec.index})"
        )
    with contextlib.ExitStack() as held, StopSignals() as stop:
        world.from_first(lambda: held.enter_context(hold(folder)))
        origin = {"data_digest": data_digest(spec, data), "parent_weights": None}
        if resume is not None:
            origin["parent_weights"] = Checkpoint.at(resume, quick=True).manifest.weights
            origin["resumed"] = "weights" if reset_steps else "training"
        elif previous is not None:
            origin["parent_weights"] = Receipt.read(previous).weights
        try:
            fields = {**spec.deciding(), **origin}
            own = Origin(format=Origin.FORMAT, identity=spec.identity, fields=fields)
            good = world.from_first(lambda: claim(folder, own))
            if good is None or not good.training.final:
                parent = resume or previous
                good = Trainer(spec, folder, data, origin, parent, good, warmup, world).run(stop, on_step)

            def finish() -> Receipt:
                assert good is not None, "the first process holds what it saved"
                receipt = Receipt.of(good.training, good.path.relative_to(folder).as_posix())
                return receipt.write(StageFolder(folder).receipt)

            return world.from_first(finish)
        except OSError as error:
            raise TrainingError(
                f"{error.filename or folder}: {error.strerror or error}; what was saved is intact, run again"
            ) from error


def data_digest(spec: StageSpec, data: Path) -> str:
    """What the training data is known by: its index, or, of a stream, its definition."""
    return load_metadata(data).digest if spec.stream is None else files.digest(spec.stream.described())
