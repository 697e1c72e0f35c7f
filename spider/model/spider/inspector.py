"""Inspector of the Spider: lengths of patches, loops they used, load of the experts, and cuts of a text.

It observes the traces of the scoring pass, so nothing is computed twice. Windows overlap. A patch counts in
the one window that scores its closing byte, so every patch of the text counts once. Its length is in ids
(bytes, and the BOS and EOS between documents); the first patch of a window begins where the window does.
Experts count over all patches of a window, overlaps included, because shares of the load hardly change.

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
    """See `spider.model.interface.Inspector`.

    Args:
        kind: kind of the boundaries; ``none`` means that each byte is its own patch.
        predictor: module that returns the boundary logits; None unless they are learned.
    """

    segments = "patches"

    def __init__(self, model: Model, kind: str, predictor: nn.Module | None) -> None:
        self.model = model
        self.kind = kind
        self.predictor = predictor
        self.uncut = "this model has no patches (boundary.kind is none)" if kind == "none" else None
        self.lengths: Counter[int] = Counter()
        self.loops: Counter[int] = Counter()
        self.load_NRE: np.ndarray | None = None

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        patches = trace.patches
        counted_M = _host(patches.filled_M) & scored_BT.flatten()[_host(patches.close_M)]
        if not self.uncut:
            self.lengths.update(np.diff(_host(patches.first_S))[counted_M].tolist())
        self.loops.update(_host(trace.loops_M)[counted_M].astype(int).tolist())
        if trace.counts_NRE is not None:
            load_NRE = _host(trace.counts_NRE)
            self.load_NRE = load_NRE if self.load_NRE is None else self.load_NRE + load_NRE

    def figures(self) -> list[dict[str, Any]]:
        """Return lengths, halting depth and load of the experts, or a note for a part that is switched
        off."""
        title, patches = "Bytes per patch", "patches are switched off:\nevery byte is its own"
        return [
            _note(title, patches) if self.uncut else _histogram(title, "bytes", self.lengths),
            _histogram("Loops a patch uses", "loops", self.loops),
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
            "most": 2.5,  # values above this get the strongest colour
            "caption": "red: more, blue: less than an equal share",
        }

    def cut(self, tokens_BT: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the closing positions of patches, and the probability of a boundary at each position.

        The core runs once, because its result does not matter here.
        """
        logits: list[torch.Tensor] = []

        def keep_logits(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            logits.append(output)

        hook = nullcontext() if self.predictor is None else self.predictor.register_forward_hook(keep_logits)
        with hook:
            candidates = self.model.empty_candidates(tokens_BT)
            patches = self.model(tokens_BT, n_loops=1, trace=True, **candidates).trace.patches
        return _host(patches.closes_BT), _host(logits[0].sigmoid()) if logits else None

    def caption(self, total: int, closed: list[int]) -> str:
        if self.uncut:
            return f"No patches (boundary.kind is none): each of {total:,} bytes stands alone."
        mean = f", {sum(closed) / len(closed):.2f} bytes a patch" if closed else ""
        return f"{self.kind.capitalize()} boundaries: {len(closed):,} in {total:,} bytes{mean}."


def _histogram(title: str, unit: str, counts: Counter[int]) -> dict[str, Any]:
    listed = [counts[n] for n in range(max(counts, default=-1) + 1)]
    return {"kind": "histogram", "title": title, "unit": unit, "things": "patches", "counts": listed}


def _note(title: str, text: str) -> dict[str, Any]:
    return {"kind": "note", "title": title, "text": text}


def _host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()
