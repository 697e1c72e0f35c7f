"""A checkpoint as MLflow loads and calls it: ``mlflow.pyfunc.load_model("models:/demo@best")``.

What the store keeps of a model is one small file, ``MLmodel``. It names this module, and says where the
weights lie and what their digest is; they are read from there, wherever they were not copied beside it. So a
stage costs the store a kilobyte, and a model whose weights are gone or were exchanged is refused by name.

`describe` writes that file, without torch; MLflow calls the rest in the process of whoever loads the model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spider.errors import CheckpointError

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from pandas import DataFrame

    from spider.checkpoints.load import Checkpoint

TASKS = ("both", "generate", "score")
#: What may be given under ``params=``: MLflow's type, and the default.
PARAMS: dict[str, tuple[str, Any]] = {
    "task": ("string", TASKS[0]),
    "max_bytes": ("long", 200),
    "temperature": ("double", 0.8),
    "seed": ("long", 0),
    "context": ("long", 0),
    "each": ("boolean", False),
}
_COLUMNS = {"text": "string", "log_probability": "double", "bytes": "long", "bits_per_byte": "double"}


def describe(folder: Path, made: LoggedModel, **told: str) -> None:
    """Write the ``MLmodel`` of a checkpoint, with what `_load_pyfunc` is told: whose it is (``model``:
    run/stage), the digest of its ``weights``, and where they are: ``copied``, a path in the model's own
    folder, goes before ``checkpoint``, one of this machine."""
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import add_to_model
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string")]),  # without a name: a list, or a frame's first column
        outputs=Schema([ColSpec(kind, name) for name, kind in _COLUMNS.items()]),
        params=ParamSchema([ParamSpec(name, kind, value) for name, (kind, value) in PARAMS.items()]),
    )
    described = Model(
        artifact_path=made.artifact_location, model_uuid=made.model_id, model_id=made.model_id,
        run_id=made.source_run_id, signature=signature,
    )  # fmt: skip
    add_to_model(described, __name__, model_config=told)
    described.save(str(folder / "MLmodel"))


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> Predictor:
    """Called by MLflow, with the downloaded folder and what `describe` told, changed by what the person who
    loads says; `CheckpointError` where the weights are not there, or others."""
    from spider.checkpoints.load import Checkpoint

    whose, weights = (model_config[name] for name in ("model", "weights"))
    place, copied = Path(model_config["checkpoint"]), Path(path) / model_config["copied"]
    place = copied if model_config["copied"] and copied.exists() else place
    ways_out = (
        "Name the checkpoint, its stage's folder or an export, where it is now: load_model(..., model_config="
        "{'checkpoint': PATH}). Of a results folder that was moved, delete tracking/sent.json, then `spider "
        "track sync`. With `tracking: {copy_weights: true}` the store keeps the weights itself"
    )
    if not place.exists():
        raise CheckpointError(
            f"{place}: no such file or folder on this machine; the weights of {whose}, {weights}, are read "
            f"from there. {ways_out}"
        )
    checkpoint = Checkpoint.at(place)
    if checkpoint.weights != weights:
        raise CheckpointError(
            f"{place}: other weights, {checkpoint.weights}, than those of {whose}, {weights}, lie there now. "
            f"{ways_out}"
        )
    return Predictor(checkpoint)


class Predictor:
    """A loaded checkpoint that continues texts and scores them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch

        self.checkpoint = checkpoint
        self.model = checkpoint.model("cuda" if torch.cuda.is_available() else "cpu")

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> DataFrame:
        """A row for each text, of a list, a series, or a frame's first column.

        Args:
            params: of `PARAMS`. ``task`` generate: ``text``, how the model goes on, in ``max_bytes`` at most,
                drawn at ``temperature`` by ``seed``, reading ``context`` ids (0: as evaluated). score:
                ``log_probability``, in nats, of the given ``bytes``, and ``bits_per_byte``; with ``each``,
                ``log_probabilities`` of its ids one by one. both: both.

        Raises:
            ValueError: no such task, what is not text, or a text to go on from that exceeds the window.
        """
        import pandas

        asked = {name: value for name, (_, value) in PARAMS.items()} | (params or {})
        if (task := asked["task"]) not in TASKS:
            raise ValueError(f"task: {', '.join(TASKS[:-1])} or {TASKS[-1]} (got {task!r})")
        texts = model_input.iloc[:, 0] if isinstance(model_input, pandas.DataFrame) else model_input
        rows: list[dict[str, Any]] = []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a text is needed in each row (got {text!r})")
            row = {} if task == "score" else {"text": self._continued(text, asked)}
            rows.append(row | ({} if task == "generate" else self._scored(text, asked["each"])))
        return pandas.DataFrame(rows)

    def _continued(self, text: str, asked: dict[str, Any]) -> str:
        from spider.evaluation.generate import generate, stream_text

        how = {name: asked[name] for name in ("max_bytes", "temperature", "seed")}
        n_loops, context = self.checkpoint.reading["n_loops"], asked["context"] or self.checkpoint.window
        ids = generate(self.model, text, n_loops=n_loops, context=context, **how)
        return "".join(stream_text(ids, self.model.tokens))

    def _scored(self, text: str, each: bool) -> dict[str, Any]:
        """Read as its stage evaluates it; an empty text costs nothing, at no rate."""
        from spider.evaluation.bpb import score

        ids_N = self.model.tokens.encode(text.encode())[:-1]  # its end is not asked for
        nats, size, bpb, by_id = 0.0, 0, math.nan, list[float]()
        if len(ids_N) > 1:
            found = score(self.model, ids_N, seq_len=self.checkpoint.window, **self.checkpoint.reading)
            nats, size, bpb = found.nats["byte"], found.counts["byte"], found.bpb
            by_id = (-found.by_target_S).tolist()
        row = {"log_probability": 0.0 - nats, "bytes": size, "bits_per_byte": bpb}
        return row | ({"log_probabilities": by_id} if each else {})
