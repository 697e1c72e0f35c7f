"""Which kernels the compiler fuses first: a change of Inductor's choice, by its own setting.

The backward pass of a norm sums over features for the gradient of its input, and over rows for that of its
weight. Inductor can do both in one pass over the same rows (a fusion of mixed orders). It counts elements for
that fusion and bytes for others, so of two norms in a graph it rather fuses the two sums over rows. All rows
are then read twice. Here a fusion of mixed orders comes first, because it shares every operand.

Imported by the functions that compile, because it imports the compiler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V

#: Bytes of the operands of a fused pass over an element, at least.
_BYTES = 64


class Choices(InductorChoices):
    """Inductor's choices, except that fusions of mixed orders come first."""

    @staticmethod
    def score_fusion(scheduler: Any, node1: Any, node2: Any) -> Any:
        score: Any = InductorChoices.score_fusion(scheduler, node1, node2)
        if MixOrderReduction.can_fuse(node1, node2):
            return dataclasses.replace(score, memory_score=_BYTES * score.memory_score)
        return score

    def uuid(self) -> str:
        """Return what the compiler's cache knows this class by."""
        return f"spider: mixed orders first, {_BYTES}"


def fuse_mixed_orders_first() -> None:
    """Make this process's compiler use `Choices`, and let the keys of its cache tell."""
    config.inductor_choices_class = Choices
    # A thread that compiled before keeps the choices that it had.
    V.set_choices_handler(Choices())
