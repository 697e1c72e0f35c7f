"""Weights that leave Spider and weights that come in: export, and import of ``.pt`` files.

An exported folder is what other programs can read without Spider::

    model.safetensors              named as in the model's ``state_dict()``; above 5 GB in numbered shards,
                                   with model.safetensors.index.json beside them
    config.json                    written last: format, architecture, where the weights come from, and the
                                   files' sizes and SHA-256
    tokenizer.json                 what its ids stand for, where that was learned
    tokenizer_config.json          how transformers reads that, and spider_hf.py, the code with which it reads
                                   all of it: `spider.hf.exported`
    README.md                      the model card (`spider.report.card`), for people, who may edit it: it is
                                   carried along and never verified, and one that was edited is never replaced
    memory/                        of a model that reads one: the folded memory, as `spider.memory.store` has
                                   it, whose digest config.json names

It holds no optimizer state, and equal weights and records give equal bytes. Written beside its place, flushed
and renamed, it is read like a checkpoint (`spider.checkpoints.load.Checkpoint`).

Import reads the ``.pt`` layout of the first Spider (``model_state_dict``, ``optimizer_state_dict``, ``step``,
``epoch``, ``cfg``, ``best_loss``) and writes such a folder, if the tensors are a model's by name and shape. A
``.pt`` file is a pickle, and a pickle can carry code: it is read with ``weights_only``, which builds tensors
and plain values and refuses all else. That Spider pickled its configuration as an object of its own class;
here an empty stand-in takes its place, and the class is never imported.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from spider import files
from spider.checkpoints.load import Checkpoint, some
from spider.checkpoints.records import CARD, EXPORTED, MEMORY, Exported
from spider.checkpoints.save import room, seal
from spider.config import ConfigError, ModelConfig
from spider.config.model import family_block
from spider.errors import CheckpointError
from spider.hf import exported as hf
from spider.model import build_model
from spider.model.interface import Model
from spider.model.weights import model_tensors, weights_digest
from spider.report.card import Subject, card, is_edited
from spider.results import ArtifactFolder, Results, root_of
from spider.tokens import BYTES
from spider.tokens.stored import TOKENIZER
from spider.version import VERSION

log = logging.getLogger(__name__)

_SHARD_BYTES = 5_000_000_000
#: What DDP and torch.compile put before the names of a state dict.
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")


def export(source: Path, output: Path) -> Checkpoint:
    """Write the model of a checkpoint (or stage folder, receipt, exported folder) into the folder ``output``.
    Raises `CheckpointError` where nothing good is there, or ``output`` holds something else or refuses."""
    output = output.resolve()
    _check_replaceable(output)
    checkpoint = Checkpoint.at(source)
    model, manifest = checkpoint.model(), checkpoint.manifest
    known = manifest.model_fields_set - {"format", "spider", "model", "window", "weights", "files"}
    told = {name: getattr(manifest, name) for name in Exported.model_fields if name in known}
    told |= {"window": manifest.window}
    memory = model.proposer.memory.folder if model.proposer else None
    text = _card_of(checkpoint, model)
    tensors = model_tensors(model, "")
    return _write(output, model.config, tensors, told, lambda _: text, memory, checkpoint.tokenizer)


def _card_of(checkpoint: Checkpoint, model: Model) -> str:
    """The model card: that of a folder exported before, as it is there, else a new one."""
    manifest, path = checkpoint.manifest, checkpoint.path
    if (carried := _read_card(path)) is not None:
        return carried
    results = Results(root) if (root := root_of(path)) else None
    stage = results.stage(manifest.run, manifest.stage) if results and manifest.stage else None
    if path.is_file() and results:
        stage = ArtifactFolder(path.parent)
    size = sum(p.numel() for p in model.parameters())
    return card(Subject(manifest, checkpoint.weights, model.config, size, model.tokens, stage, results))


def _read_card(folder: Path) -> str | None:
    """The card in an exported folder; `CheckpointError` where it is no text."""
    try:
        return (folder / CARD).read_bytes().decode("utf-8") if (folder / CARD).is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / CARD}: is not UTF-8 ({error}); save it so, or delete it") from None


def _write(
    output: Path, config: ModelConfig, tensors: dict[str, Tensor], told: dict[str, Any],
    card_of: Callable[[str], str], memory: Path | None = None, tokenizer: bytes | None = None,
) -> Checkpoint:  # fmt: skip
    """Make the folder ``output`` of these tensors, what is known of them, the card made
    for their digest, the memory that they read, and the tokenizer that their ids are of."""
    weights = weights_digest({f"model.{name}": t for name, t in tensors.items()})
    text = card_of(weights)
    if (there := _read_card(output)) is not None and there != text and is_edited(there):
        log.warning("%s: was edited and is kept as it is; delete it to have it written anew", output / CARD)
        text = there
    beside, old = (files.hidden(output, end) for end in ("tmp", "old"))
    described = {
        "format": Exported.FORMAT,
        "spider": VERSION,
        "model": config.model_dump(mode="json"),
        **hf.keys(config.vocab_size),
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
        for name, content in hf.written(tokenizer, told["window"], told.get("conversations")).items():
            (beside / name).write_bytes(content)
        plain = seal(beside, EXPORTED, described)
        files.write_bytes(beside / CARD, text.encode())
        if memory is not None:
            _bring(memory, beside / MEMORY)
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


def _bring(memory: Path, folder: Path) -> None:
    from spider.memory.store import bring

    try:
        bring(memory, folder)
    except ValueError as error:
        raise CheckpointError(f"the memory that the model reads is damaged: {error}") from None


def _strange(output: Path) -> set[str]:
    """Names in an exported folder that no export wrote."""
    exported = Exported.read(output / EXPORTED)
    present = {file.name for file in output.glob("*")} - {EXPORTED, CARD, *exported.files}
    if exported.folded is None or not (output / MEMORY).is_dir():
        return present
    from spider.memory.store import names_in

    inside = {file.name for file in (output / MEMORY).glob("*")} - names_in(output / MEMORY)
    return (present - {MEMORY}) | {f"{MEMORY}/{name}" for name in inside}


def _check_replaceable(output: Path) -> None:
    """Only a folder that holds an export and nothing else may be replaced."""
    if output.is_file():
        raise CheckpointError(f"{output}: is a file; name a folder that is new or empty")
    present = {file.name for file in output.glob("*")}
    if present and not Exported.lies_in(output):
        raise CheckpointError(f"{output}: is not empty and not an exported folder; name another")
    if strange := present and _strange(output):
        raise CheckpointError(f"{output}: holds {min(strange)}, which no export wrote; name another folder")


def import_file(source: Path, output: Path) -> Checkpoint:
    """Bring a ``.pt`` file, or a folder that was exported before, into the folder ``output``. Raises
    `CheckpointError` where the file is missing, damaged, carries code, is of another layout or no model's, or
    ``output`` cannot be written."""
    if not source.exists():
        raise CheckpointError(f"{source}: no such file")
    if source.suffix == ".safetensors":
        if not Exported.lies_in(source.parent):
            raise CheckpointError(
                f"{source}: safetensors say nothing of the architecture; it must lie in an exported folder, "
                f"beside its {EXPORTED}"
            )
        source = source.parent
    if source.is_dir():
        return export(source, output)
    output = output.resolve()
    _check_replaceable(output)
    saved = _read_pt(source)
    state = _state_dict(source, saved)
    config, sizes = family_block({}), "its default sizes (the file's cfg is no model block)"
    if isinstance(saved.get("cfg"), dict):
        try:
            config, sizes = family_block(saved["cfg"]), "the sizes in its cfg"
        except (ConfigError, ValidationError) as error:
            log.warning("%s: its cfg is no model block: %s", source, error)
    with torch.device("meta"):
        expected = model_tensors(build_model(config), "")
    _check_complete(source, state, expected, f"family {config.family} with {sizes}")
    numbers = {name: _number(saved.get(name)) for name in ("step", "epoch", "best_loss")}
    # Copied: tensors that were tied there share their memory, and a file would hold one of them only.
    tensors = {name: state[name].to(t.dtype, copy=True) for name, t in expected.items()}
    told = {"window": None, "run": source.name, "stage": None, **numbers}
    return _write(output, config, tensors, told, partial(_card_of_import, config, tensors, told))


def _card_of_import(
    config: ModelConfig, tensors: dict[str, Tensor], told: dict[str, Any], weights: str
) -> str:
    """Of a file of which little is known."""
    plain = {"format": Exported.FORMAT, "spider": VERSION, "model": None, "weights": weights, "files": {}}
    size = sum(t.numel() for t in tensors.values())
    return card(Subject(Exported.model_validate(plain | told), weights, config, size, BYTES))


def _check_complete(source: Path, state: dict[str, Tensor], expected: dict[str, Tensor], whose: str) -> None:
    """Refuse tensors that are not a model's, one for one, by name, shape and kind."""

    def kind(tensor: Tensor) -> Any:
        return tensor.shape, "float" if tensor.is_floating_point() else tensor.dtype

    placed = {name for name in state.keys() & expected.keys() if kind(state[name]) == kind(expected[name])}
    homeless = [f"{name} {list(t.shape)}" for name, t in state.items() if name not in placed]
    missing = [name for name in expected if name not in placed]
    if homeless or missing:
        raise CheckpointError(
            f"{source}: not a model of {whose}: {len(homeless)} of its {len(state)} tensors have no place in "
            f"one ({some(homeless) or 'none'}), and {len(missing)} are missing ({some(missing) or 'none'}). "
            "Nothing was written"
        )


