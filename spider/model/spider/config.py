"""The Spider's block of the configuration, and its named sizes. This file imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from spider.config.block import Block, Positive
from spider.config.model import ModelConfig, Recompute


class AttentionConfig(Block):
    """Multi-head latent attention: sizes of the heads and of the shared key-value latent."""

    heads: Positive = 16
    """Number of heads."""
    nope_dim: Positive = 64
    """Width of the part of a head without position."""
    rope_dim: Positive = 64
    """Width of the rotated key that all heads share."""
    v_dim: Positive = 128
    """Width of a value."""
    kv_lora_rank: Positive = 320
    """Width of the latent that gives keys and values."""

    @model_validator(mode="after")
    def _even_rope(self) -> AttentionConfig:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even, RoPE rotates pairs (got {self.rope_dim})")
        return self


class BoundaryConfig(Block):
    """Grouping of bytes into patches."""

    kind: Literal["learned", "whitespace", "none"] = "learned"
    """How patches are closed: by a learned predictor, or at white space; none: every byte is a patch."""
    hidden: Positive = 512
    """Width of the boundary predictor."""
    start: Literal["random", "whitespace"] = "random"
    """Initial cuts of the predictor: anywhere at about ``rate``, or after words."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Highest boundary rate without a loss (alpha). The loss grows linearly above it, and below it minus 0.1
    (alpha - lambda * sigma)."""
    capacity: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Maximum number of patches in a window, as a share of its bytes."""
    spare: Annotated[float, Field(ge=0)] = 0.06
    """Spare rows of the core, as a share of the rows that a batch fills at ``rate``. They matter where shapes
    are static: in training on a GPU, or compiled."""


class MoEConfig(Block):
    """Routed experts beside one shared expert, all SwiGLU."""

    experts: Positive = 32
    """Routed experts."""
    top_k: Positive = 2
    """Experts per patch."""
    expert_hidden: Positive = 512
    """Width of a routed expert."""
    shared_hidden: Annotated[int, Field(ge=0)] = 1024
    """Width of the shared expert (0: none)."""

    @model_validator(mode="after")
    def _k_fits(self) -> MoEConfig:
        if self.top_k > self.experts:
            raise ValueError(f"top_k must not exceed experts (got {self.top_k} of {self.experts})")
        return self


class EngramConfig(Block):
    """Engram: hash tables of byte n-grams that some recurrent layers read (none: no Engram)."""

    #: Lengths of the n-grams, in bytes, and hash heads of each.
    ORDERS: ClassVar = (3, 4, 5, 6)
    HEADS: ClassVar = 4

    layers: list[Annotated[int, Field(ge=0)]] = [1, 4]
    """Recurrent layers that read the tables."""
    head_dim: Positive = 64
    """Width of a table row."""
    table_size: Annotated[int, Field(gt=1)] = 81_307
    """Minimum number of rows of a head's table; each table takes the next unused prime."""
    byte_orders: list[Positive] = []
    """Orders of n-grams whose rows are added to the embedding of every byte (none: bytes alone)."""


class RecurrenceConfig(Block):
    """The looped core: its layers and loops."""

    layers: Positive = 6
    """Layers of the core."""
    loops: Positive = 6
    """Number of loops."""
    lora_rank: Annotated[int, Field(ge=0)] = 16
    """Rank of the adapter of each loop (0: none)."""
    checkpointing: Annotated[
        bool | Literal["selective", "full", "auto"], BeforeValidator(lambda value: value != "none" and value)
    ] = True
    """Activations that the backward pass recomputes. true: the recurrent layers; full: all layers;
    selective: all layers except matrix products and attention; false or none: nothing; auto: the least that
    the device has memory for."""

    @property
    def of_core(self) -> Recompute:
        """Return what is recomputed of recurrent layers."""
        if isinstance(self.checkpointing, bool):
            return "full" if self.checkpointing else "none"
        return self.of_blocks

    @property
    def of_blocks(self) -> Recompute:
        """Return what is recomputed of the dense layers before and after them."""
        way = self.checkpointing
        return "none" if isinstance(way, bool) or way == "auto" else way


