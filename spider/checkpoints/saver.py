"""Saving beside training: the loop waits while the state is copied, not while it reaches the disk.

Hashing and flushing a checkpoint take seconds, during which training goes on from its own tensors; the copy
costs their size once more in host memory, which is kept from one save to the next (pinned, for a GPU copies
into such memory several times as fast). Where threads have priorities, the saving one has a lower one: it
takes what the steps leave of the processor. At most one save is under way. Whether it failed is known at the
next step after its end; a kill before its end leaves the checkpoint before it as the newest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spider.checkpoints.format import retain, save
from spider.checkpoints.load import Checkpoint
from spider.config import StageSettings
from spider.processes.parallel import whole
from spider.processes.world import ALONE, World


class Saver:
    """Write checkpoints into ``root`` in the background and delete those that ``settings`` keeps no longer.

    Of several processes the first one writes, and the others help to gather what it does not hold.
    ``newest`` is the newest checkpoint that is safely on disk, as far as this process knows; ``begun`` the
    run's step of the last one that was begun, in every process.
    """

    def __init__(
        self, root: Path, settings: StageSettings, newest: Checkpoint | None, world: World = ALONE
    ) -> None:
        self.newest = newest
        self.begun: int | None = newest.manifest.global_step if newest else None
        self._root, self._settings, self._world = root, settings, world
        self._copies: dict[str, Tensor] = {}
        # A Linux thread has a priority of its own; elsewhere ``nice`` would slow the whole process.
        yielding: dict[str, Any] = {"initializer": os.nice, "initargs": (10,)}
        yielding = yielding if sys.platform == "linux" else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", **yielding)
        self._pending: Future[Checkpoint] | None = None

    def start(self, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Copy the tensors and begin to save the copy, after the save before has ended."""
        self.settle()
        self.begun = record["global_step"]
        for name, tensor in tensors.items():
            held = whole(tensor.detach())
            if self._world.first:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(held, device="cpu", pin_memory=held.is_cuda)
                self._copies[name].copy_(held, non_blocking=True)
        if not self._world.first:
            return
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        copies = {name: self._copies[name] for name in tensors}
        self._pending = self._thread.submit(self._save, copies, record)

    def _save(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> Checkpoint:
        saved = save(self._root, tensors, record)
        began = record["global_step"] - record["step"]
        retain(self._root, self._settings.keep_last, self._settings.keep_every, began)
        return saved

    def poll(self) -> None:
        """Take note of a save that has ended; raises what went wrong in it."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the save under way; raises what went wrong in it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.newest = pending.result()

    def close(self) -> None:
        """Wait for the save under way, whatever comes of it."""
        self._thread.shutdown(wait=True)
