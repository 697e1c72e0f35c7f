"""The JSON files of checkpoints and stages: manifest, exported config, origin, receipts, and the warm-up.

A manifest holds all data of a checkpoint that are not tensors. A receipt is a pure function of the manifest
of the final checkpoint, so it can be written again at any time. The next stage finds its weights by it. This
module does not import torch, because reports read these files without it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, computed_field

from spider.common import sealed
from spider.common.errors import CheckpointError, TrainingError
from spider.common.record import Record
from spider.config import StageSpec

MANIFEST = "manifest.json"
#: Number of newest checkpoints of a stage that are kept.
NEWEST = 2
#: The link among a stage's checkpoints to the best of them.
BEST = "best"
#: The file that holds the name of each tensor's file.
INDEX = "model.safetensors.index.json"
#: The manifest of an exported folder.
EXPORTED = "config.json"
#: The model card in an exported folder. People may edit it, so `EXPORTED` does not list it.
CARD = "README.md"
#: The suffix of a compressed model (`spider.checkpoints.compress.format`).
COMPRESSED = ".spider"
#: The folder in an exported folder that holds the n-gram index of its model.
NGRAM = "ngram"


class SavedPrecision(BaseModel, frozen=True):
    """The precision of a training, as `spider.training.precision.Precision` describes it."""

    kind: Literal["fp32", "bf16", "fp8"]
    reason: str
    layers: list[str]


class Validated(BaseModel, frozen=True):
    """The result of a validation during training."""

    bpb: float
    """Bits per byte."""
    of: str
    """Digest of the text and of how it was read. Only results with the same digest compare."""


class Trained(Record):
    """The fields that a receipt repeats from the manifest of the final checkpoint."""

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
    """The receipt of a finished stage.

    ``steps`` counts the steps of this stage. ``checkpoint`` is the path of its final checkpoint in its
    folder.
    """

    WHAT, ERROR = "a receipt", TrainingError

    steps: int
    precision: str
    checkpoint: str

    @classmethod
    def of(cls, final: Manifest, checkpoint: str) -> Self:
        """Make the receipt of a stage from the manifest of its final checkpoint."""
        repeated = {name: getattr(final, name) for name in Trained.model_fields} | {"format": cls.FORMAT}
        return cls(**repeated, steps=final.step, precision=final.precision.kind, checkpoint=checkpoint)

    @classmethod
    def of_stage(cls, path: Path, spec: StageSpec) -> Self:
        """Read the receipt at ``path``; raise `ValueError` if it is of another stage."""
        receipt = cls.read(path)
        if (receipt.run, receipt.stage) != (spec.run, spec.stage):
            raise ValueError(
                f"{path}: is the receipt of {receipt.run}/{receipt.stage}, not of {spec.run}/{spec.stage}"
            )
        return receipt


class Manifest(Trained):
    """The manifest of a checkpoint.

    It has a digest, because a flipped bit in the position in the data does as much harm as one in a weight.
    """

    FORMAT, WHAT, ERROR = 2, "a checkpoint", CheckpointError
    SLICED: ClassVar[int] = 3
    """Format of a checkpoint with tensors that are cut in slices."""
    ALSO = (SLICED,)
    REMEDY = "use the version that wrote it, or name another folder"

    spec: dict[str, Any]
    """The `spider.config.StageSpec` as JSON, because settings may have other names by now."""
    final: bool
    parent_weights: str | None
    ngram: str | None = None
    """Digest of the n-gram index that the model was trained with."""
    full_index: str | None = None
    """Digest of the index with the training text merged in, which evaluation and generation use."""
    conversations: str | None = None
    """Dataset of conversations that the model was last trained on, or None."""
    resumed: str | None = None
    """``weights`` or ``training``: what the stage took from the checkpoint that it began with."""
    precision: SavedPrecision
    threads: int
    processes: int
    parallel: str | None
    graphs: bool = False
    """Whether micro-batches were replayed as a CUDA graph."""
    torch: str
    step: int
    """Step of the stage."""
    global_tokens: int
    """Tokens of the run so far."""
    end: int | None
    streak: int
    means: dict[str, Any]
    batches: list[str] = Field(default_factory=list)
    """Digests of the batches since the last row of metrics; empty in a manifest of an earlier version."""
    epoch: float | None = None
    """Passes over the training data; None in a manifest of an earlier version."""
    validation_seconds: float = 0.0
    alike_since: int = 0
    validated: Validated | None = None
    """The validation of the weights in it, or None."""
    files: dict[str, sealed.SealedFile]
    digest: str
    """`spider.common.sealed.content_digest` of the other fields."""

    @classmethod
    def parse(cls, plain: Any, path: Path) -> Self:
        manifest = super().parse(plain, path)
        if manifest.digest != sealed.content_digest(plain):
            raise CheckpointError(f"{path}: edited since it was written, its digest does not match")
        return manifest

    @property
    def model(self) -> dict[str, Any]:
        """Return the ``model`` block of the configuration."""
        return self.spec["model"]

    @property
    def window(self) -> int:
        """Return how many tokens the model reads at a time when it is evaluated."""
        return self.spec["evaluation"]["seq_len"] or self.spec["settings"]["seq_len"]


class Exported(Record):
    """``config.json`` of an exported folder, or the header of a compressed model.

    People may edit the file, so it lacks a digest.
    """

    FORMAT, WHAT, REMEDY, ERROR = Manifest.FORMAT, "an exported folder", Manifest.REMEDY, CheckpointError

    full_index: str | None = None
    conversations: str | None = None
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of the model's score; None, as in files of earlier versions, for fp32."""
    n_loops: int | None = None
    """Loops of the recurrent core in the score; None: the model's own number."""
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
    files: dict[str, sealed.SealedFile]

    @staticmethod
    def lies_in(path: Path) -> bool:
        """Return whether a folder is an exported folder and not a checkpoint."""
        return (path / EXPORTED).is_file() and not (path / MANIFEST).exists()


