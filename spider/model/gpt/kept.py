"""How many bytes a GPT's forward pass keeps for its backward pass.

An estimate, in elements of each position of a layer in each pass, uncompiled and without masks. What a
compiler makes again is not known here, so that it is too much for a compiled pass::

    wide      2 D + K (H + G)        what the norms of layer, feed-forward, q and k read
              K H                    qk_gain
              V_ids 4                once a position: the logits (of many ids those of one piece)
    narrow    3 D + 3 F + 3 K H      what matrices, attention and the square read; shared keys are copied
              2 D                    branch_scales          4 D    xsa
              K G                    value_embeddings, of every other layer two
    stream    D                      residual_mix

Wide is fp32; narrow 2 bytes under autocast, else 4. Tests hold this against what real passes keep.
"""

from __future__ import annotations

from spider.model.gpt.config import GPTConfig


def kept(c: GPTConfig, size: int) -> int:
    """Bytes of a position of a layer; ``size``: of what is narrow."""
    D, heads, groups = c.hidden, c.head_dim * c.heads, c.head_dim * c.groups
    wide = 2 * D + heads + groups + (heads if c.qk_gain else 0)
    narrow = 3 * D + 3 * c.ffn_ratio * D + 3 * heads
    narrow += 2 * D * c.branch_scales + 4 * D * c.xsa + groups * (c.value_embeddings != "none")
    stream = D if c.residual_mix != "none" else 0
    return 4 * wide + size * narrow + (size if c.stream == "narrow" else 4) * stream
