"""Load and call a checkpoint with MLflow: ``mlflow.pyfunc.load_model("models:/spider-ngram@best")``.

The store holds only a small file of a model, ``MLmodel``. It names this module, the path of the weights and
their digest. The weights are read from that path. So a stage takes a kilobyte of the store, and a model whose
weights are missing or changed is refused by name.

`describe` writes that file without importing torch. MLflow calls the rest when a model is loaded.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spider.common.errors import CheckpointError

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from pandas import DataFrame

    from spider.checkpoints.load import Checkpoint

TASKS = ("both", "generate", "score")
#: Options under ``params=``: the type in MLflow and the default.
PARAMS: dict[str, tuple[str, Any]] = {
    "task": ("string", TASKS[0]),
    "max_bytes": ("long", 200),
    "temperature": ("double", 0.8),
    "seed": ("long", 0),
    "context": ("long", 0),
    "each": ("boolean", False),
}
_COLUMNS = {"text": "string", "log_probability": "double", "bytes": "long", "bits_per_byte": "double"}


def describe(folder: Path, model: LoggedModel, config: dict[str, str]) -> None:
    """Write the ``MLmodel`` of a checkpoint into a folder.

    Args:
        config: the arguments of `_load_pyfunc`: ``model`` (run/stage), the digest of its ``weights``, and
            their path on this machine, ``checkpoint``.
    """
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import add_to_model
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string")]),  # no name: a list, or the first column of a frame
        outputs=Schema([ColSpec(kind, name) for name, kind in _COLUMNS.items()]),
        params=ParamSchema([ParamSpec(name, kind, value) for name, (kind, value) in PARAMS.items()]),
    )
    described = Model(
        artifact_path=model.artifact_location,
        model_uuid=model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id,
        signature=signature,
    )
    add_to_model(described, __name__, model_config=config)
    described.save(str(folder / "MLmodel"))


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> Predictor:
    """Load a model for MLflow.

    Args:
        path: the downloaded folder of the model.
        model_config: the ``config`` of `describe`, with the changes of the caller.

    Raises:
        CheckpointError: the weights are missing or changed.
    """
    from spider.checkpoints.load import Checkpoint

    name = model_config["model"]
    weights = model_config["weights"]
    source = Path(model_config["checkpoint"])
    remedies = (
        "Name the present path of the checkpoint, its stage's folder or an export: load_model(..., "
        "model_config={'checkpoint': PATH}). If the results folder was moved, run "
        "`spider track sync`"
    )
    if not source.exists():
        raise CheckpointError(
            f"{source}: no such file or folder on this machine; it should hold the weights of {name}, "
            f"{weights}. {remedies}"
        )
    checkpoint = Checkpoint.at(source)
    if checkpoint.weights != weights:
        raise CheckpointError(
            f"{source}: has other weights, {checkpoint.weights}, than those of {name}, {weights}. {remedies}"
        )
    return Predictor(checkpoint)


class Predictor:
    """A loaded checkpoint that continues texts and scores them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from spider.processes.device import available

        self.checkpoint = checkpoint
        self.model = checkpoint.model(available())

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> DataFrame:
        """Return a row for each text of a list, a series, or the first column of a frame.

        Args:
            params: values of `PARAMS`. ``task``: ``generate``, ``score`` or ``both``.

                generate: ``text`` is the continuation of at most ``max_bytes``, sampled at ``temperature``
                with ``seed``. The model reads ``context`` ids (0: as in its evaluation).

                score: ``log_probability`` in nats, ``bytes`` and ``bits_per_byte`` of the text. With
                ``each``, ``log_probabilities`` of its ids too.

        Raises:
            ValueError: the task does not exist, a row is not text, or a prompt is longer than the window.
        """
        import pandas

        options = {name: value for name, (_, value) in PARAMS.items()} | (params or {})
        task = options["task"]
        if task not in TASKS:
            raise ValueError(f"task: {', '.join(TASKS[:-1])} or {TASKS[-1]} (got {task!r})")
        texts = model_input.iloc[:, 0] if isinstance(model_input, pandas.DataFrame) else model_input
        rows: list[dict[str, Any]] = []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a text is needed in each row (got {text!r})")
            row: dict[str, Any] = {}
            if task != "score":
                row["text"] = self._continued(text, options)
            if task != "generate":
                row |= self._scored(text, options["each"])
            rows.append(row)
        return pandas.DataFrame(rows)

    def _continued(self, text: str, options: dict[str, Any]) -> str:
        from spider.evaluation.generate import generate, stream_text

        ids = generate(
            self.model,
            text,
            n_loops=self.checkpoint.reading.n_loops,
            context=options["context"] or self.checkpoint.reading.seq_len,
            max_bytes=options["max_bytes"],
            temperature=options["temperature"],
            seed=options["seed"],
        )
        return "".join(stream_text(ids, self.model.tokens))

    def _scored(self, text: str, each: bool) -> dict[str, Any]:
        """Score a text like the evaluation of its stage; the bits per byte of an empty text are NaN."""
        from spider.evaluation.bpb import score

        ids_N = self.model.tokens.encode(text.encode())[:-1]  # without the end of the document
        row: dict[str, Any] = {"log_probability": 0.0, "bytes": 0, "bits_per_byte": math.nan}
        by_id: list[float] = []
        if len(ids_N) > 1:
            found = score(self.model, ids_N, self.checkpoint.reading)
            row = {"log_probability": 0.0 - found.nats["byte"], "bytes": found.counts["byte"]}
            row["bits_per_byte"] = found.bpb
            by_id = (-found.by_target_S).tolist()
        return row | ({"log_probabilities": by_id} if each else {})
