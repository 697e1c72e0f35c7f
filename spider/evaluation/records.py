"""Define the JSON files of measurements: `evaluation.json`, `sample.json`, and any other file with results.

Tables, pages and figures are made from these files alone. Reading them needs neither the model nor torch.

Any JSON file in the folder of a stage is shown by all views if it holds a `Result` as ``result``, which has
the name of the file, or several by name as ``results``. ``weights``, if the file has it, is the digest of the
weights that they are of, and ``evaluation`` the SHA-256 of the file ``evaluation.json`` that they are about.
With ``text_sha256`` they are about a held-out text, and shown with any score on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from spider.common import files
from spider.common.record import Record, key_path
from spider.common.results import CompressedFolder, StageFolder
from spider.evaluation.result import BITS, COUNT, SECONDS, SIZE, Number, Result, Row

#: Mark of scores on decoded text, and its explanation.
DAGGER = "†"
LOSSY = (
    f"{DAGGER} of decoded text: the tokenizer does not keep newlines and runs of spaces. Compare this score "
    "only with others on the same decoded text."
)
_RESULTS = TypeAdapter(dict[str, Result])


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
                column=name != "bpb_strict",
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
        if not self.lossless:
            notes.append(LOSSY)
        return Result(title="Bits per byte", rows=rows, legend=legend, metrics=metrics, notes=notes)

    @property
    def all_results(self) -> dict[str, Result]:
        """Return the scores and the results of the measurements, by name."""
        return {"score": self.score, **self.results}

    def facts(self, before: Training | None) -> Result:
        """Return what a table of models shows beside the scores; ``before`` is the training before the stage.

        A model that others trained has no costs.
        """
        costs = {}
        if self.training.steps:
            costs = {
                "trained on": Number(value=self.training.bytes + (before.bytes if before else 0), unit=SIZE),
                "time": Number(value=self.training.seconds + (before.seconds if before else 0), unit=SECONDS),
                "steps": Number(value=self.training.global_step),
            }
        shown = {"parameters": Number(value=self.parameters, unit=COUNT), **costs}
        shown["context"] = Number(value=None, text=self.context)
        rows = [
            Row(name=f"facts/{label}", label=label, column=True, **one.model_dump())
            for label, one in shown.items()
        ]
        return Result(title="Training", rows=rows)


class CheckpointScores(Record):
    """``checkpoints.json``: the scores of checkpoints of a stage, up to its end, on a sample of its text."""

    FORMAT: ClassVar[int] = Evaluation.FORMAT
    WHAT: ClassVar[str] = "a file of scores of checkpoints"

    weights: str
    """Digest of the weights that the evaluation of the stage's end scores."""
    scores: list[Evaluation]
    """Evaluations by rising step, without results of measurements."""
    left_out: dict[str, str]
    """Why a checkpoint has no score, by the name of its folder."""

    @classmethod
    def of(cls, folder: StageFolder, end: Evaluation) -> list[Evaluation]:
        """Return the scores in a stage's folder of the same training as its ``end``."""
        found = cls.read(folder.checkpoint_scores) if folder.checkpoint_scores.exists() else None
        return found.scores if found and found.weights == end.weights else []


class Baselines(Record):
    """``baselines.json`` of a stage, and ``baselines/NAME.json`` of a text: rates of compressors."""

    WHAT: ClassVar[str] = "a file of baselines"

    text_sha256: str
    """Digest of the text that was coded; an evaluation of the same text names it too."""
    results: dict[str, Result]


def results_of(folder: StageFolder, weights: str | None = None) -> dict[str, Result]:
    """Return all results in the folder of a stage, or of its compressed model, by name.

    Args:
        weights: leave out results that are of other weights.

    Raises:
        ValueError: a file is damaged.
    """
    own: dict[str, Result] = {}
    text = None
    if folder.evaluation.exists():
        evaluation = Evaluation.read(folder.evaluation)
        text = evaluation.text_sha256
        own = evaluation.all_results if weights in (None, evaluation.weights) else {}
    found: dict[str, Result] = {}
    if isinstance(folder, CompressedFolder) and text:
        for path in sorted(folder.path.parent.glob("*.json")):
            found |= results_in(path, weights, text=text, of_text=True)
    for path in sorted(folder.path.glob("*.json")):
        if path != folder.evaluation:
            found |= results_in(path, weights, text=text)
    return own | {name: one for name, one in found.items() if name not in own}


def results_in(
    path: Path, weights: str | None = None, *, text: str | None = None, of_text: bool = False
) -> dict[str, Result]:
    """Return the results in a JSON file by name, none if it is a file of another kind; raise as `results_of`.

    The badges of results about another evaluation than the one that is there now are stale.

    Args:
        text: leave out results about another text.
        of_text: leave out results that are not about a text.
    """
    plain = files.read_json(path, Record.REMEDY.format(command=files.snakemake(path)))
    if not isinstance(plain, dict) or not plain.keys() & {"result", "results"}:
        return {}
    if weights is not None and plain.get("weights", weights) != weights:
        return {}
    if plain.get("text_sha256", None if of_text else text) != text:
        return {}
    try:
        found = _RESULTS.validate_python(plain.get("results") or {path.stem: plain["result"]})
    except ValidationError as error:
        first = error.errors()[0]
        remedy = Record.REMEDY.format(command=files.snakemake(path))
        raise ValueError(
            f"{path}: not a result ({key_path(first['loc'])}: {first['msg']}); {remedy}"
        ) from None
    scored = path.with_name("evaluation.json")
    if "evaluation" in plain and not (scored.is_file() and files.sha256(scored) == plain["evaluation"]):
        return {name: _stale(one) for name, one in found.items()}
    return found


def _stale(result: Result) -> Result:
    """Return a result whose badges say that they are of another evaluation than the one of today."""

    def of_today(row: Row) -> Row:
        note = f"{row.note}; it is of another evaluation than the one of today"
        return row.model_copy(update={"text": "stale", "tone": "bad", "note": note}) if row.tone else row

    return result.model_copy(update={"rows": [of_today(row) for row in result.rows]})


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
    """The texts after the other ``evaluation.prompts``, and then the ``unconditioned`` ones."""
