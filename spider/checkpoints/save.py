"""Save checkpoints: folders that are whole or absent, and that hold no code. `load` reads them.

    checkpoints/step-00000100/
        model-00001-of-00002.safetensors    the weights
        model-00002-of-00002.safetensors    the state of the optimizer
        model.safetensors.index.json        the file of each tensor
        tokenizer.json                      the vocabulary, if the data has a learned one
        manifest.json                       step, spec, ..., the hashes of the files and its own digest
    checkpoints/best                        a link to the checkpoint that validated best, which is kept

Tensors are named ``model.{parameter}`` and ``optimizer.{parameter}.{state}``. If a stage averages its
weights, a third file holds the average as ``ema.{parameter}``, and evaluation reads that. One process writes
whole tensors, and each of several processes reads only its slices. So a checkpoint does not depend on the
number of processes.

torch's distributed checkpoints (DCP) also do this, but their import takes as long as half of torch's, in
every job. Their default storage keeps its index in a pickle, and reading a pickle runs the code in it.

A checkpoint is a sealed folder (`spider.common.sealed`). A process can be killed at any moment: a folder
named ``step-...`` was complete once. Its hashes show whether it is still complete.

Writing takes seconds, and training continues meanwhile with its own tensors and with the interpreter. Files
are hashed while they are written. The digest of the weights is another hash of the same bytes. So weights and
their average are hashed twice, and the optimizer's state once.

Training waits only while `Saver` copies the state and looks for numbers that are not finite. The copy takes
its size once more in host memory, which is reused for the next save. It is pinned for a GPU, because copies
into pinned memory are several times as fast. The first save of a training is slower, because it allocates
this memory, rounded up to a power of two for each tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from spider.checkpoints.load import AVERAGE, Checkpoint, not_finite
from spider.checkpoints.records import BEST, INDEX, MANIFEST, NEWEST, Manifest, best, step_of, steps
from spider.common import files, sealed
from spider.common.errors import CheckpointError, Diverged
from spider.config import StageSettings
from spider.model.interface import raw_bytes, weights_digest
from spider.processes.parallel import full_tensor
from spider.processes.world import ALONE, World
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)

_FILE_BYTES = 2 << 30


class Saver:
    """Save checkpoints into ``root`` in the background, and delete those that ``settings`` does not keep.

    Of several processes the first one writes, and the others take part in gathering the tensors that they
    hold. At most one save is in progress. Its error is raised at the next step after its end. A kill before
    its end leaves the checkpoint before it as the newest.

    Attributes:
        newest: the newest checkpoint on disk, as far as this process has noticed.
        begun: the run's step of the last save that was begun, in every process.
    """

    def __init__(
        self,
        root: Path,
        settings: StageSettings,
        newest: Checkpoint | None,
        world: World = ALONE,
        tokenizer: Path | None = None,
    ) -> None:
        self.root = root
        self.newest = newest
        self.begun: int | None = newest.manifest.global_step if newest else None
        self._settings = settings
        self._world = world
        self._tokenizer = tokenizer
        self._copies: dict[str, Tensor] = {}
        # Lower the priority of the thread, so that it does not slow the steps. Only a Linux thread has a
        # priority of its own; elsewhere ``nice`` would slow the whole process.
        nice: dict[str, Any] = {"initializer": os.nice, "initargs": (10,)} if sys.platform == "linux" else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", **nice)
        self._pending: Future[Checkpoint] | None = None

    def start(self, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Copy the tensors and begin to save the copy; wait for the save before it first.

        Raises:
            Diverged: in every process, if a tensor is not finite. Nothing is saved then.
        """
        self.settle()
        began = time.perf_counter()
        self.begun = record["global_step"]
        # The saver's thread does not check, because OpenMP would start threads for it that slow every step.
        if wrong := not_finite(self._copy(tensors)):
            raise Diverged(f"the state is {wrong}")
        if not self._world.first:
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        copies = {name: self._copies[name] for name in tensors}
        self._pending = self._thread.submit(self._save, copies, record, began)

    def _copy(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Copy each tensor to the host, in the first process, and yield it whole in every process."""
        for name, tensor in tensors.items():
            gathered = full_tensor(tensor.detach())
            if self._world.first:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(gathered, device="cpu", pin_memory=gathered.is_cuda)
                self._copies[name].copy_(gathered, non_blocking=True)
            yield name, gathered

    def _save(self, tensors: dict[str, Tensor], record: dict[str, Any], started: float) -> Checkpoint:
        saved = save(self.root, tensors, record, self._tokenizer)
        megabytes = sum(file.stat().st_size for file in saved.path.iterdir()) / 1e6
        seconds = time.perf_counter() - started
        log.info("checkpoint saved: %s, %.1f MB, %.1f s", saved.path, megabytes, seconds)
        began = record["global_step"] - record["step"]
        retain(self.root, self._settings.keep_every, began)
        return saved

    def settle(self, *, wait: bool = True) -> None:
        """Update ``newest`` if the save in progress has ended, or wait for its end; raise its error."""
        if self._pending is not None and (wait or self._pending.done()):
            pending = self._pending
            self._pending = None
            self.newest = pending.result()

    def close(self) -> None:
        """Wait for the save in progress, and ignore its error."""
        self._thread.shutdown(wait=True)


def save(
    root: Path, tensors: Mapping[str, Tensor], record: dict[str, Any], tokenizer: Path | None = None
) -> Checkpoint:
    """Save a checkpoint as ``root/step-{record["global_step"]}``.

    Args:
        tensors: the tensors, by their names in the checkpoint.
        record: the fields of the manifest that describe the training.
        tokenizer: the ``tokenizer.json`` to copy into it.

    Raises:
        CheckpointError: the file system refuses. Nothing of the attempt remains, and earlier checkpoints are
            intact.
    """
    folder = root / f"step-{record['global_step']:08d}"
    try:
        with sealed.writing(folder) as beside:
            hashed = _write_tensors(beside, tensors)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, beside / TOKENIZER)
            fields = {"format": Manifest.FORMAT, **record, **_digests(tensors), "files": hashed}
            plain = sealed.seal(beside, MANIFEST, fields, digest=True)
            manifest = Manifest.parse(plain, beside / MANIFEST)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: saving failed: {error.strerror or error}; {space_needed(tensors, root)}. "
            f"Earlier checkpoints are intact: free some space and run again to continue"
        ) from error
    return Checkpoint(folder, manifest)


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Return the digests of the weights and of the averaged weights, if there are any."""
    averaged = {n.replace(AVERAGE, "model.", 1): t for n, t in tensors.items() if n.startswith(AVERAGE)}
    return {
        "weights": weights_digest(tensors),
        "averaged_weights": weights_digest({**tensors, **averaged}) if averaged else None,
    }


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, sealed.SealedFile]:
    """Write each kind of tensors into files of its own, and the index of all files; return the former."""
    parts: list[dict[str, Tensor]] = []
    filled = 0
    previous = ""
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        if kind != previous or filled + tensor.nbytes > _FILE_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
        previous = kind
    file_of: dict[str, str] = {}
    hashed: dict[str, sealed.SealedFile] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        hashed[file] = _write_file(folder / file, part)
        file_of |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
    return hashed


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> sealed.SealedFile:
    """Write the bytes that `safetensors.torch.save` returns, and hash them on the way.

    That function would hold the interpreter for seconds while it copies the tensors twice. It gives the order
    of the tensors and the names of their types here, from one value of each.
    """
    example = safetensors.torch.save({name: tensor.new_zeros(1) for name, tensor in tensors.items()})
    entries = json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    h = hashlib.sha256(head)
    with open(path, "wb") as file:
        file.write(head)
        for name in entries:
            content = raw_bytes(tensors[name])
            file.write(content)
            h.update(content)
    return sealed.SealedFile(size=len(head) + end, sha256=h.hexdigest())


