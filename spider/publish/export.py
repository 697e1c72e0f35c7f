"""Export a model as a folder that other programs can read without Spider.

Its files::

    model.safetensors    tensors, with the names of the model's ``state_dict()``; above 5 GB numbered shards
                         and model.safetensors.index.json
    config.json          format, architecture, origin of the weights, sizes and SHA-256 of the files
    tokenizer.json       the vocabulary, if the data has a learned one
    generation_config.json, tokenizer_config.json, spider_hf.py
                         files for transformers (`spider.publish.transformers_files`)
    README.md            the model card (`spider.report.card`). People may edit it, so it is never verified,
                         and an edited card is never replaced
    ngram/               the full n-gram index (`data.ngram.store`), if the model reads one; config.json has
                         its digest

The folder holds no optimizer state. Equal weights and records give equal bytes. It is a sealed folder
(`spider.common.sealed`) and is read like a checkpoint (`spider.checkpoints.load.Checkpoint`), so it can be
exported again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CARD, EXPORTED, NGRAM, Exported
from spider.checkpoints.save import space_needed
from spider.common import VERSION, files, sealed
from spider.common.errors import CheckpointError
from spider.common.results import CompressedFolder, Results, root_of
from spider.model.interface import Model, model_tensors, weights_digest
from spider.publish.transformers_files import config_keys, files_beside
from spider.report.card import Subject, card, is_edited
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)

_SHARD_BYTES = 5_000_000_000


def export(source: Path, output: Path) -> Checkpoint:
    """Write the model of a checkpoint (or stage folder, receipt, exported folder) into the folder ``output``.

    Raises:
        CheckpointError: a good checkpoint is missing, or ``output`` holds other files or cannot be written.
    """
    output = output.resolve()
    _check_replaceable(output)
    checkpoint = Checkpoint.at(source)
    model = checkpoint.model()
    return write_folder(
        output,
        model,
        origin=_origin(checkpoint),
        card_text=_card_of(checkpoint, model),
        tokenizer=checkpoint.tokenizer,
        index=model.lookup.index.folder if model.lookup else None,
    )


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe where the weights come from."""
    manifest = checkpoint.manifest
    other = {"format", "spider", "model", "window", "precision", "n_loops", "weights", "files"}
    known = manifest.model_fields_set - other
    fields = {name: getattr(manifest, name) for name in Exported.model_fields if name in known}
    reading = checkpoint.reading
    precision = "bf16" if reading.autocast else "fp32"
    return {**fields, "window": manifest.window, "precision": precision, "n_loops": reading.n_loops}


def write_folder(
    output: Path,
    model: Model,
    *,
    origin: dict[str, Any],
    card_text: str,
    tokenizer: bytes | None,
    index: Path | None,
) -> Checkpoint:
    """Write an exported folder; keep a model card in ``output`` that a person edited.

    Args:
        origin: the fields of `Exported` on the window and on where the weights come from.
        tokenizer: the content of ``tokenizer.json``, or None if the vocabulary is bytes.
        index: the n-gram index that the model reads, if it reads one.

    Raises:
        CheckpointError: the folder cannot be written, or the index is damaged.
    """
    tensors = model_tensors(model, "")
    fields = {
        "format": Exported.FORMAT,
        "spider": VERSION,
        "model": model.config.model_dump(mode="json"),
        **config_keys(model.config.vocab_size),
        **origin,
        "weights": weights_digest({f"model.{name}": tensor for name, tensor in tensors.items()}),
    }
    card_text = _keep_edited(output, card_text)
    try:
        with sealed.writing(output) as beside:
            save_torch_state_dict(tensors, beside, max_shard_size=_SHARD_BYTES)
            for file in beside.iterdir():
                # safetensors makes files that only their owner can read; take the folder's permissions.
                file.chmod(beside.stat().st_mode & 0o666)
            if tokenizer is not None:
                (beside / TOKENIZER).write_bytes(tokenizer)
            extra = files_beside(tokenizer, origin["window"], origin.get("conversations"))
            for name, content in extra.items():
                (beside / name).write_bytes(content)
            plain = sealed.seal(beside, EXPORTED, fields, digest=False)
            files.write_bytes(beside / CARD, card_text.encode())
            if index is not None:
                _link_index(index, beside / NGRAM)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"{output}: cannot be written: {reason}; {space_needed(needed, output.parent)}. "
            "Nothing was left there or changed"
        ) from error
    return Checkpoint(output, Exported.parse(plain, output / EXPORTED))


def _card_of(checkpoint: Checkpoint, model: Model) -> str:
    """Return the model card: the card in an exported folder as it is, otherwise a new one."""
    existing = _read_card(checkpoint.path)
    if existing is not None:
        return existing
    manifest = checkpoint.manifest
    root = root_of(checkpoint.path)
    results = Results(root) if root else None
    stage = results.stage(manifest.run, manifest.stage) if results else None
    if checkpoint.path.is_file() and results:
        stage = CompressedFolder(checkpoint.path.parent)
    size = sum(p.numel() for p in model.parameters())
    return card(Subject(manifest, checkpoint.weights, model.config, size, model.tokens, stage, results))


def _keep_edited(output: Path, new: str) -> str:
    """Return the card in the folder ``output`` if a person edited it, otherwise the ``new`` card."""
    existing = _read_card(output)
    if existing is None or existing == new or not is_edited(existing):
        return new
    log.warning("%s: was edited and is kept as it is; delete it to get a new one", output / CARD)
    return existing


def _read_card(folder: Path) -> str | None:
    """Return the card in an exported folder, or None; raise `CheckpointError` if it is not UTF-8."""
    if not (folder / CARD).is_file():
        return None
    try:
        return (folder / CARD).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{folder / CARD}: is not UTF-8 ({error}); save it as UTF-8, or delete it"
        ) from None


def _link_index(index: Path, folder: Path) -> None:
    from spider.data.ngram.store import link  # imports numba, which only some models need

    try:
        link(index, folder)
    except ValueError as error:
        raise CheckpointError(f"the n-gram index that the model reads is damaged: {error}") from None


def _foreign_files(output: Path) -> set[str]:
    """Return the names in an exported folder that an export did not write."""
    exported = Exported.read(output / EXPORTED)
    foreign = {file.name for file in output.glob("*")} - {EXPORTED, CARD, *exported.files}
    index = output / NGRAM
    if exported.full_index is None or not index.is_dir():
        return foreign
    from spider.data.ngram.store import names_in

    inside = {file.name for file in index.glob("*")} - names_in(index)
    return (foreign - {NGRAM}) | {f"{NGRAM}/{name}" for name in inside}


def _check_replaceable(output: Path) -> None:
    """Raise `CheckpointError` unless ``output`` is new, empty, or an export without other files."""
    if output.is_file():
        raise CheckpointError(f"{output}: is a file; name a folder that is new or empty")
    if not any(output.glob("*")):
        return
    if not Exported.lies_in(output):
        raise CheckpointError(f"{output}: is not empty and not an exported folder; name another")
    if foreign := _foreign_files(output):
        raise CheckpointError(f"{output}: holds {min(foreign)}, which no export wrote; name another folder")
