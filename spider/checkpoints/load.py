"""A trained model by any of its names: which checkpoint a path means, and the model in it.

A path names a checkpoint, an exported folder, a stage's folder (its newest good checkpoint), or a stage's
receipt ``train.json``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch.distributed.checkpoint import HuggingFaceStorageReader

from spider import files
from spider.checkpoints.format import (
    AVERAGE,
    EXPORTED,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    is_exported,
    load_into,
    model_tensors,
    newest_good,
    verify,
)
from spider.config import ConfigError, ModelConfig, family_config
from spider.model import build_model
from spider.model.interface import Model


def locate(path: Path) -> Path:
    """The checkpoint directory meant by a checkpoint directory, an exported folder, a stage folder, or a
    stage's ``train.json``.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_file():
        receipt = files.read_json(path) if path.suffix == ".json" else None
        if not isinstance(receipt, dict) or "checkpoint" not in receipt:
            raise CheckpointError(
                f"{path}: not a training receipt; give a checkpoint, a stage folder, or its train.json"
            )
        return path.parent / receipt["checkpoint"]
    if (path / "checkpoints").is_dir():
        return _newest(path).path
    if (path / MANIFEST).is_file() or is_exported(path):
        return path
    raise CheckpointError(f"{path}: neither a checkpoint, nor a stage folder, nor an exported folder")


def find(path: Path) -> Checkpoint:
    """The checkpoint that `locate` means, every file of it checked, and checked once.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return _newest(path) if (path / "checkpoints").is_dir() else verify(locate(path))


def _newest(stage: Path) -> Checkpoint:
    good, _ = newest_good(stage / "checkpoints")
    if good is None:
        raise CheckpointError(f"{stage / 'checkpoints'}: no usable checkpoint; train the stage first")
    return good


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture of the model that a checkpoint or an exported folder holds.

    Only that is read of what a manifest says: settings of training may have changed their names since.

    Raises:
        CheckpointError: described in words that this Spider does not know, or imported and not a Spider.
    """
    manifest = checkpoint.manifest
    described = manifest["model"] if checkpoint.exported else manifest["spec"]["model"]
    if described is None:
        raise CheckpointError(
            f"{checkpoint.path}: imported tensors that do not form a Spider; {EXPORTED} there says which "
            "have a place in one and which do not"
        )
    try:
        return family_config(described.get("family", "spider")).model_validate(described)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("model", *first["loc"]))
        raise CheckpointError(
            f"{checkpoint.path}: a checkpoint of another architecture or of another version of Spider "
            f"({key}: {first['msg']})"
        ) from None


def window_of(checkpoint: Checkpoint) -> int:
    """Bytes to give the model at a time: those it is evaluated with, 1,024 where nobody knows."""
    if checkpoint.exported:
        return checkpoint.manifest["window"] or 1024
    spec = checkpoint.manifest["spec"]
    return spec["evaluation"]["seq_len"] or spec["settings"]["seq_len"]


def model_of(checkpoint: Checkpoint, device: str | torch.device = "cpu") -> Model:
    """The model that a checkpoint holds, in evaluation mode; of averaged weights, if it holds an average.

    Raises:
        CheckpointError: the checkpoint is not of the architecture that it says.
    """
    model = build_model(config_of(checkpoint)).to(device)
    load_into(checkpoint, model_tensors(model))
    if checkpoint.manifest.get("averaged_weights"):
        averaged = {AVERAGE + n: p.detach() for n, p in model.named_parameters()}
        dcp.load(averaged, storage_reader=HuggingFaceStorageReader(str(checkpoint.path)), no_dist=True)
    return model.eval()


def load_model(path: Path | str, device: str | torch.device = "cpu") -> tuple[Model, ModelConfig]:
    """The model of a checkpoint directory, of an exported folder, of a stage folder (its newest good
    checkpoint), or of a ``train.json``.

    Returns:
        the model in evaluation mode, and its configuration.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, or one of another architecture.
    """
    model = model_of(find(Path(path)), device)
    return model, model.config
