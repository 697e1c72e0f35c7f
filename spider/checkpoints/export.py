"""Weights that leave Spider and weights that come in: export, and import of ``.pt`` files.

An exported folder is what other programs can read without Spider::

    model.safetensors              named as in ``Spider.state_dict()``; above 5 GB in numbered shards,
                                   with model.safetensors.index.json beside them
    config.json                    written last: format, architecture, where the weights come from, and the
                                   files' sizes and SHA-256

It holds no optimizer state, and equal weights give equal bytes. It is read like a checkpoint
(`spider.checkpoints.format`): `spider.load_model`, ``spider generate`` and ``spider checkpoint verify`` take
one as well as the other. It is written beside its place, flushed and renamed.

Import reads the ``.pt`` layout of the first Spider (``model_state_dict``, ``optimizer_state_dict``, ``step``,
``epoch``, ``cfg``, ``best_loss``) and writes such a folder. A ``.pt`` file is a pickle, and a pickle can
carry code: it is read with ``weights_only``, which builds tensors and plain values and refuses all else. That
Spider pickled its configuration as an object of its own class; here an empty stand-in takes the attributes,
and the class is never imported. Tensors that are a Spider's by name and shape become a model. Those of
another model become a folder that can be looked at and verified, not loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import spider
from spider import files
from spider.checkpoints import format as ckpt
from spider.checkpoints.format import EXPORTED, Checkpoint, CheckpointError
from spider.checkpoints.load import find, model_of, window_of
from spider.config import ModelConfig
from spider.model import build_model
from spider.model.spider.config import SpiderConfig

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_SHARD_BYTES = 5_000_000_000

#: What config.json repeats of a checkpoint's manifest.
_ORIGIN = (
    "run",
    "stage",
    "identity",
    "step",
    "global_step",
    "tokens",
    "bytes",
    "loss",
    "best_loss",
    "data_digest",
)
#: What config.json says of itself and its files.
_WRITTEN = ("format", "spider", "weights", "files")
#: What DDP and torch.compile put before the names of a state dict.
_WRAPPERS = ("module.", "_orig_mod.")


# ------------------------------------------------------------------------------------------------- export


def export(source: Path, output: Path) -> Checkpoint:
    """Write the model of a checkpoint (or stage folder, receipt, exported folder) into the folder ``output``.

    Raises:
        CheckpointError: nothing good to export there, ``output`` holds something else, or cannot be written.
    """
    output = output.resolve()
    _check_replaceable(output)
    found = find(source)
    model = model_of(found)
    if found.exported:
        card = {key: value for key, value in found.manifest.items() if key not in _WRITTEN}
    else:
        card = {"model": model.config.model_dump(mode="json"), "window": window_of(found)}
        card |= {name: found.manifest[name] for name in _ORIGIN}
    return _write(output, _named(model), card)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by their names in its state dict, a tied one once."""
    return {name.removeprefix("model."): tensor for name, tensor in ckpt.model_tensors(model).items()}


def _write(output: Path, tensors: Mapping[str, Tensor], card: dict[str, Any]) -> Checkpoint:
    """Make the folder ``output``: these tensors, and ``card`` with their digest and the files' hashes."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(parents=True)
        shards = list(_shards(tensors))
        names = [WEIGHTS] if len(shards) == 1 else _numbered(len(shards))
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, beside / name, metadata={"format": "pt"})
            # safetensors makes files that only their owner can read; whoever may enter the folder may read.
            (beside / name).chmod(beside.stat().st_mode & 0o666)
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            files.write_json(
                beside / INDEX, {"metadata": {"total_size": _size(tensors)}, "weight_map": weight_map}
            )
        digest = ckpt.weights_digest({f"model.{name}": t for name, t in tensors.items()})
        head = {"format": ckpt.FORMAT, "spider": spider.__version__}
        manifest = ckpt.seal(beside, EXPORTED, {**head, **card, "weights": digest})
        _replace(output, beside)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(
            f"{output}: cannot be written: {why or error}; it needs {_size(tensors):,} bytes, "
            f"{ckpt.free_bytes(output.parent):,} are free. Nothing was left there or changed"
        ) from error
    return Checkpoint(output, manifest)


def _check_replaceable(output: Path) -> None:
    """Only a folder that holds an export and nothing else may be replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise CheckpointError(f"{output}: is a file; name a folder that is new or empty")
    present = {file.name for file in output.iterdir()}
    if present and not ckpt.is_exported(output):
        raise CheckpointError(f"{output}: is not empty and not an exported folder; name another")
    strange = present - {EXPORTED, *(ckpt.read_manifest(output)["files"] if present else ())}
    if strange:
        raise CheckpointError(f"{output}: holds {min(strange)}, which no export wrote; name another folder")


