"""The JSON files that measuring leaves: `evaluation.json`, `harness.json` and `sample.json`.

Tables, pages and figures are made from these files alone. Their readers need neither the model nor torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from spider.evaluation import result
from spider.evaluation.result import BITS, Result, Row
from spider.record import Record
from spider.results import StageFolder


class Training(BaseModel, frozen=True):
    """The part of the stage's receipt that reports show."""

    steps: int
    global_step: int
    tokens: int
    bytes: int
    seconds: float


class Evaluation(Record):
    """One checkpoint, measured on one text; ``index`` is the place of the stage in its run."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "an evaluation"
    REMEDY: ClassVar[str] = "evaluate again"

    run: str
    stage: str
    index: int
    bpb: float
    bpb_strict: float
    bpb_assistant: float | None = None
    """Bits per byte of the assistant's answers, for a text of conversations."""
    learn: Literal["all", "assistant"] = "all"
    """What the stage learned of its text: all of it, or the assistant's answers."""
    bytes: int
    documents: int
    seconds: float
    bytes_per_second: float
    nats: dict[str, float]
    targets: dict[str, int]
    data: str
    data_digest: str
    text_sha256: str
    lossless: bool = True
    """False if the text is what a published tokenizer left of the original."""
    seq_len: int
    overlap: float
    n_loops: int
    device: str
    precision: str
    checkpoint: str
    averaged: bool
    weights: str
    ngram: str | None = None
    """Digest of the n-gram index that the model read."""
    global_step: int
    training: Training
    model: dict[str, float]
    """The model's own metrics, averaged over windows."""
    parameters: int
    parameters_by_part: dict[str, int]
    parameters_looked_up: int
    """Parameters in tables of which a token reads some rows: they cost no FLOPs."""
    flops_per_token: float
    """FLOPs of training, forward and backward, at the window and depth of the stage."""
    results: dict[str, Result] = {}  # noqa: RUF012
    """What the measurements found, by their names."""

    @property
    def context(self) -> str:
        """Return how many ids before it a target was predicted from: ``64 to 256``."""
        window = f"{int(self.seq_len * self.overlap)} to {self.seq_len}"
        return window if self.ngram is None else f"{window} (n-gram index: document)"

    @property
    def score(self) -> Result:
        """Return the scores of the model on the text as a result."""
        named = {"bpb": ("bits per byte", self.bpb), "bpb_strict": ("strict", self.bpb_strict)}
        if self.bpb_assistant is not None:
            named["bpb_assistant"] = ("of answers", self.bpb_assistant)
        rows = [
            Row(name=name, label=label, value=value, unit=BITS, better="lower")
            for name, (label, value) in named.items()
        ]
        further = {"bytes": self.bytes, "bytes_per_second": self.bytes_per_second}
        further |= {f"model/{name}": value for name, value in self.model.items()}
        if not self.lossless:
            further["lossless"] = 0
        legend = (
            "Bits per byte: nats of the bytes' predictions / (ln 2 x bytes), lower is better; strict also "
            "counts what predicting the documents' ends and beginnings costs."
        )
        return Result(title="Bits per byte", rows=rows, legend=legend, metrics=further)

    @property
    def all_results(self) -> dict[str, Result]:
        """Return the scores and what the measurements found, by name."""
        return {"score": self.score, **self.results}

    @property
    def metrics(self) -> dict[str, float]:
        """Return all numbers for MLflow by name."""
        return result.metrics(self.all_results)


class HarnessResult(Record):
    """``harness.json``: the answers of one checkpoint to tasks of lm-evaluation-harness."""

    FORMAT: ClassVar[int] = 2
    WHAT: ClassVar[str] = "a result of the harness"
    REMEDY: ClassVar[str] = "run `spider harness` again"

    label: str
    """Where the model comes from."""
    weights: str
    """Digest of the model's weights."""
    versions: dict[str, str]
    """Versions of lm_eval and of the tasks."""
    window: int
    overlap: float
    result: Result


def further_results(folder: StageFolder, weights: str | None = None) -> dict[str, Result]:
    """Return the results that have files of their own beside an evaluation, by name.

    With ``weights``, a result of other weights is left out.
    """
    if not folder.harness.exists():
        return {}
    asked = HarnessResult.read(folder.harness)
    return {"harness": asked.result} if weights in (None, asked.weights) else {}


class Sample(Record):
    """``sample.json``: the text that one checkpoint wrote."""

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "a sample"
    REMEDY: ClassVar[str] = "sample again"

    run: str
    stage: str
    weights: str
    prompt: str
    text: str
    """The text after the prompt."""
