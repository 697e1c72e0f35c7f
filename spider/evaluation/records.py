"""Define the JSON files of measurements: `evaluation.json`, `harness.json` and `sample.json`.

Tables, pages and figures are made from these files alone. Reading them needs neither the model nor torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from spider.checkpoints.records import CompressedReceipt, CompressedRecord
from spider.evaluation.result import BITS, BYTES, Number, Result, Row
from spider.record import Record
from spider.results import CompressedFolder, StageFolder


class Training(BaseModel, frozen=True):
    """The part of the stage's receipt that reports show."""

    steps: int
    global_step: int
    tokens: int
    bytes: int
    seconds: float


class Scored(BaseModel):
    """The score of one checkpoint on one text, and the settings that it depends on."""

    model_config = ConfigDict(frozen=True)

    bpb: float
    """Bits per byte, each document alone."""
    bpb_strict: float
    bpb_carried: float | None = None
    """Bits per byte with what came before; None if it was not measured."""
    bpb_strict_carried: float | None = None
    carry_over: int = 0
    """Bytes of earlier documents that `bpb_carried` may look back on."""
    deviation: float
    """Largest deviation from one of the sum of the probabilities of all ids, over all scored positions."""
    bpb_assistant: float | None = None
    """Bits per byte of the assistant's answers, for a text of conversations."""
    learn: Literal["all", "assistant"] = "all"
    """The part of the text that the stage learned: all of it, or the assistant's answers."""
    data: str
    text_sha256: str
    lossless: bool = True
    """False if the text is a decoded one, because its tokenizer does not keep the original."""
    seq_len: int
    overlap: float
    n_loops: int
    device: str
    weights: str
    ngram: str | None = None
    """Digest of the n-gram index that the model read."""
    counted: int = 0
    """Bytes of text that this index was counted from."""
    global_step: int
    parameters: int

    @property
    def context(self) -> str:
        """Return what the model reads before a target, such as ``64 to 256 ids``."""
        window = f"{int(self.seq_len * self.overlap)} to {self.seq_len} ids"
        if self.ngram is None:
            return window
        back = f", or {self.carry_over:,} bytes back" if self.carry_over else ""
        return f"{window}; n-gram index: the document{back}"


def sum_of_probabilities(deviation: float) -> str:
    """Return the sentence that states the deviation of a score."""
    return f"At each scored position, the probabilities of all ids sum to one within {deviation:.1g}."


class Evaluation(Scored, Record):
    """One checkpoint, measured on one text. ``index`` is the position of the stage in its run."""

    FORMAT: ClassVar[int] = 3
    WHAT: ClassVar[str] = "an evaluation"

    run: str
    stage: str
    index: int
    bytes: int
    documents: int
    seconds: float
    bytes_per_second: float
    nats: dict[str, float]
    targets: dict[str, int]
    data_digest: str
    precision: str
    checkpoint: str
    averaged: bool
    training: Training
    model: dict[str, float]
    """The model's own metrics, averaged over windows."""
    parameters_by_part: dict[str, int]
    parameters_looked_up: int
    """Parameters in lookup tables, such as embeddings. They cost no FLOPs."""
    flops_per_token: float
    """FLOPs of training, forward and backward, at the window and depth of the stage."""
    intervals: dict[str, tuple[float, float]] = {}
    """95% intervals of a bootstrap over documents, by the name of the score."""
    intervals_carried: dict[str, tuple[float, float]] = {}
    """The same with what came before."""
    document_bits: list[float] = []
    """Bits of the text of each document, read alone, which `spider compare` pairs."""
    results: dict[str, Result] = {}
    """Results of the measurements, by name."""

    @property
    def score(self) -> Result:
        """Return the model's scores as a result."""
        labels = {"bpb": BITS, "bpb_strict": "strict", "bpb_assistant": "of answers"}
        carried = {"bpb": self.bpb_carried, "bpb_strict": self.bpb_strict_carried}
        rows = [
            Row(
                name=name,
                label=label,
                value=getattr(self, name),
                unit=BITS,
                better="lower",
                interval=self.intervals.get(name),
                carried=Number(value=value, unit=BITS, interval=self.intervals_carried.get(name))
                if (value := carried.get(name)) is not None
                else None,
            )
            for name, label in labels.items()
            if getattr(self, name) is not None
        ]
        metrics = {
            "bytes": self.bytes,
            "bytes_per_second": self.bytes_per_second,
            "deviation": self.deviation,
        }
        metrics |= {f"model/{name}": value for name, value in self.model.items()}
        if not self.lossless:
            metrics["lossless"] = 0
        legend = (
            "Bits per byte: nats of the predicted bytes / (ln 2 x bytes), lower is better. Each document "
            "alone: the model reads no other held-out document. With what came before: its windows begin in "
            "earlier documents, and its n-gram index, if it has one, finds candidates in them. The strict "
            "score also counts the nats of document ends and beginnings. Brackets hold 95% intervals of a "
            "bootstrap over documents."
        )
        notes = [sum_of_probabilities(self.deviation)]
        if self.bpb_carried is None:
            notes.append("There is no score with what came before (evaluation.carry_over: 0).")
        return Result(title="Bits per byte", rows=rows, legend=legend, metrics=metrics, notes=notes)

    @property
    def all_results(self) -> dict[str, Result]:
        """Return the scores and the results of the measurements, by name."""
        return {"score": self.score, **self.results}


