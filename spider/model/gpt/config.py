"""The GPT's block of the configuration, and its named sizes. This file imports no torch.

Each switch comes from nanochat or from the parameter golf; docs/gpt.md describes them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from spider.config.block import Block, Positive, wrong_key
from spider.config.model import ModelConfig, Recompute
from spider.tokens import BYTES

Nonnegative = Annotated[int, Field(ge=0)]
#: Features of a head of a model whose size is given by ``depth``.
_HEAD = 128


class LoopConfig(Block):
    """Layers of the stack that run several times in a row."""

    layers: tuple[Nonnegative, Nonnegative] | None = None
    """First and last looped layer, counted from 0 (null: no layer is looped)."""
    loops: Positive = 1
    """Number of runs of these layers."""


class GPTConfig(ModelConfig):
    """The GPT. Its defaults are gpt-d12."""

    LOOPS: ClassVar[str | None] = "recurrence.loops"
    WIDTH: ClassVar[str | None] = "hidden"
    ANY_TOKENS: ClassVar[bool] = True
    DOCUMENTS: ClassVar[bool] = True
    GROUPS: ClassVar[dict[str, str]] = {
        "matrices": "matrix",
        "embedding": "table",
        "value_embeddings": "table",
        "head": "table",
        "residual": "vector",
        "x0": "vector",
        "vectors": "vector",
        "tables": "table",
    }
    FFN_INPUTS: ClassVar[bool] = True
    RECOMPUTE: ClassVar[str | None] = "checkpointing"
    MOST_RECOMPUTED: ClassVar[Any] = "full"

    preset: str = "gpt-d12"
    """Named sizes to start from; other keys override them."""
    depth: Positive | None = None
    """Sets ``layers`` to this, ``heads`` to half of it (rounded up), and ``hidden`` to 128 features for each
    head (null: they are set by their own keys)."""
    hidden: Positive = 768
    """Width of the residual stream."""
    layers: Positive = 12
    """Number of layers."""
    heads: Positive = 6
    """Attention heads; must divide ``hidden``."""
    kv_heads: Positive | None = None
    """Heads of keys and values; must divide ``heads`` (null: one per head)."""
    ffn_ratio: Positive = 4
    """Width of a feed-forward layer, as a multiple of ``hidden``."""
    windows: str = "SSSL"
    """Attention window of each layer: L full, S ``short_window``. The pattern repeats over the layers; the
    last layer is always L."""
    short_window: Positive = 1024
    """Earlier tokens that a position sees in an S layer."""
    rope_dim: Positive | None = None
    """Number of leading features of a head that RoPE rotates (null: all)."""
    rope_base: Annotated[float, Field(gt=1)] = 10_000.0
    """Base of the rotation's wavelengths; larger reaches further."""
    qk_gain: Annotated[float, Field(gt=0)] | None = None
    """Initial value of a learned factor on each head's queries (null: no factor)."""
    xsa: bool = False
    """Remove from each head's output its component along the position's own value."""
    value_embeddings: Literal["alternate", "none"] = "alternate"
    """alternate: every other layer, including the last, adds a learned embedding of the token to its
    values."""
    residual_mix: Literal["scalar", "vector", "none"] = "scalar"
    """Mix the stream with the token embedding before each layer, by two learned factors per layer (scalar) or
    per feature (vector). The stream's starts at 1, the embedding's at 0.1 (scalar) or 0 (vector). vector also
    scales the outputs of attention and feed-forward by a learned factor per feature."""
    parallel_from: Nonnegative | None = None
    """First layer whose attention and feed-forward run in parallel on the same input (null: none)."""
    slope: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Negative slope of the feed-forward's leaky ReLU, which is then squared."""
    norm_scale: bool = False
    """Divide the output of the norms in layer l by sqrt(l + 1)."""
    skips: bool = False
    """Blend the input of each layer of the second half with the output of one of the first half, as in a
    U-Net."""
    softcap: Annotated[float, Field(gt=0)] | None = 15.0
    """Cap c of the logits, ``c tanh(logits / c)`` (null: no cap)."""
    tied: bool = False
    """Use the transposed embedding as the head."""
    vocab_multiple: Positive = 1
    """Round the rows of embeddings and head up to a multiple of this. No token has an added row."""
    start: Literal["uniform", "orthogonal", "torch"] = "uniform"
    """Initialisation of the matrices. uniform, orthogonal: outputs of attention and feed-forward start at
    zero. torch: that of torch, also for these."""
    checkpointing: Annotated[
        Recompute | Literal["auto"],
        BeforeValidator(lambda way: ("none", "full")[way] if isinstance(way, bool) else way),
    ] = "none"
    """Activations of layers that the backward pass recomputes. full or true: all; selective: all except
    outputs of matrix products and attention; none or false: nothing; auto: the least that the device has
    memory for."""
    recurrence: LoopConfig = LoopConfig()

    @property
    def looped(self) -> bool:
        return self.recurrence.layers is not None

    @property
    def feed_forwards(self) -> int:
        return self.layers

    @property
    def of_layers(self) -> Recompute:
        """Return what is recomputed of layers."""
        return "none" if self.checkpointing == "auto" else self.checkpointing

    @property
    def groups(self) -> int:
        """Return the number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def window(self, layer: int) -> int | None:
        """Return how many earlier tokens a position sees in that layer; None: all."""
        short = layer < self.layers - 1 and self.windows[layer % len(self.windows)] == "S"
        return self.short_window if short else None

    def has_values(self, layer: int) -> bool:
        """Tell whether that layer has value embeddings."""
        return self.value_embeddings == "alternate" and layer % 2 == (self.layers - 1) % 2

    def order(self, loops: int) -> list[int]:
        """Return the layers in running order."""
        all_ = list(range(self.layers))
        if self.recurrence.layers is None:
            return all_
        first, last = self.recurrence.layers
        return all_[:first] + loops * all_[first : last + 1] + all_[last + 1 :]

    def shallow(self) -> GPTConfig:
        least = max(self.parallel_from or 0, *(self.recurrence.layers or (0,))) + 1
        sizes = (self.model_copy(update={"layers": layers}) for layers in range(least, self.layers))
        return next((one for one in sizes if one._kinds() == self._kinds()), self)

    def _kinds(self) -> set[tuple[int | None, bool]]:
        return {(self.window(layer), self.has_values(layer)) for layer in range(self.layers)}

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, plain: Any) -> Any:
        """Replace ``depth`` by the sizes that it stands for."""
        depth = plain.get("depth") if isinstance(plain, dict) else None
        if type(depth) is not int or depth < 1:
            return plain
        heads = (depth + 1) // 2
        sizes = {"layers": depth, "heads": heads, "hidden": _HEAD * heads}
        for key, size in sizes.items():
            if plain.get(key, size) != size:
                text = f"depth: {depth} means {heads} heads of {_HEAD} and {key}: {size} (got {plain[key]})"
                raise wrong_key(key, f"{text}; leave {key} or depth out")
        return {**plain, **sizes, "depth": None}

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
            raise ValueError(f"kv_heads: {self.groups} does not divide heads: {H}")
        if K % 8:
            raise ValueError(f"heads: a head's width must be a multiple of 8 (got {D} / {H} = {K})")
        if self.rope_dim is not None and (self.rope_dim % 2 or self.rope_dim > K):
            raise ValueError(f"rope_dim: must be even, at most a head's width {K} (got {self.rope_dim})")
        if self.parallel_from is not None and self.parallel_from >= self.layers:
            raise ValueError(f"parallel_from: {self.parallel_from} is not one of {self.layers} layers")
        if self.ngram and self.vocab_size not in (None, BYTES.size):
            raise ValueError(
                f"ngram: the index is over bytes, but this model reads {self.vocab_size:,} tokens"
            )
        if not self.looped and self.recurrence.loops != 1:
            raise ValueError("recurrence.layers: is null, so no layer is looped; set it, or leave loops out")
        first, last = self.recurrence.layers or (0, 0)
        if not first <= last < self.layers:
            raise ValueError(f"recurrence: layers {first} to {last} are not among 0 to {self.layers - 1}")
        return self


Config = GPTConfig

#: Settings that the presets of the parameter golf share.
_GOLF: dict[str, Any] = {
    "windows": "L",
    "value_embeddings": "none",
    "residual_mix": "vector",
    "qk_gain": 5.25,
    "softcap": 30.0,
    "tied": True,
    "start": "orthogonal",
}
#: gpt-d*: nanochat's sizes, 64 features per layer and heads of 128. golf-16mb: the layers of a record of the
#: parameter golf. golf-seed: those of the original description.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-d12": {},
    "gpt-d20": {"hidden": 1280, "layers": 20, "heads": 10},
    "gpt-d24": {"hidden": 1536, "layers": 24, "heads": 12},
    "gpt-cpu": {"hidden": 192, "layers": 4, "heads": 4, "windows": "L", "value_embeddings": "none"},
    "golf-16mb": {
        **_GOLF,
        "hidden": 512,
        "layers": 11,
        "heads": 8,
        "kv_heads": 4,
        "rope_dim": 16,
        "slope": 0.5,
        "parallel_from": 7,
        "norm_scale": True,
        "skips": True,
        "xsa": True,
        "recurrence": {"layers": (3, 5), "loops": 3},
    },
    "golf-seed": {
        **_GOLF,
        "hidden": 768,
        "layers": 3,
        "heads": 12,
        "kv_heads": 4,
        "parallel_from": 0,
        "recurrence": {"layers": (0, 2), "loops": 8},
    },
    "golf-tiny": {
        **_GOLF,
        "hidden": 128,
        "layers": 6,
        "heads": 4,
        "kv_heads": 2,
        "slope": 0.5,
        "parallel_from": 0,
    },
}
