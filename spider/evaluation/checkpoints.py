"""Score the kept checkpoints before the end of a stage, on the held-out text of the evaluation.

Only bits per byte are computed. Each score is one file in the stage's folder ``scores/``, so a killed job
scores no checkpoint twice. The name of the file is a digest of the checkpoint, the text and the settings.
The text is read once, and each model once.
"""

from __future__ import annotations

import logging
from pathlib import Path

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, Receipt, steps
from spider.config import StageSpec
from spider.evaluation.evaluate import HeldOut
from spider.evaluation.records import CheckpointScores, Evaluation
from spider.files import digest
from spider.results import StageFolder

log = logging.getLogger(__name__)


def evaluate_checkpoints(
    folder: StageFolder,
    spec: StageSpec,
    data: Path,
    *,
    device: str | None = None,
) -> CheckpointScores:
    """Score the checkpoints that ``evaluation.checkpoints`` chooses (null: all), and write checkpoints.json.

    The file names each checkpoint that is damaged or whose loss is not finite, with the reason.

    Args:
        spec: The stage, which is trained.
        data: Shards folder of ``spec.evaluation.data``.
        device: Device to run on (default: the GPU if there is one).

    Raises:
        ValueError: The receipt is of another stage or format, the checkpoint at the end of the stage is
            missing, or the validation text is empty.
    """
    trained = Receipt.of_stage(folder.receipt, spec)
    end = Checkpoint.at(folder.receipt)
    held_out = HeldOut.of(spec, data, end.tokens, device)
    scores: list[Evaluation] = []
    left_out: dict[str, str] = {}
    for path in _chosen(folder, end.path, spec.evaluation.checkpoints):
        try:
            file = _scored(path, folder, held_out)
        except ValueError as error:
            log.warning("%s has no score: %s", path.name, error)
            left_out[path.name] = str(error)
            continue
        scores.append(Evaluation.read(file))
        log.info("%s: %.4f bits per byte", path.name, scores[-1].bpb)
    weights = trained.averaged_weights or trained.weights
    found = CheckpointScores(
        format=CheckpointScores.FORMAT, weights=weights, scores=scores, left_out=left_out
    )
    return found.write(folder.checkpoint_scores)


def _chosen(folder: StageFolder, end: Path, every: int | str | None) -> list[Path]:
    """Return every k-th of the kept checkpoints before ``end``, or all, and log which ones."""
    kept = [path for path in steps(folder.checkpoints) if path != end]
    nth = every if isinstance(every, int) else 1
    chosen = kept[nth - 1 :: nth]
    if chosen:
        names = ", ".join(path.name for path in chosen)
        log.info(
            "scoring %d of the %d kept checkpoints before %s: %s", len(chosen), len(kept), end.name, names
        )
    elif kept:
        log.warning(
            "%s: no checkpoint is scored, because only %d are kept before %s and "
            "evaluation.checkpoints is %s. Lower it, or keep more (keep_every) before the stage is trained",
            folder.checkpoints,
            len(kept),
            end.name,
            every,
        )
    else:
        log.warning(
            "%s: no checkpoint is scored, because none before %s is kept. Save and keep more with "
            "ckpt_every and keep_every, before the stage is trained",
            folder.checkpoints,
            end.name,
        )
    return chosen


def _scored(path: Path, folder: StageFolder, held_out: HeldOut) -> Path:
    """Score a checkpoint, unless its file exists, and return that file."""
    settings = held_out.spec.evaluation.changed(include=set(held_out.spec.evaluation.BPB))
    made_of = [Evaluation.FORMAT, Manifest.read(path / MANIFEST).digest, held_out.data_digest, settings]
    file = folder.scores / f"{digest(made_of)}.json"
    if not file.exists():
        receipt = _receipt(path, folder)
        model = Checkpoint.at(path).model(held_out.device)
        scored, carried = held_out.score(model, held_out.reading(receipt))
        held_out.evaluation(receipt, model, scored, carried).write(file)
    return file


def _receipt(path: Path, folder: StageFolder) -> Receipt:
    """Return what the receipt of the stage would be if it had ended with this checkpoint."""
    return Receipt.of(Manifest.read(path / MANIFEST), path.relative_to(folder.path).as_posix())
