"""What happened inside a model while it was scored: lengths of patches, loops they used, load of the experts.

The observer is handed the traces of the scoring pass itself, so nothing is computed twice. Windows overlap,
and what lies in the overlap is seen by two of them: a patch counts in the one window in which the position of
its closing byte is scored, so every patch of the text counts once. Its length is in ids (bytes, and the BOS
and EOS between documents) and begins, for the first patch of a window, where the window does. Experts are
counted by the model over all patches of a window at once, those of the overlap included: as shares of the
load the figures hardly change.

How much more (or fewer) loops are worth takes passes of its own, see `loops_curve`.

Shapes: B windows of a batch, T positions, L patch slots, N recurrent layers, R loops, E experts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from spider.evaluation.bpb import score

if TYPE_CHECKING:
    import torch

    from spider.model.spider.model import Trace


class Inside:
    """Counts over all traces it was called with; give it to `spider.evaluation.bpb.score` as ``observe``."""

    def __init__(self, *, patched: bool) -> None:
        """``patched``: whether the model has patches at all, or makes each byte its own (kind none)."""
        self.patched = patched
        self.lengths: Counter[int] = Counter()
        self.loops: Counter[int] | None = None
        self.load_NRE: np.ndarray | None = None

    def __call__(self, trace: Trace, scored_BT: np.ndarray) -> None:
        close_BL, filled_BL = _host(trace.patches.close_BL), _host(trace.patches.filled_BL)
        counted_BL = filled_BL & np.take_along_axis(scored_BT, close_BL, axis=1)
        if self.patched:
            ends_BL = np.where(filled_BL, close_BL, -1)
            lengths_BL = np.diff(ends_BL, axis=1, prepend=-1)
            self.lengths.update(lengths_BL[counted_BL].tolist())
        if trace.loops_BL is not None:
            self.loops = self.loops or Counter()
            self.loops.update(_host(trace.loops_BL)[counted_BL].astype(int).tolist())
        if trace.counts_NRE is not None:
            load_NRE = _host(trace.counts_NRE)
            self.load_NRE = load_NRE if self.load_NRE is None else self.load_NRE + load_NRE

    def summary(self) -> dict[str, Any]:
        """The counts as plain lists, null for a part that is switched off.

        ``patch_bytes[n]`` patches had n bytes; ``halting_loops[n]`` used n loops;
        ``expert_share[layer][loop]`` is what each expert was given, as a multiple of an equal share: 1
        everywhere is perfect balance.
        """
        share_NRE = None
        if self.load_NRE is not None:
            total_NR1 = self.load_NRE.sum(-1, keepdims=True)
            share_NRE = (self.load_NRE * self.load_NRE.shape[-1] / np.maximum(total_NR1, 1)).tolist()
        return {
            "patch_bytes": _listed(self.lengths) if self.patched else None,
            "halting_loops": _listed(self.loops) if self.loops is not None else None,
            "expert_share": share_NRE,
        }


def loops_curve(model: torch.nn.Module, tokens_N: np.ndarray, deepest: int, **scoring: Any) -> list[float]:
    """bpb on a stream with 1, 2, ... ``deepest`` loops; one pass each, so give it a short stream.

    Args:
        scoring: the other arguments of `spider.evaluation.bpb.score`.
    """
    return [score(model, tokens_N, n_loops=n, **scoring).bpb for n in range(1, deepest + 1)]


def _host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()


def _listed(counts: Counter[int]) -> list[int]:
    return [counts[n] for n in range(max(counts, default=-1) + 1)]
