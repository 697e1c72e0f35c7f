"""Checkpoints: directories that are whole or absent, verified before use, and free of code.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights, written by torch.distributed.checkpoint (DCP)
        model-00002-of-00002.safetensors    the optimizer's state
        model.safetensors.index.json        which tensor lies in which file
        manifest.json                       written last: step, spec, ..., the hashes of the files and its own

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``; where a stage averages its
weights, the average stands in a third file as ``ema.{parameter}``, and is what is evaluated. They go
through DCP (so that each of several processes reads only its slices) but through its safetensors storage, not
its default one: the default keeps its index in ``.metadata``, which DCP reads with a plain ``pickle.load``,
and that would run whatever a checkpoint someone gave you says. All that is not a tensor stands in the
manifest as JSON. One process writes, whole tensors: a checkpoint does not tell how many trained.

A checkpoint is written into a hidden sibling, flushed to disk, and renamed. It is deleted the other way
round: renamed to a hidden name, then removed. So whatever the moment of a kill, a directory named
``step-...`` was complete once; that it still is, the hashes tell.

An exported folder (`spider.checkpoints.export`) is read as a checkpoint too: its ``config.json`` is the
manifest, it holds weights only, and their names lack the ``model.``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from spider import files

log = logging.getLogger(__name__)

# One process is what `no_dist` says; the reminder would come with every save.
warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")

FORMAT = 2
MANIFEST = "manifest.json"
EXPORTED = "config.json"
_NAME = re.compile(r"step-\d+")
_HIDDEN = re.compile(r"\.step-\d+\..*")
_FILE_BYTES = 2 << 30
AVERAGE = "ema."


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the path and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose contents were checked against its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def exported(self) -> bool:
        """Whether it is a folder of weights made by export or import."""
        return is_exported(self.path)

    @property
    def label(self) -> str:
        """Where it comes from, in a few words."""
        run, stage = self.manifest["run"], self.manifest["stage"]
        return f"{run}, stage {stage}" if stage else run


# ----------------------------------------------------------------------------------------------- writing


def save(root: Path, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> Checkpoint:
    """Write ``root/step-{record["global_step"]}`` and return it.

    Args:
        root: the stage's ``checkpoints`` folder.
        tensors: ``model.*``, ``optimizer.*`` and ``ema.*``, on any device.
        record: what the manifest says besides its files: plain JSON with ``step`` and ``global_step``.

    Raises:
        CheckpointError: the file system refused; nothing of the attempt is left, earlier ones are untouched.
    """
    final = root / f"step-{record['global_step']:08d}"
    hidden = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
        _write_tensors(hidden, tensors)
        averaged = {
            "model." + n.removeprefix(AVERAGE): t for n, t in tensors.items() if n.startswith(AVERAGE)
        }
        digests = {
            "weights": weights_digest(tensors),
            "averaged_weights": weights_digest({**tensors, **averaged}) if averaged else None,
        }
        manifest = seal(hidden, MANIFEST, {"format": FORMAT, **record, **digests})
        if final.exists():
            _remove(final)
        os.rename(hidden, final)
        files.fsync_dir(root)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        needed = sum(t.numel() * t.element_size() for t in tensors.values())
        raise CheckpointError(
            f"{final}: saving failed: {error.strerror or error}; it needs {needed:,} bytes, "
            f"{free_bytes(root):,} are free. Earlier checkpoints are intact: make room and run again to go on"
        ) from error
    return Checkpoint(final, manifest)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """One DCP save; a failure inside it surfaces as the OSError that caused it."""
    file_of: dict[str, int] = {}
    index, filled, previous = 1, 0, ""
    for name, tensor in tensors.items():
        size, kind = tensor.numel() * tensor.element_size(), name.partition(".")[0]
        if filled and (filled + size > _FILE_BYTES or kind != previous):
            index, filled = index + 1, 0
        file_of[name] = index
        filled, previous = filled + size, kind
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*assuming the intent is to save in a single process.*"
            )
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    except dcp.CheckpointException as error:
        raise _cause(error) from error
    for file in folder.glob("*.safetensors"):
        _sort_header(file)


def _sort_header(file: Path) -> None:
    """Equal states give equal files: safetensors writes its free-form metadata in random order."""
    with open(file, "r+b") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(text) == length, "the sorted header has another length"
        f.seek(8)
        f.write(text)


def _cause(error: dcp.CheckpointException) -> Exception:
    for failure, _ in error.failures.values():
        if isinstance(failure, Exception):
            return failure
    return CheckpointError(str(error))


def seal(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a folder of tensor files: write its manifest with their sizes and hashes, and flush everything.

    A checkpoint's manifest is hashed too: a flipped bit in a position does as much harm as one in a weight.
    An exported folder's may be edited.

    Returns:
        the manifest as it was written.
    """
    listed = {
        file.name: {"size": file.stat().st_size, "sha256": files.sha256(file)}
        for file in sorted(folder.iterdir())
    }
    manifest = {**manifest, "files": listed}
    if name == MANIFEST:
        manifest["digest"] = files.digest(manifest)
    files.write_json(folder / name, manifest)
    for file in folder.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    files.fsync_dir(folder)
    return manifest