class Origin(Record):
    """The origin of the checkpoints and metrics in a stage's folder.

    ``fields`` holds the spec of the stage, the digest of its data and the digest of its initial weights.
    """

    WHAT, ERROR = "results", TrainingError
    REMEDY = "move its folder away, or use the version that made it"

    identity: str
    fields: dict[str, Any]

    @property
    def spec(self) -> StageSpec:
        """Return the spec of the stage; raise `ValueError` if this version does not have all of its keys."""
        return StageSpec.model_validate({k: v for k, v in self.fields.items() if k in StageSpec.model_fields})


def read_manifest(path: Path) -> Manifest | Exported:
    """Read the manifest of a checkpoint or an exported folder, without checking its files.

    Raises:
        CheckpointError: the manifest is missing, malformed, incomplete, edited or of another format.
    """
    return Exported.read(path / EXPORTED) if Exported.lies_in(path) else Manifest.read(path / MANIFEST)


def steps(root: Path) -> list[Path]:
    """Return the checkpoints below ``root``, by rising step."""
    named = (path for path in root.glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(named, key=step_of)


def step_of(path: Path) -> int:
    """Return the run's step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def parts_done(parts: int, progress: Any, hours: float | None) -> int:
    """Return how many of the equal parts of a stage are done, of its steps or of its ``hours`` by the clock.

    Args:
        progress: a manifest, or `spider.training.state.Progress`.
    """
    of_steps = parts * progress.step // progress.end if progress.end else 0
    spent = progress.seconds + progress.checkpoint_seconds + progress.validation_seconds
    return min(parts, max(of_steps, int(parts * spent / (3600 * hours)) if hours else 0))


def at_shares(root: Path, parts: int) -> list[Path]:
    """Return the first checkpoint below ``root`` after each of the equal parts of its stage, and its last.

    By the clock, the last part may be done before the last step. A damaged manifest is left out.
    """
    found: dict[int, Path] = {}
    for path in steps(root) if parts else ():
        with contextlib.suppress(CheckpointError):
            manifest = Manifest.read(path / MANIFEST)
            done = parts_done(parts, manifest, manifest.spec["settings"].get("max_hours"))
            if manifest.final:
                found.pop(done, None)
            found.setdefault(done, path)
    return [path for done, path in found.items() if done]


def best(root: Path) -> tuple[Path, Manifest] | None:
    """Return the checkpoint below ``root`` with the fewest bits per byte, the earliest of equals.

    Only checkpoints that were validated on the same text as the newest validated one compare. A damaged
    manifest is left out.
    """
    validated: list[tuple[Validated, Path, Manifest]] = []
    for path in steps(root):
        with contextlib.suppress(CheckpointError):
            manifest = Manifest.read(path / MANIFEST)
            if manifest.validated:
                validated.append((manifest.validated, path, manifest))
    if not validated:
        return None
    text = validated[-1][0].of
    _, path, manifest = min((one for one in validated if one[0].of == text), key=lambda one: one[0].bpb)
    return path, manifest


class MatrixRecord(BaseModel, frozen=True):
    """A quantized tensor: one matrix, or a stack of matrices."""

    bits_per_weight: float
    """Entropy of its integers, without the quantization steps."""
    error: float | None
    """Squared error of its products (`compress.quantize.error`); None without calibration inputs."""
    error_nearest: float | None
    """The same error if each weight were rounded to the nearest step."""


class CompressedRecord(BaseModel, frozen=True):
    """The sizes of a compressed file and of its parts, and how it was made."""

    bytes: int
    code_bytes: int
    total_bytes: int
    cap: int
    clip: float
    settings: dict[str, Any]
    parts: dict[str, int]
    """Bytes of each section."""
    matrices: dict[str, MatrixRecord]
    rounded: list[str]
    """Matrices without calibration inputs, which were rounded to the nearest step."""
    modules: list[str]
    """Modules whose source ``code_bytes`` counts."""
    windows: int
    """Windows of calibration text."""
    tokens: int
    """Tokens of calibration text."""
    sha256: str
    seconds: float


class CompressedReceipt(Receipt):
    """The receipt of the stage, with the checkpoint and the weights of the compressed file."""

    WHAT: ClassVar[str] = "a receipt of a compressed model"

    compressed: CompressedRecord

    @computed_field  # type: ignore[prop-decorator]
    @property
    def results(self) -> dict[str, Any]:
        """Return the sizes, in the shape of `spider.evaluation.result.Result`."""
        record = self.compressed
        sizes = {"cap": record.cap, "file": record.bytes, "code": record.code_bytes}
        columns: dict[str, Any] = {title: {"value": size, "unit": "bytes"} for title, size in sizes.items()}
        total = {
            "name": "bytes",
            "label": "bytes, with code",
            "value": record.total_bytes,
            "unit": "bytes",
            "better": "lower",
            "columns": columns | {"clip": {"value": record.clip}},
        }
        parts = ", ".join(f"{part} {size:,}" for part, size in record.parts.items() if size)
        used = record.settings
        notes = [
            f"Matrices in {used['bits']} bits by {used['method']}, tables in 8 bits.",
            f"Parts of the file: {parts}.",
        ]
        ratios = sorted(
            (one.error / one.error_nearest, name)
            for name, one in record.matrices.items()
            if one.error is not None and one.error_nearest
        )
        if ratios:
            median, _ = ratios[len(ratios) // 2]
            worst, name = ratios[-1]
            notes.append(
                "Error of the matrix products, relative to rounding to nearest: "
                f"{median:.2f} in the median, at most {worst:.2f} ({name})."
            )
        return {"compression": {"title": "Compressed model", "rows": [total], "notes": notes}}


Kind = Literal["fp32", "bf16", "fp8"]


class Step(BaseModel, frozen=True):
    """Times and peak memory of forward, backward and update of one micro-batch."""

    first_seconds: float
    seconds: float
    peak_memory_mb: float


class Compiled(BaseModel, frozen=True):
    """The archive of compiled code (`spider.training.compilation`)."""

    cache: str
    bytes: int
    made_for: str


class Warmup(Record):
    WHAT = "the record of a warm-up"

    run: str
    device: str
    threads: int
    versions: dict[str, str]
    micro_batch: int | None = None
    """Windows of a micro-batch. None in a record of an earlier version."""
    checkpointing: str | bool | None = None
    """The layers that the backward pass recomputes. It is None for a family that recomputes nothing."""
    precision: Kind
    """The precision that ``precision: auto`` selects, or the one that the configuration sets."""
    reason: str
    fp8_layers: list[str]
    """Names of the layers that run in fp8 where ``precision: auto`` selects it."""
    step: dict[Kind, Step]
    compile: Compiled | None
    seconds: float