def space_needed(tensors: Mapping[str, Tensor], folder: Path) -> str:
    """Return how many bytes the tensors need and how many are free, for an error message."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed = sum(t.nbytes for t in tensors.values())
    return f"it needs {needed:,} bytes, {shutil.disk_usage(existing).free:,} are free"


def retain(root: Path, keep_every: int | None = None, began: int = 0) -> None:
    """Delete checkpoints; keep the `NEWEST`, the best, and those of each ``keep_every``-th step.

    Steps count from ``began``, the run's step at the beginning of the stage, as for saving.
    """
    kept = link_best(root)
    for path in steps(root)[:-NEWEST]:
        if path != kept and (not keep_every or (step_of(path) - began) % keep_every):
            sealed.remove(path)


def link_best(root: Path) -> Path | None:
    """Point the link ``best`` at the best checkpoint; return that checkpoint, or None if there is none.

    `best` chooses it by the manifests. After a kill the next save or start corrects the link.
    """
    found = best(root)
    path = found[0] if found else None
    link = root / BEST
    beside = root / f".{BEST}.tmp"
    try:
        if path is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != path.name:
            beside.unlink(missing_ok=True)
            beside.symlink_to(path.name)
            os.replace(beside, link)
    except OSError as error:
        log.warning(
            "%s: cannot be linked (%s); `spider checkpoint ls` shows the best checkpoint",
            link, error.strerror,
        )  # fmt: skip
    return path


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to ``{why}-{name}``, so that nothing takes it for a good one."""
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    link_best(path.parent)
    return aside


def clean(root: Path) -> None:
    """Remove the hidden folders of a killed process. Only the holder of the folder's lock may call it."""
    for path in root.glob(".step-[0-9]*.*"):
        shutil.rmtree(path, ignore_errors=True)
