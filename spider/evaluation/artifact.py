"""What measuring leaves: `evaluation.json`, all that any figure, table or page shows of a model.

Whoever shows it needs neither the model nor torch. What happens inside a model is told in the words of its
family, as figures of a few kinds that are drawn without knowing what they are about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from spider.artifacts import Artifact
from spider.results import StageFolder

COMPRESSORS = {
    "ppmd": "7z PPMd, order 12",
    "xz": "xz -9",
    "zstd": "zstd --ultra -22",
    "brotli": "brotli -q 11",
    "bz2": "bzip2 -9",
    "zlib": "zlib -9",
}
"""The command line that each compressor's figure stands for; the strongest first."""


class Histogram(BaseModel, frozen=True):
    """How many ``things`` (patches) have 0, 1, 2, ... of a ``unit`` (bytes)."""

    kind: Literal["histogram"] = "histogram"
    title: str
    unit: str
    things: str
    counts: list[int]


class HeatMap(BaseModel, frozen=True):
    """A table of numbers as colours: ``middle`` is neutral, ``most`` and beyond has the strongest colour.
    What a ``column`` is (an expert) has a number from 1."""

    kind: Literal["heatmap"] = "heatmap"
    title: str
    rows: list[str]
    column: str
    values: list[list[float]]
    middle: float
    most: float
    caption: str = ""


class Note(BaseModel, frozen=True):
    """A sentence in the place of a figure, for a part that is switched off."""

    kind: Literal["note"] = "note"
    title: str
    text: str


Figure = Annotated[Histogram | HeatMap | Note, Field(discriminator="kind")]


@dataclass(frozen=True)
class Piece:
    """Something to show; a mark stands for what has no glyph of its own."""

    text: str
    mark: bool = False


@dataclass(frozen=True)
class Segment:
    """What a model takes together, of ``size`` bytes and special ids; what follows the last boundary is not
    ``closed``. The probability is of the boundary that closes it, where boundaries are predicted."""

    pieces: tuple[Piece, ...]
    size: int
    closed: bool
    probability: float | None


class CutText(BaseModel, frozen=True):
    """A text as a model cuts it, into ``unit`` (patches)."""

    unit: str
    caption: str
    segments: list[Segment]


class LoopsCurve(BaseModel, frozen=True):
    """Bits per byte of the beginning of the text with 1, 2, ... loops."""

    bytes: int
    trained: int
    bpb: list[float]


class Yardstick(BaseModel, frozen=True):
    """What a compressor makes of the text."""

    name: str
    given: Literal["nothing", "stage", "split"]
    """The text it read before: none, what the model was trained on, all that is not held out."""
    given_bytes: int
    share: float
    """That is so much of the text it is named after."""
    bpb: float
    fresh: float | None
    """On the bytes that the training text does not hold; None where that is unknown or there are none."""

    @property
    def key(self) -> str:
        split = " given all" if self.share > 0.995 else " given part"
        return self.name + {"nothing": "", "stage": " given stage", "split": split}[self.given]

    @property
    def label(self) -> str:
        """``7z PPMd, order 12, given all training text (26.4 MB)``"""
        if self.given == "nothing":
            return COMPRESSORS[self.name]
        what = {"stage": "what the model was trained on", "split": "all training text"}[self.given]
        size = f"{self.given_bytes / 1e6:.1f}"
        size += f" of {self.given_bytes / self.share / 1e6:.1f}" if self.share < 0.995 else ""
        return f"{COMPRESSORS[self.name]}, given {what} ({size} MB)"


def fairest(rates: Mapping[str, float]) -> dict[str, float]:
    """Where there is room for few compressors: the two best given all, given the stage's text, and alone."""
    kinds: dict[str, list[str]] = {"all": [], "part": [], "stage": [], "": []}
    for key in sorted(rates, key=rates.__getitem__):
        kinds[key.partition(" given ")[2]].append(key)
    if len(kinds[""]) == len(rates):
        return dict(rates)
    return {key: rates[key] for keys in kinds.values() for key in keys[:2]}


class Copies(BaseModel, frozen=True):
    """How much of the text stands in the training text as well, and the score on what does not."""

    length: int
    """Bytes in a row that count as a copy."""
    copied: float
    """Share of the text's bytes that lie in one."""
    searched: float
    """Share of the training text that was searched."""
    fresh_bytes: int
    bpb: float | None
    """Of the model, on the other bytes; None where there are none."""


class Proposed(BaseModel, frozen=True):
    """The bytes of the text that one source of a memory proposed, and no source before it."""

    SOURCES: ClassVar = ("the document so far", "the counted text, word for word", "its counts", "nobody")

    source: str
    share: float
    bpb: float | None
    """Of the model, on these; None where there are none."""


class ProposedByte(BaseModel, frozen=True):
    """A byte of the text, to be shown with what a memory proposed for its place."""

    pieces: tuple[Piece, ...]
    source: int
    """In `Proposed.SOURCES`."""
    proposed: tuple[str, ...]
    """The first of the candidates, this byte or others, as they are shown."""
    bits: float
    """What the byte cost the model."""


class DocumentScore(BaseModel, frozen=True):
    """Of one document of the text."""

    bytes: int
    bpb: float
    ppmd: float | None = None
    """Of PPMd given as much training text as it is given."""
    common: float | None = None
    """Share of its stretches of 12 bytes that the training text holds."""
    copied: float | None = None
    """Share of its bytes in copies."""


class TaskResult(BaseModel, frozen=True):
    """Questions of one task, answered (`spider.evaluation.tasks`)."""

    task: str
    items: int
    chance: float
    by_sum: float
    """Share that is right by the nats of a choice."""
    by_byte: float
    """By its nats a byte: to compare by."""
    by_token: float
    """By its nats an id: as published CORE figures are."""
    centered: float
    """``by_byte``, of what is to be had beyond guessing."""
    standard_error: float
    """Of ``by_byte``."""
    cropped: int
    """Choices whose beginning did not fit into the window."""