def _replace(output: Path, beside: Path) -> None:
    """Put a finished folder in its place. Between the two renames a kill leaves the old one under a hidden
    name: a directory cannot be swapped for another in one portable step."""
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    if output.exists():
        os.rename(output, old)
    os.rename(beside, output)
    files.fsync_dir(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in pieces of at most `_SHARD_BYTES` each (a larger tensor alone)."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and _size(shard) + _size({name: tensor}) > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _numbered(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


# ------------------------------------------------------------------------------------------------- import


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Imported tensors beside the tensors of a Spider.

    Attributes:
        homes: for each imported tensor its name in the Spider, None where it has no place there.
        missing: tensors of the Spider that were not among them.
    """

    homes: dict[str, str | None]
    missing: list[str]

    @property
    def complete(self) -> bool:
        return not self.missing and None not in self.homes.values()


def import_file(source: Path, output: Path) -> tuple[Checkpoint, Comparison | None]:
    """Bring a ``.pt`` file, or a folder that was exported before, into the folder ``output``.

    Returns:
        the folder, and for a ``.pt`` file what became of its tensors; where that is not ``complete`` the
        folder is no model.

    Raises:
        CheckpointError: the file is missing, damaged, carries code or is of another layout, or ``output``
            cannot be written.
    """
    output = output.resolve()
    if not source.exists():
        raise CheckpointError(f"{source}: no such file")
    if source.suffix == ".safetensors":
        if not ckpt.is_exported(source.parent):
            raise CheckpointError(
                f"{source}: safetensors say nothing of the architecture; it must lie in an exported folder, "
                f"beside its {EXPORTED}"
            )
        source = source.parent
    if source.is_dir():
        return export(source, output), None
    _check_replaceable(output)
    saved = _read_pt(source)
    state = _state_dict(source, saved)
    config = _config(saved.get("cfg"))
    with torch.device("meta"):
        expected = _named(build_model(config))
    found = _compare(state, expected)
    card: dict[str, Any] = {
        "model": config.model_dump(mode="json") if found.complete else None,
        "window": None,
        "run": source.name,
        "stage": None,
        **{name: _number(saved.get(name)) for name in ("step", "epoch", "best_loss")},
    }
    if found.complete:
        return _write(output, {name: state[name].to(t.dtype) for name, t in expected.items()}, card), found
    card["cfg"] = _plain(saved.get("cfg"))
    card["tensors"] = {
        name: {
            "dtype": str(t.dtype),
            "shape": list(t.shape),
            "home": found.homes[name],
        }
        for name, t in state.items()
    }
    card["missing"] = found.missing
    # Tied tensors share their memory, which safetensors would refuse.
    return _write(output, {name: t.clone() for name, t in state.items()}, card), found


class _Settings:
    """Stands in for a pickled configuration: takes the attributes, has no behaviour."""


def _read_pt(path: Path) -> dict[str, Any]:
    """The mapping in a ``.pt`` file, its tensors still on disk (memory-mapped)."""
    _check_archive(path)
    try:
        unknown = get_unsafe_globals_in_checkpoint(path)
        inert = [name for name in unknown if name.rpartition(".")[2] == "SpiderConfig"]
        if refused := sorted(set(unknown) - set(inert)):
            raise CheckpointError(
                f"{path}: refused, nothing of it was run: it holds more than tensors and plain values, it "
                f"names {', '.join(refused[:3])}{' and more' if refused[3:] else ''}. Such a pickle can run "
                "any code when it is loaded. If you trust where it comes from, load it there and save "
                "model_state_dict, step and the configuration as plain values"
            )
        with safe_globals([(_Settings, name) for name in inert]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storage types that torch no longer likes
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # The unpickler meets malformed bytes with whatever exception they lead to.
        raise CheckpointError(
            f"{path}: refused, it is not a checkpoint of tensors and plain values "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'})"
        ) from None
    if not isinstance(saved, dict) or not isinstance(saved.get("model_state_dict"), dict):
        held = f"the keys {', '.join(map(str, saved))}" if isinstance(saved, dict) else type(saved).__name__
        raise CheckpointError(f"{path}: of another layout: a model_state_dict is needed, it holds {held}")
    return saved


def _check_archive(path: Path) -> None:
    """Refuse what torch.save did not write, or not to the end, before anything looks inside.

    torch.save makes a zip archive without compression. One that unpacks to more than its size is a trap.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            entries = archive.infolist()
            packed = any(e.compress_type != zipfile.ZIP_STORED for e in entries)
            trap = packed or sum(e.file_size for e in entries) > size
            damaged = None if trap else archive.testzip()
        except Exception as error:
            # zipfile meets malformed bytes with more than BadZipFile: UnicodeDecodeError, OSError, ...
            raise CheckpointError(
                f"{path}: not a whole file written by torch.save ({error}); older or plain pickles are not "
                "read. If it is a download, fetch it again"
            ) from None
    if trap:
        raise CheckpointError(f"{path}: refused: a compressed archive, torch.save writes none")
    if damaged:
        raise CheckpointError(f"{path}: damaged: {damaged} in it does not match its checksum; fetch it again")


def _state_dict(path: Path, saved: dict[str, Any]) -> dict[str, Tensor]:
    """The model's tensors under their names without wrappers.

    Raises:
        CheckpointError: something in it is no plain tensor, or claims more elements than the file holds.
    """
    state: dict[str, Tensor] = {}
    for key, tensor in saved["model_state_dict"].items():
        name = str(key)
        while wrapper := next((w for w in _WRAPPERS if name.startswith(w)), None):
            name = name.removeprefix(wrapper)
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or _size({name: tensor}) > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: refused: {name} in its model_state_dict is not a plain tensor")
        state[name] = tensor.detach()
    # A tied tensor stands there twice and is stored once.
    if not state or _size(state) > 2 * path.stat().st_size:
        raise CheckpointError(
            f"{path}: refused: its model_state_dict claims {_size(state):,} bytes of tensors, the file has "
            f"{path.stat().st_size:,}"
        )
    return state


def _config(cfg: Any) -> ModelConfig:
    """The architecture to compare with: the file's own where it is one of ours, else spider-1b."""
    try:
        return SpiderConfig.model_validate(cfg)
    except ValidationError:
        return SpiderConfig()


def _compare(state: dict[str, Tensor], expected: dict[str, Tensor]) -> Comparison:
    def fits(name: str, tensor: Tensor) -> bool:
        home = expected.get(name)
        if home is None or home.shape != tensor.shape:
            return False
        return home.dtype == tensor.dtype or (home.is_floating_point() and tensor.is_floating_point())

    homes = {name: name if fits(name, tensor) else None for name, tensor in state.items()}
    return Comparison(homes, sorted(expected.keys() - homes.values()))


def _number(value: Any) -> int | float | None:
    """A count or a loss as JSON has it; None where it is absent or not finite."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """A foreign configuration as JSON: what is no plain value is written as its ``str``."""
    if isinstance(value, _Settings):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return _number(value) if isinstance(value, float) else str(value)
