"""Export of a model: a folder that other programs can read without Spider.

Its files::

    model.safetensors              named as in the model's ``state_dict()``; above 5 GB in numbered shards,
                                   with model.safetensors.index.json beside them
    config.json                    written last: format, architecture, where the weights come from, and the
                                   files' sizes and SHA-256
    tokenizer.json                 what its ids stand for, where that was learned
    tokenizer_config.json          how transformers reads that, and spider_hf.py, the code with which it reads
                                   all of it: `spider.checkpoints.transformers_files`
    README.md                      the model card (`spider.report.card`). People may edit it, so it is never
                                   verified, and an edited card is never replaced
    ngram/                         the full n-gram index (`spider.ngram.store`) of a model that reads one;
                                   config.json has its digest

It holds no optimizer state, and equal weights and records give equal bytes. Written beside its place, flushed
and renamed, it is read like a checkpoint (`spider.checkpoints.load.Checkpoint`), so it can be exported again.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from spider import files
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CARD, EXPORTED, NGRAM, Exported
from spider.checkpoints.save import room, seal
from spider.checkpoints.transformers_files import config_keys, files_beside
from spider.config import ModelConfig
from spider.errors import CheckpointError
from spider.model.interface import Model, model_tensors, weights_digest
from spider.report.card import Subject, card, is_edited
from spider.results import CompressedFolder, Results, root_of
from spider.tokens.stored import TOKENIZER
from spider.version import VERSION

log = logging.getLogger(__name__)

_SHARD_BYTES = 5_000_000_000


def export(source: Path, output: Path) -> Checkpoint:
    """Write the model of a checkpoint (or stage folder, receipt, exported folder) into the folder ``output``.

    Raises:
        CheckpointError: there is no good checkpoint, or ``output`` holds other files or cannot be written.
    """
    output = output.resolve()
    _check_replaceable(output)
    checkpoint = Checkpoint.at(source)
    model, manifest = checkpoint.model(), checkpoint.manifest
    known = manifest.model_fields_set - {"format", "spider", "model", "window", "weights", "files"}
    told = {name: getattr(manifest, name) for name in Exported.model_fields if name in known}
    told |= {"window": manifest.window}
    index = model.lookup.index.folder if model.lookup else None
    text = _card_of(checkpoint, model)
    tensors = model_tensors(model, "")
    return _write(output, model.config, tensors, told, text, index, checkpoint.tokenizer)


def _card_of(checkpoint: Checkpoint, model: Model) -> str:
    """Return the model card: the one in an exported folder as it is, otherwise a new one."""
    manifest, path = checkpoint.manifest, checkpoint.path
    if (carried := _read_card(path)) is not None:
        return carried
    results = Results(root) if (root := root_of(path)) else None
    stage = results.stage(manifest.run, manifest.stage) if results else None
    if path.is_file() and results:
        stage = CompressedFolder(path.parent)
    size = sum(p.numel() for p in model.parameters())
    return card(Subject(manifest, checkpoint.weights, model.config, size, model.tokens, stage, results))


def _read_card(folder: Path) -> str | None:
    """Return the card in an exported folder, or None; raise `CheckpointError` where it is not UTF-8."""
    try:
        return (folder / CARD).read_bytes().decode("utf-8") if (folder / CARD).is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / CARD}: is not UTF-8 ({error}); save it so, or delete it") from None


def _write(
    output: Path, config: ModelConfig, tensors: dict[str, Tensor], told: dict[str, Any],
    text: str, index: Path | None, tokenizer: bytes | None,
) -> Checkpoint:  # fmt: skip
    """Write the folder ``output``: the tensors, what is known of them, the text of the model card, the n-gram
    index that the model reads, and its tokenizer."""
    weights = weights_digest({f"model.{name}": t for name, t in tensors.items()})
    if (there := _read_card(output)) is not None and there != text and is_edited(there):
        log.warning("%s: was edited and is kept as it is; delete it to have it written anew", output / CARD)
        text = there
    beside, old = (files.hidden(output, end) for end in ("tmp", "old"))
    described = {
        "format": Exported.FORMAT,
        "spider": VERSION,
        "model": config.model_dump(mode="json"),
        **config_keys(config.vocab_size),
        **told,
        "weights": weights,
    }
    try:
        beside.mkdir(parents=True)
        save_torch_state_dict(tensors, beside, max_shard_size=_SHARD_BYTES)
        for file in beside.iterdir():
            # safetensors makes files that only their owner can read; whoever may enter the folder may read.
            file.chmod(beside.stat().st_mode & 0o666)
        if tokenizer is not None:
            (beside / TOKENIZER).write_bytes(tokenizer)
        for name, content in files_beside(tokenizer, told["window"], told.get("conversations")).items():
            (beside / name).write_bytes(content)
        plain = seal(beside, EXPORTED, described)
        files.write_bytes(beside / CARD, text.encode())
        if index is not None:
            _bring(index, beside / NGRAM)
        # A kill between the two renames leaves the old one under its hidden name: a directory cannot be
        # swapped for another in one portable step.
        if output.exists():
            os.rename(output, old)
        os.rename(beside, output)
        files.fsync_dir(output.parent)
        shutil.rmtree(old, ignore_errors=True)
    except CheckpointError:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{output}: cannot be written: {why}; {room(tensors, output.parent)}. "
            "Nothing was left there or changed"
        ) from error
    return Checkpoint(output, Exported.parse(plain, output / EXPORTED))


def _bring(index: Path, folder: Path) -> None:
    from spider.ngram.store import bring

    try:
        bring(index, folder)
    except ValueError as error:
        raise CheckpointError(f"the n-gram index that the model reads is damaged: {error}") from None


def _strange(output: Path) -> set[str]:
    """Return the names in an exported folder that an export did not write."""
    exported = Exported.read(output / EXPORTED)
    present = {file.name for file in output.glob("*")} - {EXPORTED, CARD, *exported.files}
    if exported.full_index is None or not (output / NGRAM).is_dir():
        return present
    from spider.ngram.store import names_in

    inside = {file.name for file in (output / NGRAM).glob("*")} - names_in(output / NGRAM)
    return (present - {NGRAM}) | {f"{NGRAM}/{name}" for name in inside}


def _check_replaceable(output: Path) -> None:
    """Raise `CheckpointError` unless ``output`` is new, empty, or an export without other files."""
    if output.is_file():
        raise CheckpointError(f"{output}: is a file; name a folder that is new or empty")
    present = {file.name for file in output.glob("*")}
    if present and not Exported.lies_in(output):
        raise CheckpointError(f"{output}: is not empty and not an exported folder; name another")
    if strange := present and _strange(output):
        raise CheckpointError(f"{output}: holds {min(strange)}, which no export wrote; name another folder")
