"""The GPT's block of the configuration, and the sizes that have a name. Imports no torch.

A switch is of one of two seeds, nanochat's or the parameter golf's; docs/gpt.md says which, and what it does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from spider.config.block import Block, Positive
from spider.config.model import ModelConfig
from spider.tokens import BYTES

Nonnegative = Annotated[int, Field(ge=0)]


class LoopConfig(Block):
    """Which layers of the stack run several times in a row."""

    first: Nonnegative = 0
    """The first of them, counted from 0."""
    last: Nonnegative | None = None
    """The last of them (null: none does)."""
    loops: Positive = 1
    """Times they run."""


class GPTConfig(ModelConfig):
    """The GPT. Its defaults are gpt-d12."""

    LOOPS: ClassVar[str | None] = "recurrence.loops"
    ANY_TOKENS: ClassVar[bool] = True
    DOCUMENTS: ClassVar[bool] = True

    preset: str = "gpt-d12"
    """Named sizes to start from; keys beside it change a part."""
    hidden: Positive = 768
    """Width of the residual stream."""
    layers: Positive = 12
    """Layers."""
    heads: Positive = 6
    """Heads, which share ``hidden`` evenly."""
    kv_heads: Positive | None = None
    """Heads of keys and values, each shared by as many heads (null: one a head)."""
    ffn_ratio: Positive = 4
    """Width of a feed-forward, in times of ``hidden``."""
    windows: str = "SSSL"
    """What layers see: L all before, S of ``short_window``; repeated over the layers, the last is L."""
    short_window: Positive = 1024
    """Ids before itself that a position sees in an S layer."""
    rope_dim: Positive | None = None
    """Features of a head that are rotated by position, the first ones (null: all)."""
    rope_base: Annotated[float, Field(gt=1)] = 10_000.0
    """Longest wavelength of the rotation."""
    qk_gain: Annotated[float, Field(gt=0)] | None = None
    """Where a learned factor of each head's queries begins (null: there is none)."""
    xsa: bool = False
    """Take out of what a head attends to its part along the position's own value."""
    value_embeddings: Literal["alternate", "none"] = "alternate"
    """alternate: every other layer, the last among them, adds a row of a table of its own to each value."""
    residual_mix: Literal["scalar", "vector", "none"] = "scalar"
    """Mix the stream with the embedding before each layer, by two learned numbers a layer or a feature."""
    mix_start: float = 0.1
    """Where the embedding's share begins; the stream's begins at 1."""
    branch_scales: bool = False
    """Learned factors, one a feature, of what attention and feed-forward add to the stream."""
    parallel_from: Nonnegative | None = None
    """From this layer on attention and feed-forward read the same and are added together (null: never)."""
    slope: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the feed-forward's squared ReLU below zero, before it is squared."""
    norm_scale: bool = False
    """Divide what the norms of layer l give by the root of l + 1."""
    skips: bool = False
    """Blend what enters each layer of the second half with what left one of the first, last to first."""
    softcap: Annotated[float, Field(gt=0)] | None = 15.0
    """c of ``c tanh(logits / c)`` (null: logits as they are)."""
    tied: bool = False
    """The head is the transposed embedding."""
    start: Literal["uniform", "orthogonal"] = "uniform"
    """What matrices are at first, but those that begin at zero."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    stream: Literal["wide", "narrow"] = "narrow"
    """Residual stream: fp32, or as narrow as matrix products are."""
    recurrence: LoopConfig = LoopConfig()

    @property
    def looped(self) -> bool:
        return self.recurrence.last is not None

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def window(self, layer: int) -> int | None:
        """Ids before itself that a position sees there; None: all."""
        short = layer < self.layers - 1 and self.windows[layer % len(self.windows)] == "S"
        return self.short_window if short else None

    def has_values(self, layer: int) -> bool:
        """Whether that layer has a table of values."""
        return self.value_embeddings == "alternate" and layer % 2 == (self.layers - 1) % 2

    def order(self, loops: int) -> list[int]:
        """Layers in the order in which they run."""
        all_, r = list(range(self.layers)), self.recurrence
        if r.last is None:
            return all_
        return all_[: r.first] + loops * all_[r.first : r.last + 1] + all_[r.last + 1 :]

    @field_validator("windows")
    @classmethod
    def _pattern(cls, windows: str) -> str:
        if not windows or set(windows) - {"S", "L"}:
            raise ValueError(f"use L for full, S for short_window, as in SSSL (got {windows!r})")
        return windows

    @model_validator(mode="after")
    def _parts_fit(self) -> GPTConfig:
        D, H, K = self.hidden, self.heads, self.head_dim
        if D % H:
            raise ValueError(f"heads: {H} heads cannot share hidden: {D} evenly")
        if H % self.groups:
            raise ValueError(f"kv_heads: {self.groups} is no divisor of heads: {H}")
        if K % 8:
            raise ValueError(f"heads: a head's width must be a multiple of 8 (got {D} / {H} = {K})")
        if self.rope_dim is not None and (self.rope_dim % 2 or self.rope_dim > K):
            raise ValueError(f"rope_dim: must be even, at most a head's width {K} (got {self.rope_dim})")
        if self.parallel_from is not None and self.parallel_from >= self.layers:
            raise ValueError(f"parallel_from: {self.parallel_from} is not one of {self.layers} layers")
        if self.ngram and self.vocab_size not in (None, BYTES.size):
            raise ValueError(f"ngram: proposes bytes, and this model reads {self.vocab_size:,} other ids")
        r = self.recurrence
        if r.last is None and r.loops != 1:
            raise ValueError("recurrence.last: null says that no layer loops; name one, or leave loops out")
        if r.last is not None and not r.first <= r.last < self.layers:
            raise ValueError(
                f"recurrence: layers {r.first} to {r.last} are no part of layers 0 to {self.layers - 1}"
            )
        return self


Config = GPTConfig

#: What the parameter golf's presets share.
_GOLF: dict[str, Any] = {
    **{"windows": "L", "value_embeddings": "none", "residual_mix": "vector", "mix_start": 0.0},
    **{"branch_scales": True, "qk_gain": 5.25, "softcap": 30.0, "tied": True, "start": "orthogonal"},
}
#: nanochat's: 64 features a layer, heads of 128. golf-16mb is a record's block, golf-seed the seed's.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-d12": {},
    "gpt-d20": {"hidden": 1280, "layers": 20, "heads": 10},
    "gpt-d24": {"hidden": 1536, "layers": 24, "heads": 12},
    "gpt-cpu": {"hidden": 192, "layers": 4, "heads": 4, "windows": "L", "value_embeddings": "none"},
    "golf-16mb": {
        **_GOLF,
        **{"hidden": 512, "layers": 11, "heads": 8, "kv_heads": 4, "rope_dim": 16, "slope": 0.5},
        **{"parallel_from": 7, "norm_scale": True, "skips": True, "xsa": True},
        "recurrence": {"first": 3, "last": 5, "loops": 3},
    },
    "golf-seed": {
        **_GOLF,
        **{"hidden": 768, "layers": 3, "heads": 12, "kv_heads": 4, "parallel_from": 0},
        "recurrence": {"first": 0, "last": 2, "loops": 8},
    },
    "golf-tiny": {
        **_GOLF,
        **{"hidden": 128, "layers": 6, "heads": 4, "kv_heads": 2, "slope": 0.5, "parallel_from": 0},
    },
}