class Adapted(BaseModel, frozen=True):
    """The text scored by a model that learned from it as it went (`spider.evaluation.adapt`)."""

    bpb: float
    bpb_strict: float
    seconds: float
    settings: dict[str, int | float | str]


class Training(BaseModel, frozen=True):
    """Of the stage's receipt."""

    steps: int
    global_step: int
    tokens: int
    bytes: int
    seconds: float


class Evaluation(Artifact):
    """One checkpoint, measured on one text; ``index`` is the stage's in its run."""

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "an evaluation"
    REMEDY: ClassVar[str] = "evaluate again"

    run: str
    stage: str
    index: int
    bpb: float
    bpb_strict: float
    bytes: int
    documents: int
    seconds: float
    bytes_per_second: float
    nats: dict[str, float]
    targets: dict[str, int]
    compressors: dict[str, float]
    """The rates of `yardsticks`, by their keys."""
    compressor_settings: dict[str, str]
    """How each is named to a reader."""
    data: str
    data_digest: str
    text_sha256: str
    seq_len: int
    overlap: float
    n_loops: int
    device: str
    precision: str
    checkpoint: str
    averaged: bool
    weights: str
    global_step: int
    training: Training
    model: dict[str, float]
    """The model's own figures, averaged over windows."""
    loops: LoopsCurve | None
    # What follows is missing in files from before it was written down.
    figures: list[Figure] | None = None
    """What happened inside the model; empty for a family that tells nothing."""
    text: CutText | None = None
    """The beginning of the text as the model cuts it; None for one that cuts nothing."""
    parameters: int | None = None
    parameters_by_part: dict[str, int] | None = None
    parameters_looked_up: int | None = None
    """Of tables of which a token reads some rows: they cost no FLOPs."""
    flops_per_token: float | None = None
    """Of training, forward and backward, at the window and depth of the stage."""
    yardsticks: list[Yardstick] | None = None
    left_out: tuple[str, ...] = ()
    """Yardsticks that are missing, and why."""
    lossless: bool = True
    """Else the text is what a tokenizer of others left of it."""
    bpb_assistant: float | None = None
    """Of what an assistant says, where the text is of conversations."""
    learn: Literal["all", "assistant"] = "all"
    """What the stage learned of its text: all of it, or what an assistant says."""
    ttt: Adapted | None = None
    """Never in the place of ``bpb``, which is of weights that stay as they are."""
    memory: str | None = None
    """Digest of the memory that the model read."""
    proposed: list[Proposed] | None = None
    """What that proposed, by source."""
    proposed_text: tuple[ProposedByte, ...] = ()
    """The beginning of the text, byte by byte."""
    tasks: tuple[TaskResult, ...] = ()
    copies: Copies | None = None
    by_document: list[DocumentScore] | None = None
    # Only earlier versions wrote these two: the sample has a file of its own now, see `Sample`.
    prompt: str | None = None
    sample: str | None = None

    @property
    def context(self) -> str:
        """How many ids before it a target was predicted from: ``64 to 256``; a memory looks back on all of
        the document."""
        window = f"{int(self.seq_len * self.overlap)} to {self.seq_len}"
        return window if self.memory is None else f"{window} (memory: document)"

    @property
    def fresh(self) -> dict[str, float]:
        """Rates of the compressors on what is no copy, by key."""
        return {one.key: one.fresh for one in self.yardsticks or () if one.fresh is not None}


class Sample(Artifact):
    """``sample.json``: what one checkpoint wrote."""

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "a sample"
    REMEDY: ClassVar[str] = "sample again"

    run: str
    stage: str
    weights: str
    prompt: str
    text: str
    """What follows the prompt."""

    @classmethod
    def of_stage(cls, folder: StageFolder, measured: Evaluation) -> Self | None:
        """Return the sample of an evaluated stage, or None if there is none.

        Evaluations of earlier versions hold the sample themselves.
        """
        if folder.sample.exists():
            return cls.read(folder.sample)
        if measured.prompt is None or measured.sample is None:
            return None
        return cls(
            format=cls.FORMAT,
            run=measured.run,
            stage=measured.stage,
            weights=measured.weights,
            prompt=measured.prompt,
            text=measured.sample,
        )


class Quarter(BaseModel, frozen=True):
    """A quarter of the scored text: documents with like shares of wording that the training text holds."""

    least: float | None
    most: float | None
    """Of `DocumentScore.common`."""
    bytes: int
    copied: float
    bpb: float
    ppmd: float | None


def quarters(documents: Sequence[DocumentScore]) -> list[Quarter]:
    """Documents by how common their wording is, in four parts of as equal a size as they allow."""
    known = sorted((one for one in documents if one.common is not None), key=lambda one: one.common or 0.0)
    total, done, parts = sum(one.bytes for one in known), 0, [list[DocumentScore]() for _ in range(4)]
    for one in known:
        parts[min(3, int(4 * (done + one.bytes / 2) / total))].append(one)
        done += one.bytes

    def mean(part: list[DocumentScore], name: str) -> float:
        return sum(one.bytes * getattr(one, name) for one in part) / sum(one.bytes for one in part)

    return [
        Quarter(
            least=part[0].common,
            most=part[-1].common,
            bytes=sum(one.bytes for one in part),
            copied=mean(part, "copied"),
            bpb=mean(part, "bpb"),
            ppmd=None if part[0].ppmd is None else mean(part, "ppmd"),
        )
        for part in parts
        if part
    ]