class SpiderConfig(ModelConfig):
    """The Spider. Its defaults are spider-1b."""

    LOOPS: ClassVar[str | None] = "recurrence.loops"
    WIDTH: ClassVar[str | None] = "hidden"
    RECOMPUTE: ClassVar[str | None] = "recurrence.checkpointing"
    MOST_RECOMPUTED: ClassVar[Any] = "full"

    preset: str = "spider-1b"
    """Named sizes to start from; other keys override them."""
    hidden: Positive = 2048
    """Width of the residual stream."""
    prelude_layers: Positive = 2
    """Dense byte-level layers before the core."""
    coda_layers: Positive = 2
    """Dense byte-level layers after the core."""
    ffn_hidden: Positive = 3072
    """Width of the dense layers' feed-forward."""
    stream: Literal["wide", "narrow"] = "wide"
    """Residual stream of layers: fp32 (wide), or the dtype of matrix products (narrow), which moves half the
    bytes. The state between loops is fp32."""
    attention: AttentionConfig = AttentionConfig()
    boundary: BoundaryConfig = BoundaryConfig()
    moe: MoEConfig | None = MoEConfig()
    """Mixture of experts (null: one dense SwiGLU of ``ffn_hidden``)."""
    engram: EngramConfig = EngramConfig()
    recurrence: RecurrenceConfig = RecurrenceConfig()

    @property
    def feed_forwards(self) -> int:
        return self.prelude_layers + self.recurrence.layers + self.coda_layers

    def shallow(self) -> SpiderConfig:
        layers = min(2, self.recurrence.layers)  # one without and one with Engram
        engram = self.engram.model_copy(update={"layers": [layers - 1] if self.engram.layers else []})
        recurrence = self.recurrence.model_copy(update={"layers": layers})
        ends = {"prelude_layers": 1, "coda_layers": 1}
        return self.model_copy(update={**ends, "engram": engram, "recurrence": recurrence})

    @property
    def grouped(self) -> bool:
        """Whether all experts are one product, whose blocks have 16 bytes. Otherwise each has its own."""
        return self.moe is not None and self.hidden % 8 == self.moe.expert_hidden % 8 == 0

    def problems(self, precision: str, compiled: bool | None) -> list[str]:
        if compiled and precision == "fp32" and self.grouped:
            remedy = "set precision: bf16, or leave compile out"
            return [f"compile: torch compiles the grouped expert product in bf16 only; {remedy}"]
        return []

    @model_validator(mode="after")
    def _parts_fit(self) -> SpiderConfig:
        layers = self.recurrence.layers
        for layer in self.engram.layers:
            if layer >= layers:
                raise ValueError(f"engram.layers: {layer} is not one of {layers} recurrent layers")
        return self


Config = SpiderConfig

PRESETS: dict[str, dict[str, Any]] = {
    "spider-1b": {},
    # The parts and the number of experts of spider-1b at smaller widths, for GPUs of 24 and 8 GB.
    "spider-400m": {
        "hidden": 1280,
        "ffn_hidden": 2048,
        "attention": {"heads": 10, "kv_lora_rank": 192},
        "boundary": {"hidden": 384},
        "moe": {"expert_hidden": 320, "shared_hidden": 640},
        "engram": {"table_size": 32_768},
    },
    "spider-150m": {
        "hidden": 768,
        "ffn_hidden": 1536,
        "attention": {"heads": 8, "nope_dim": 48, "rope_dim": 48, "v_dim": 96, "kv_lora_rank": 128},
        "boundary": {"hidden": 256},
        "moe": {"expert_hidden": 192, "shared_hidden": 384},
        "engram": {"table_size": 13_000},
    },
    "tiny": {
        "hidden": 192,
        "prelude_layers": 1,
        "coda_layers": 1,
        "ffn_hidden": 512,
        "attention": {"heads": 4, "nope_dim": 32, "rope_dim": 16, "v_dim": 48, "kv_lora_rank": 64},
        "boundary": {"hidden": 64, "capacity": 0.25, "start": "whitespace"},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 128, "shared_hidden": 256},
        "engram": {"layers": [], "head_dim": 16, "table_size": 16384, "byte_orders": [2, 3, 4, 5, 6]},
        "recurrence": {"layers": 1, "loops": 1, "lora_rank": 4, "checkpointing": False},
    },
    # The smallest size that an ablation at equal time supports with an n-gram index (docs/LOG.md), and its
    # index.
    "slim": {
        "hidden": 64,
        "prelude_layers": 1,
        "coda_layers": 1,
        "ffn_hidden": 128,
        "attention": {"heads": 2, "nope_dim": 16, "rope_dim": 16, "v_dim": 24, "kv_lora_rank": 48},
        "boundary": {"hidden": 64, "capacity": 0.25, "start": "whitespace"},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 48, "shared_hidden": 64},
        "engram": {"layers": []},
        "recurrence": {"layers": 1, "loops": 1, "lora_rank": 4, "checkpointing": False},
        "ngram": {
            "contexts": [1, 2, 3, 4, 5, 6, 7, 9, 12, 20, "words1", "words2"],
            "rare": 7,
            "matches": [
                *("column", "indent", "above", 2, 3, "words1", 4, "words2"),
                *(5, 6, 8, 11, 15, 20, 32),
            ],
            "counts": [1, 2, 3, 4, 6],
            "carry_over": 16_384,
            "hidden": 48,
            "state": 128,
        },
    },
}
