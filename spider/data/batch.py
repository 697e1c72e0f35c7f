"""From the loader's rows to what the model takes, in one place: the warm-up compiles what training runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import IGNORED


def to_device(rows_BT1: np.ndarray, device: torch.device, pad: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, T) int64 each, of (B, T+1) uint16 rows; targets that are ``pad`` are `IGNORED`.

    Rows move as uint16 and are widened on the device: a quarter of the traffic of int64.
    """
    rows = torch.from_numpy(np.ascontiguousarray(rows_BT1))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    rows = rows.long()
    labels_BT = rows[:, 1:]
    return rows[:, :-1], labels_BT.masked_fill(labels_BT == pad, IGNORED)
