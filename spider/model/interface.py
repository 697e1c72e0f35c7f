"""What the rest of Spider asks of a model: the protocol that every family keeps.

Training, evaluation, description, checkpoints and reports know a model by this page alone. A family is a
folder with ``config.py`` and ``model.py`` (`spider.config.model`); its `Model` is a ``torch.nn.Module`` with
what stands here.

Shapes: B windows, T ids of a window, V ids of the alphabet, N new ids of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from spider.config import ModelConfig

#: A label that does not count.
IGNORED = -100


@dataclass
class ModelOutput:
    """
    Attributes:
        loss: the training loss, or (B, T) cross entropies for ``reduction="none"``; None without labels.
        logits: (B, T, V) float32 without labels, else None: training has no use for them.
        metrics: detached scalars, ``cross_entropy`` (nats a target) among them where there are labels.
        trace: what happened inside, in the family's own words, where it was asked for.
    """

    loss: Tensor | None
    logits: Tensor | None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    trace: Any = None


class Reader(Protocol):
    """One stream of ids that a model reads piece by piece: what generation runs."""

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Read N more ids; returns the logits of what follows each of them, (N, V) float32."""
        ...


class LanguageModel(Protocol):
    """A model of any family."""

    config: Any
    """Its block of the configuration, a `ModelConfig` of the family's."""

    def reset_parameters(self) -> None:
        """Set every weight and buffer from the torch RNG; the same seed gives the same model."""

    def __call__(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
    ) -> ModelOutput:
        """Predict, at every position, the id that follows.

        Args:
            tokens_BT: ids, int64.
            labels_BT: the id that follows each, `IGNORED` where it does not count.
            n_loops: how often the looped part runs (default: the configuration's).
            reduction: "mean" for training; "none" for each position's cross entropy in nats, 0 where ignored.
            trace: also tell what happened inside.
        """
        ...

    def incremental(self, context: int, n_loops: int | None = None) -> Reader:
        """A stream of at most ``context`` ids; its logits are those of one forward pass over all of it."""
        ...

    def after_step(self, *, updated: bool = True) -> None:
        """Called once after every optimizer step; ``updated`` is false where its update was skipped."""

    def loops(self, asked: int | None) -> int:
        """How often the looped part runs: as asked, else as configured; ``ValueError`` for what cannot be."""
        ...

    def num_parameters(self) -> int: ...

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each part, under names for people; they sum to `num_parameters`."""
        ...

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """FLOPs of forward and backward for each id of a window of ``length`` ids."""
        ...


class Model(nn.Module, LanguageModel):
    """For annotations: a torch module that is a `LanguageModel`, as `spider.model.build_model` returns."""

    config: ModelConfig
