"""The record of a warm-up: ``runs/{run}/warmup-{shape}.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from spider.record import Record

Kind = Literal["fp32", "bf16", "fp8"]


class Timed(BaseModel, frozen=True):
    """Times of an operation that some ``layers`` of the model compute."""

    uses: int
    """Calls in one forward pass."""
    ms: dict[Kind, float]
    """Milliseconds of forward and backward; fp8 only where the device has it and a layer may run in it."""
    fastest: Kind
    layers: list[str]


class Product(Timed, frozen=True):
    """Times of one distinct matrix product: M rows, K in, N out."""

    m: int
    k: int
    n: int


class Parts(Timed, frozen=True):
    """Times of one of the layers that the family multiplies in fp8 itself, for ``tokens`` rows."""

    tokens: int


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
    fp8_recipe: str
    fp8_layers: list[str]
    """Names of the layers that run in fp8."""
    step: dict[Kind, Step]
    gemms: list[Product]
    parts: Parts | None
    compile: Compiled | None
    seconds: float
