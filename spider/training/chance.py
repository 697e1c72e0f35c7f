"""What a training draws at random: by a seed for each purpose of each step, so that none is kept."""

from __future__ import annotations

import hashlib

import torch

from spider.config import StageSpec


def seed_of(*parts: object) -> int:
    """A 63-bit seed from a list of names and numbers; unlike sums of them, no two lists meet."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def draw_depth(spec: StageSpec) -> int:
    """Loops of one step's forward passes: the stage's, or drawn from torch's RNG with the stage's as mean."""
    return int(torch.randint(1, 2 * spec.loops, ())) if spec.model.samples_loops else spec.loops