class _Settings:
    """Stands in for a pickled configuration; has no behaviour."""


def _read_pt(path: Path) -> dict[str, Any]:
    """The mapping in a ``.pt`` file, its tensors still on disk (memory-mapped)."""
    _check_archive(path)
    saved = None
    try:
        unknown = get_unsafe_globals_in_checkpoint(path)
        inert = [name for name in unknown if name.rpartition(".")[2] == "SpiderConfig"]
        if not (refused := sorted(set(unknown) - set(inert))):
            with safe_globals([(_Settings, name) for name in inert]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of storage types that torch no longer likes
                saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # The unpickler meets malformed bytes with whatever exception they lead to.
        raise CheckpointError(
            f"{path}: refused, it is not a checkpoint of tensors and plain values "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0] or 'no details'})"
        ) from None
    if refused:
        raise CheckpointError(
            f"{path}: refused, nothing of it was run: it holds more than tensors and plain values, it names "
            f"{', '.join(refused[:3])}{' and more' if refused[3:] else ''}. Such a pickle can run any code "
            "when it is loaded. If you trust where it comes from, load it there and save model_state_dict, "
            "step and the configuration as plain values"
        )
    if not isinstance(saved, dict) or not isinstance(saved.get("model_state_dict"), dict):
        held = f"the keys {', '.join(map(str, saved))}" if isinstance(saved, dict) else type(saved).__name__
        raise CheckpointError(f"{path}: of another layout: a model_state_dict is needed, it holds {held}")
    return saved


