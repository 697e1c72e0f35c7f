"""What the Spider shows of itself: lengths of patches, loops they used, load of the experts, its patches.

It is handed the traces of the scoring pass itself, so nothing is computed twice. Windows overlap: a patch
counts in the one window in which its closing byte is scored, so every patch of the text counts once. Its
length is in ids (bytes, and the BOS and EOS between documents) and begins, for the first patch of a window,
where the window does. Experts are counted over all patches of a window, those of the overlap included: as
shares of the load the figures hardly change.

Shapes: B windows of a batch, T positions, M rows of the core, N recurrent layers, R loops, E experts.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from spider.model.interface import Model


class SpiderInspector:
    """See `spider.model.interface.Inspector`. The ``predictor`` gives the logits of boundaries that are
    learned; ``kind`` is that of the boundaries, ``none`` where each byte is its own patch."""

    segments = "patches"

    def __init__(self, model: Model, kind: str, predictor: nn.Module | None) -> None:
        self.model, self.kind, self.predictor = model, kind, predictor
        self.uncut = "this model has no patches (boundary.kind is none)" if kind == "none" else None
        self.lengths: Counter[int] = Counter()
        self.loops: Counter[int] | None = None
        self.load_NRE: np.ndarray | None = None

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        patches = trace.patches
        counted_M = _host(patches.filled_M) & scored_BT.flatten()[_host(patches.close_M)]
        if not self.uncut:
            self.lengths.update(np.diff(_host(patches.first_S))[counted_M].tolist())
        if trace.loops_M is not None:
            self.loops = self.loops or Counter()
            self.loops.update(_host(trace.loops_M)[counted_M].astype(int).tolist())
        if trace.counts_NRE is not None:
            load_NRE = _host(trace.counts_NRE)
            self.load_NRE = load_NRE if self.load_NRE is None else self.load_NRE + load_NRE

    def figures(self) -> list[dict[str, Any]]:
        """Lengths, halting depth, load of the experts; a note for a part that is switched off."""
        lengths = None if self.uncut else self.lengths
        no_patches = "patches are switched off:\nevery byte is its own"
        no_halting = "halting is switched off:\nevery patch uses all loops"
        return [
            _histogram("Bytes per patch", "bytes", lengths, no_patches),
            _histogram("Loops a patch uses", "loops", self.loops, no_halting),
            self._experts(),
        ]

    def _experts(self) -> dict[str, Any]:
        title = "Expert load (1 = equal share)"
        if self.load_NRE is None:
            return _note(title, "experts are switched off:\none dense layer instead")
        total_NR1 = self.load_NRE.sum(-1, keepdims=True)
        share_NRE = self.load_NRE * self.load_NRE.shape[-1] / np.maximum(total_NR1, 1)
        layers, loops, experts = share_NRE.shape
        return {
            "kind": "heatmap",
            "title": title,
            "rows": [f"layer {n + 1}, loop {r + 1}" for n in range(layers) for r in range(loops)],
            "column": "expert",
            "values": share_NRE.reshape(-1, experts).tolist(),
            "middle": 1.0,
            "most": 2.5,  # from there on a colour stays the strongest
            "caption": "red: more, blue: less than an equal share",
        }

    def cut(self, tokens_BT: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Where patches close, and the probability of a boundary at each position. The core's result does not
        matter here, so it runs once."""
        logits: list[torch.Tensor] = []
        predictor, keep = self.predictor, lambda _, __, out: logits.append(out)
        with predictor.register_forward_hook(keep) if predictor else nullcontext():
            given = self.model.without_knowledge(tokens_BT)
            patches = self.model(tokens_BT, n_loops=1, trace=True, **given).trace.patches
        return _host(patches.closes_BT), _host(logits[0].sigmoid()) if logits else None

    def caption(self, total: int, closed: list[int]) -> str:
        if self.uncut:
            return f"No patches (boundary.kind is none): each of {total:,} bytes stands alone."
        mean = f", {sum(closed) / len(closed):.2f} bytes a patch" if closed else ""
        return f"{self.kind.capitalize()} boundaries: {len(closed):,} in {total:,} bytes{mean}."


def _histogram(title: str, unit: str, counts: Counter[int] | None, instead: str) -> dict[str, Any]:
    if counts is None:
        return _note(title, instead)
    listed = [counts[n] for n in range(max(counts, default=-1) + 1)]
    return {"kind": "histogram", "title": title, "unit": unit, "things": "patches", "counts": listed}


def _note(title: str, text: str) -> dict[str, Any]:
    return {"kind": "note", "title": title, "text": text}


def _host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()
