"""A Spider that reads one stream piece by piece: what generation runs.

The logits are those that the whole stream in one forward pass would give, for any way of cutting it into
pieces; a piece of one byte costs one position of prelude and coda, and one of the core only where it closes a
patch. What is kept between pieces, for a stream of at most ``context`` ids:

- latents and rotated keys of prelude and coda, one a byte and layer;
- the same of the core, one a patch, layer *and loop*, with the last inputs of each Engram's convolution:
  in loop r a patch attends to what earlier patches were in loop r;
- the running sum of the open patch, and the last closed one, which the bytes of the open one read;
- the ids, for the n-grams that end at the next bytes.

Patches and their capacity are those of a window of ``context`` bytes, so a comparison with a forward pass
must pad its window to that length (`tests/unit/model/test_incremental.py`).

Shapes: N ids of a piece, K patches that they close, D features, V vocabulary; the batch is one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spider.model.layers import wide
from spider.model.spider.attention import LatentCache
from spider.model.spider.body import Body
from spider.model.spider.chunking import Stream
from spider.model.spider.engram import Memory
from spider.model.spider.recurrence import LayerCache


class Incremental:
    """One stream's state; see the module's docstring.

    Args:
        model: left as it is; must be in evaluation mode whenever `extend` is called.
        context: ids the stream may grow to.
        n_loops: loops of the core (default: the model's).
    """

    def __init__(self, model: Body, context: int, n_loops: int | None = None) -> None:
        self.model, self.context, self.loops = model, context, model.loops(n_loops)
        config = model.config
        slots = model.chunker.slots(context)
        self.ids: list[int] = []
        self.stream = Stream(capacity=model.chunker.capacity(context))
        self.blocks = [LatentCache(context) for _ in [*model.prelude, *model.coda]]
        self.core = [[LayerCache(slots) for _ in model.core.layers] for _ in range(self.loops)]
        self.rope = model.rope(max(context, slots))
        self.orders = config.engram.orders if config.engram.layers else []
        # As many ids before a piece as the longest n-gram that ends in it can reach.
        self.reach = max([1, *self.orders, *config.engram.byte_orders]) - 1

    @torch.inference_mode()
    def extend(self, ids: Sequence[int]) -> Tensor:
        """`spider.model.interface.Reader.extend`."""
        N, start = len(ids), len(self.ids)
        if not N or start + N > self.context:
            raise ValueError(f"cannot read {N} ids after {start} with a context of {self.context}")
        model = self.model
        assert not model.training, "the stream is read in evaluation mode"
        self.ids += ids
        tokens_1T = torch.tensor([self.ids[max(0, start - self.reach) :]], device=model.embed_tokens.device)

        blocks = iter(self.blocks)
        rope = self.rope.part(start, start + N)
        h_1ND = model.embed(tokens_1T)[:, -N:]
        for block in model.prelude:
            h_1ND = block(h_1ND, rope, next(blocks))
        patches_before = self.core[0][0].attention.length
        e_1KD, close_K, count_N = model.chunker.down_next(tokens_1T[:, -N:], h_1ND, self.stream)
        z_1KD = e_1KD
        if K := e_1KD.shape[1]:
            memories = self._memories(tokens_1T, N, close_K)
            rope_K = self.rope.part(patches_before, patches_before + K)
            valid_1K = torch.ones(1, K, dtype=torch.bool, device=e_1KD.device)
            z_1KD = model.core(e_1KD, memories, rope_K, valid_1K, self.loops, self.core).z_BLD
        h_1ND = h_1ND + model.chunker.up_next(z_1KD, count_N, self.stream)
        for block in model.coda:
            h_1ND = block(h_1ND, rope, next(blocks))
        return wide(model.head(h_1ND)[0])

    def _memories(self, tokens_1T: Tensor, N: int, close_K: Tensor) -> list[Memory | None]:
        """What the core's Engrams hold for the patches that this piece closes."""
        if not self.orders:
            return [None] * len(self.model.core.layers)
        at_K = (close_K + tokens_1T.shape[1] - N).clamp(min=0)
        return self.model.core.read_memories(tokens_1T, at_K[None], (close_K >= 0)[None])