def _check_archive(path: Path) -> None:
    """Refuse what torch.save did not write, or not to the end, before anything looks inside. It makes a zip
    archive without compression; one that unpacks to more than its size is a trap."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = any(e.compress_type != zipfile.ZIP_STORED for e in entries)
            trap = packed or sum(e.file_size for e in entries) > path.stat().st_size
            damaged = None if trap else archive.testzip()
    except Exception as error:
        # zipfile meets malformed bytes with more than BadZipFile: UnicodeDecodeError, OSError, ...
        raise CheckpointError(
            f"{path}: not a whole file written by torch.save ({error}); older or plain pickles are not read. "
            "If it is a download, fetch it again"
        ) from None
    if trap:
        raise CheckpointError(f"{path}: refused: a compressed archive, torch.save writes none")
    if damaged:
        raise CheckpointError(f"{path}: damaged: {damaged} in it does not match its checksum; fetch it again")


def _state_dict(path: Path, saved: dict[str, Any]) -> dict[str, Tensor]:
    """The model's tensors under their names without wrappers; refuses what is no plain tensor, or claims more
    elements than the file holds."""
    state: dict[str, Tensor] = {}
    for key, tensor in saved["model_state_dict"].items():
        name = _WRAPPERS.sub("", str(key))
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: refused: {name} in its model_state_dict is not a plain tensor")
        state[name] = tensor.detach()
    total, size = sum(tensor.nbytes for tensor in state.values()), path.stat().st_size
    if not state or total > 2 * size:  # a tied tensor stands there twice and is stored once
        raise CheckpointError(
            f"{path}: refused: its model_state_dict claims {total:,} bytes of tensors, the file has {size:,}"
        )
    return state


def _number(value: Any) -> int | float | None:
    """A count or a loss as JSON has it; None where it is absent or not finite."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int | float) and math.isfinite(value) else None
