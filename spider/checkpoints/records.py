"""The JSON files that training leaves, typed: manifest and exported config, origin and receipt.

A manifest says all of a checkpoint that is not a tensor. A receipt is a pure function of the final
checkpoint's manifest, so it can be written again at any time; the next stage takes its weights through it.
Nothing here imports torch: reports read these files without it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel

from spider import files
from spider.config import Fp8Recipe, StageSpec
from spider.errors import CheckpointError, TrainingError
from spider.record import Record

MANIFEST = "manifest.json"
#: The link beside a stage's checkpoints to the best of them.
BEST = "best"
#: Which tensor lies in which file.
INDEX = "model.safetensors.index.json"
EXPORTED = "config.json"
#: Of an exported folder, for people: they may edit it, so no digest in `EXPORTED` is of it.
CARD = "README.md"
#: How the file of a compressed model ends (`spider.compress.format`).
COMPRESSED = ".spider"
#: Of an exported folder, the folder of the n-gram index that its model reads.
NGRAM = "ngram"


class TensorFile(BaseModel, frozen=True):
    """A file as it was written."""

    size: int
    sha256: str


class SavedPrecision(BaseModel, frozen=True):
    """The arithmetic of a training, as `spider.training.precision.Precision` has it."""

    kind: Literal["fp32", "bf16", "fp8"]
    reason: str
    layers: list[str]
    recipe: Fp8Recipe | None


class Validated(BaseModel, frozen=True):
    """What a validation on the way found."""

    bpb: float
    """Bits per byte."""
    of: str
    """Digest of what was read and how: only figures of the same compare."""


class Trained(Record):
    """What a receipt repeats of the final checkpoint's manifest."""

    run: str
    stage: str
    identity: str
    global_step: int
    tokens: int
    bytes: int
    seconds: float
    checkpoint_seconds: float
    skipped: int
    weights: str
    averaged_weights: str | None
    data_digest: str
    position: dict[str, Any] | None
    device: str
    loss: float | None
    best_loss: float | None


class Receipt(Trained):
    """Of a finished stage: what it came to in ``steps`` of its own, and where in its folder the final
    ``checkpoint`` is."""

    WHAT, REMEDY, ERROR = "a receipt", "train that stage again", TrainingError

    steps: int
    precision: str
    checkpoint: str

    @classmethod
    def of(cls, final: Manifest, checkpoint: str) -> Self:
        repeated = {name: getattr(final, name) for name in Trained.model_fields} | {"format": cls.FORMAT}
        return cls(**repeated, steps=final.step, precision=final.precision.kind, checkpoint=checkpoint)

    @classmethod
    def of_stage(cls, path: Path, spec: StageSpec) -> Self:
        """Read the receipt at ``path``; raise `ValueError` if it is another stage's."""
        receipt = cls.read(path)
        if (receipt.run, receipt.stage) != (spec.run, spec.stage):
            raise ValueError(
                f"{path}: is the receipt of {receipt.run}/{receipt.stage}, not of {spec.run}/{spec.stage}"
            )
        return receipt


class Manifest(Trained):
    """Of a checkpoint. It is hashed: a flipped bit in a position does as much harm as one in a weight."""

    FORMAT, WHAT, ERROR = 2, "a checkpoint", CheckpointError
    REMEDY = "use the version that wrote it, or name another folder"

    spec: dict[str, Any]
    """A `spider.config.StageSpec` as it was written: settings may have changed their names since."""
    final: bool
    parent_weights: str | None
    ngram: str | None = None
    """Digest of the n-gram index that it was trained with."""
    full_index: str | None = None
    """Digest of that with the training text merged in, with which it is to be read."""
    conversations: str | None = None
    """Dataset of conversations that it was trained on last, if it was."""
    resumed: str | None = None
    """What was taken from a checkpoint that the stage began at: its ``weights``, or all its ``training``."""
    precision: SavedPrecision
    threads: int
    processes: int
    parallel: str | None
    torch: str
    step: int
    """Of the stage."""
    global_tokens: int
    """Tokens of the run so far."""
    end: int | None
    streak: int
    means: dict[str, Any]
    validation_seconds: float = 0.0
    validated: Validated | None = None
    """Of the weights as they are in it; None where they were not."""
    files: dict[str, TensorFile]
    digest: str
    """Of all the rest."""

    @classmethod
    def parse(cls, plain: Any, path: Path) -> Self:
        manifest = super().parse(plain, path)
        if manifest.digest != files.digest({k: v for k, v in plain.items() if k != "digest"}):
            raise CheckpointError(f"{path}: its contents do not match its digest")
        return manifest

    @property
    def model(self) -> dict[str, Any]:
        return self.spec["model"]

    @property
    def window(self) -> int:
        """Ids that the model is evaluated with at a time."""
        return self.spec["evaluation"]["seq_len"] or self.spec["settings"]["seq_len"]


class Exported(Record):
    """``config.json`` of an exported folder or a compressed model. People may edit it."""

    FORMAT, WHAT, REMEDY, ERROR = Manifest.FORMAT, "an exported folder", Manifest.REMEDY, CheckpointError

    full_index: str | None = None
    conversations: str | None = None
    spider: str
    model: dict[str, Any]
    window: int
    run: str
    stage: str
    identity: str | None = None
    step: int
    global_step: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    loss: float | None = None
    best_loss: float | None
    data_digest: str | None = None
    weights: str
    files: dict[str, TensorFile]

    @staticmethod
    def lies_in(path: Path) -> bool:
        """Whether a folder is an exported one rather than a checkpoint, by what it holds."""
        return (path / EXPORTED).is_file() and not (path / MANIFEST).exists()


class Origin(Record):
    """Whose the checkpoints and metrics in a stage's folder are: its ``fields`` are the spec, the digests of
    its data and of the weights that it began with."""

    WHAT, ERROR = "results", TrainingError
    REMEDY = "move its folder away, or use the version that made it"

    identity: str
    fields: dict[str, Any]

    @property
    def spec(self) -> StageSpec:
        """The stage that was to be trained; raises `ValueError` where this version does not know its keys."""
        return StageSpec.model_validate({k: v for k, v in self.fields.items() if k in StageSpec.model_fields})


def read_manifest(path: Path) -> Manifest | Exported:
    """What a checkpoint or an exported folder says of itself, its files not yet checked; raises as `read`."""
    return Exported.read(path / EXPORTED) if Exported.lies_in(path) else Manifest.read(path / MANIFEST)


def steps(root: Path) -> list[Path]:
    """The checkpoints below ``root``, oldest first, by number."""
    named = (path for path in root.glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(named, key=step_of)


def step_of(path: Path) -> int:
    """The run's step, by a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def best(root: Path) -> tuple[Path, Manifest] | None:
    """Of the checkpoints below ``root`` that were validated on the same text as the newest such one, that
    with the fewest bits per byte, the first of equals; what is damaged is left out."""
    known: list[tuple[Path, Manifest]] = []
    for path in steps(root):
        with contextlib.suppress(CheckpointError):
            known.append((path, Manifest.read(path / MANIFEST)))
    validated = [(one.validated, path, one) for path, one in known if one.validated]
    alike = [(it.bpb, path, one) for it, path, one in validated if it.of == validated[-1][0].of]
    return min(alike, key=lambda found: found[0])[1:] if alike else None