class CheckpointScores(Record):
    """``checkpoints.json``: the scores of the kept checkpoints before the end of a stage."""

    FORMAT: ClassVar[int] = Evaluation.FORMAT
    WHAT: ClassVar[str] = "a file of scores of checkpoints"

    weights: str
    """Digest of the weights that the evaluation of the stage's end scores."""
    scores: list[Evaluation]
    """Evaluations by rising step, without results of measurements."""
    left_out: dict[str, str]
    """Why a checkpoint has no score, by the name of its folder."""

    def beside(self, end: Evaluation) -> list[Evaluation]:
        """Return the scores that stand beside the one of the stage's end: of its training, on its text."""
        same = self.weights == end.weights
        return [one for one in self.scores if same and one.text_sha256 == end.text_sha256]

    @classmethod
    def of(cls, folder: StageFolder, end: Evaluation) -> list[Evaluation]:
        """Return the scores in a stage's folder, if there are any, as `beside` does."""
        path = folder.checkpoint_scores
        return cls.read(path).beside(end) if path.exists() else []


class HarnessResult(Record):
    """``harness.json``: the result of lm-evaluation-harness for one checkpoint."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "a result of the harness"

    label: str
    """Name of the model, such as its run and stage."""
    weights: str
    """Digest of the model's weights."""
    versions: dict[str, str]
    """Versions of lm_eval and of the tasks."""
    window: int
    overlap: float
    result: Result


class Baselines(Record):
    """``baselines.json`` of a stage, and ``baselines/NAME.json`` of a text: rates of compressors."""

    WHAT: ClassVar[str] = "a file of baselines"

    text_sha256: str
    """Digest of the text that was coded; an evaluation of the same text names it too."""
    results: dict[str, Result]


def compression(record: CompressedRecord) -> Result:
    """Return the size of a compressed model and of its parts as a result."""
    sizes = {"cap": record.cap, "file": record.bytes, "code": record.code_bytes}
    columns = {title: Number(value=size, unit=BYTES) for title, size in sizes.items()}
    columns["clip"] = Number(value=record.clip)
    total = Row(
        name="bytes",
        label="bytes, with code",
        value=record.total_bytes,
        unit=BYTES,
        better="lower",
        columns=columns,
    )
    parts = ", ".join(f"{part} {size:,}" for part, size in record.parts.items() if size)
    used = record.settings
    notes = [
        f"Matrices in {used['bits']} bits by {used['method']}, tables in {used['embedding_bits']} bits.",
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
    return Result(title="Compressed model", rows=[total], notes=notes)


def results_of(folder: StageFolder, weights: str | None = None) -> dict[str, Result]:
    """Return all results in a folder, by name; with ``weights``, only those of these weights.

    ``folder`` is the folder of a stage, or of its compressed model, whose results include its size.
    """
    results: dict[str, Result] = {}
    stage = StageFolder(folder.path.parent) if isinstance(folder, CompressedFolder) else folder
    if folder.evaluation.exists():
        evaluation = Evaluation.read(folder.evaluation)
        if weights in (None, evaluation.weights):
            results |= _of_text(stage.baselines, evaluation.text_sha256) | evaluation.all_results
    if folder.harness.exists():
        harness = HarnessResult.read(folder.harness)
        if weights in (None, harness.weights):
            results["harness"] = harness.result
    if isinstance(folder, CompressedFolder) and folder.receipt.exists():
        receipt = CompressedReceipt.read(folder.receipt)
        if weights in (None, receipt.weights):
            results["compression"] = compression(receipt.compressed)
    return results


def _of_text(path: Path, text_sha256: str) -> dict[str, Result]:
    """Return the rates of compressors, if they are measured, and on this text."""
    found = Baselines.read(path) if path.exists() else None
    return found.results if found and found.text_sha256 == text_sha256 else {}


class Written(BaseModel, frozen=True):
    """A text that a model wrote after a prompt; an empty prompt is the start of a document."""

    prompt: str
    text: str


class Sample(Record):
    """``sample.json``: the text that one checkpoint wrote."""

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "a sample"

    run: str
    stage: str
    weights: str
    prompt: str
    text: str
    """The text after the prompt."""
    more: tuple[Written, ...] = ()
    """The texts after ``evaluation.prompts``, and then the ``unconditioned`` ones."""