def free_bytes(path: Path) -> int:
    """Bytes free on the disk that will hold ``path``."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the ``model.*`` tensors' names, types, shapes and bytes, whatever files they lie in."""
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        t = tensors[name].detach()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def retain(root: Path, keep_last: int, keep_every: int | None = None, began: int = 0) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and every ``keep_every``-th step's; called right
    after a save, whose result is among those kept.

    Args:
        began: the run's step at which the stage began; ``keep_every`` counts from there, as saving does.
    """
    for path in steps(root)[:-keep_last]:
        if not keep_every or (_step(path) - began) % keep_every:
            _remove(path)


def clean(root: Path) -> None:
    """Remove what a killed process left behind under hidden names. Only for the holder of the run folder's
    lock."""
    for path in root.glob(".step-*"):
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def quarantine(path: Path) -> Path:
    """Move a bad checkpoint out of the numbered ones, so that retention does not take it for a good one."""
    aside = path.with_name(f"corrupt-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


# ----------------------------------------------------------------------------------------------- reading


def steps(root: Path) -> list[Path]:
    """The checkpoints below ``root``, oldest first, by number."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def is_exported(path: Path) -> bool:
    """Whether a folder is an exported one rather than a checkpoint, by what it holds."""
    return (path / EXPORTED).is_file() and not (path / MANIFEST).exists()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint, its hashes not yet checked.

    Raises:
        CheckpointError: missing, malformed, or of another format version.
    """
    try:
        manifest = files.read_json(path / (EXPORTED if is_exported(path) else MANIFEST))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {version!r}, this Spider reads {FORMAT}; use the version that "
            "wrote it, or name another folder"
        )
    return manifest


def verify(path: Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: says which files differ, and how.
    """
    manifest = read_manifest(path)
    if found := damage(path, manifest):
        raise CheckpointError("\n".join(found))
    return Checkpoint(path, manifest)


def damage(path: Path, manifest: dict[str, Any], *, quick: bool = False) -> list[str]:
    """Each file that is not as the manifest says, and how; ``quick`` compares sizes, not contents."""
    said = {key: value for key, value in manifest.items() if key != "digest"}
    if not is_exported(path) and manifest.get("digest") != files.digest(said):
        return [f"{path / MANIFEST}: its contents do not match its digest"]
    found = []
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            found.append(f"{file}: missing")
        elif (size := file.stat().st_size) != expected["size"]:
            found.append(f"{file}: {size:,} bytes, the manifest says {expected['size']:,}")
        elif not quick and files.sha256(file) != expected["sha256"]:
            found.append(f"{file}: its contents do not match the manifest's SHA-256")
    return found


def newest_good(root: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint that verifies, and the newer ones that did not, each named in a warning."""
    bad: list[Path] = []
    for path in reversed(steps(root)):
        try:
            return verify(path), bad
        except CheckpointError as error:
            log.warning("damaged checkpoint, looking for the one before: %s", error)
            bad.append(path)
    return None, bad


def load_into(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Copy the saved tensors of these names into these tensors, in place.

    Raises:
        CheckpointError: the checkpoint is of another architecture; names the tensors that differ.
    """
    prefix = "" if checkpoint.exported else "model."
    if checkpoint.exported:
        tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    saved = reader.read_metadata().state_dict_metadata
    problems = [f"it has no {name}" for name in tensors if name not in saved]
    problems += [f"this model has no {n}" for n in saved if n.startswith(prefix) and n not in tensors]
    for name in tensors.keys() & saved.keys():
        there, here = list(getattr(saved[name], "size", ())), list(tensors[name].shape)
        if there != here:
            problems.append(f"{name} is {there} there and {here} in this model")
    if problems:
        shown = "; ".join(sorted(problems)[:3]) + (f"; and {len(problems) - 3} more" if problems[3:] else "")
        raise CheckpointError(f"{checkpoint.path}: a checkpoint of another architecture: {shown}")
    dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


def holds_optimizer(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the checkpoint has exactly this optimizer state (names; another optimizer has others)."""
    saved = HuggingFaceStorageReader(str(checkpoint.path)).read_metadata().state_dict_metadata
    return {n for n in saved if n.startswith("optimizer.")} == {
        n for n in tensors if n.startswith("optimizer.")
    }


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one once) and persistent buffers, as ``model.{name}``."""
    kept = model.state_dict()
    named = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
    return {f"model.{name}": tensor.detach() for name, tensor in named.items()}
