"""The record of a warm-up: ``runs/{run}/warmup-{shape}.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from spider.record import Record

Kind = Literal["fp32", "bf16", "fp8"]


class Step(BaseModel, frozen=True):
    """Times and peak memory of forward, backward and update of one micro-batch."""

    first_seconds: float
    seconds: float
    peak_memory_mb: float


class Compiled(BaseModel, frozen=True):
    """The archive of compiled code (`spider.training.compilecache`)."""

    cache: str
    bytes: int
    made_for: str


class Warmup(Record):
    WHAT = "the record of a warm-up"

    run: str
    device: str
    threads: int
    versions: dict[str, str]
    micro_batch: int | None = None
    """Windows of a micro-batch. None in a record of an earlier version."""
    checkpointing: str | bool | None = None
    """What the backward pass recomputes; None for a family that recomputes nothing."""
    precision: Kind
    """The precision that ``precision: auto`` selects, or the one that the configuration sets."""
    reason: str
    fp8_layers: list[str]
    """Names of the layers that run in fp8 where ``precision: auto`` selects it."""
    step: dict[Kind, Step]
    compile: Compiled | None
    seconds: float
