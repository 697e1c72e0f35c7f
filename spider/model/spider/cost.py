"""What a Spider costs: its parameters by part, its FLOPs, and the memory of its activations.

FLOPs are those of matrix products, a multiply and an add each, attention as the full square (as
``torch.utils.flop_counter`` counts it), the backward pass as twice the forward, recomputation not at all.

Activations are an estimate of what the forward pass keeps for the backward pass, in elements for each byte
(prelude, coda), or for each patch slot, layer and loop (core), of a micro-batch:

    a norm       2 D wide, 1 D narrow                                     its input, normalised, weighted
    attention    2 H (nope + rope) + H (nope + v) + 2 H v + 3 kv + rope   q, k, kv, output twice, latent
    SwiGLU       4 F                                                      gate and up, silu(gate), product
    MoE          K (2 D + 4 F_expert) + 4 F_shared                        rows in and out of K experts
    Engram       9 D wide        a loop around the layers   5 D wide

Wide is fp32 always; narrow is 2 bytes under autocast, else 4. Under checkpointing a core layer keeps its
input alone, and one layer at a time is recomputed. The head adds two fp32 copies of the logits. A test holds
this against what a real forward pass keeps; temporaries and the allocator's rest come on top.
"""

from __future__ import annotations

from torch import nn

from spider.model.spider.body import Body
from spider.model.spider.config import SpiderConfig
from spider.model.spider.experts import Experts


def parameters_by_part(model: Body) -> dict[str, int]:
    """Parameters of each part; the first that claims a name has it."""
    parts = dict.fromkeys(
        ("embedding", "dense_blocks", "routed_experts", "shared_experts", "core_layers", "engram"), 0
    )
    parts |= {"recurrence": 0, "boundary": 0}
    for name, parameter in model.named_parameters():
        parts[_part(name)] += parameter.numel()
    return parts


def _part(name: str) -> str:
    if name == "embed_tokens":
        return "embedding"
    if name.startswith(("prelude.", "coda.")):
        return "dense_blocks"
    if ".experts." in name:
        return "routed_experts"
    if ".shared." in name:
        return "shared_experts"
    if ".engram." in name or name.startswith("ngram_embedding."):
        return "engram"
    if name.startswith("core.layers."):
        return "core_layers"
    return "recurrence" if name.startswith("core.") else "boundary"


def flops_per_token(model: Body, length: int, loops: int) -> float:
    """FLOPs of forward and backward per byte of a window of ``length`` bytes."""
    slots, a = model.chunker.slots(length), model.config.attention
    square = a.heads * (a.nope_dim + a.rope_dim + a.v_dim)
    dense = sum(_multiplies(block) + square * length for block in [*model.prelude, *model.coda])
    predictor = _multiplies(model.chunker)
    memory = sum(_multiplies(layer.engram) for layer in model.core.stack() if layer.engram is not None)
    loop = _multiplies(model.core) - memory + square * slots * len(model.core.layers)
    forward = 2 * (
        length * (dense + predictor + model.embed_tokens.numel()) + slots * (memory + loops * loop)
    )
    return 3 * forward / length


def _multiplies(module: nn.Module) -> int:
    """Multiplies per position of every matrix in ``module`` that each position meets."""
    total = 0
    for m in module.modules():
        if isinstance(m, nn.Linear):
            total += m.in_features * m.out_features
        elif isinstance(m, Experts):
            total += (m.up.numel() + m.down.numel()) * m.top_k // m.up.shape[0]
    return total


def activation_bytes(model: Body, windows: int, length: int, loops: int, *, narrow: bool) -> int:
    """Bytes that the forward pass over ``windows`` windows keeps; the module's docstring has the terms."""
    c = model.config
    D, r, size = c.hidden, c.recurrence, 2 if narrow else 4
    bytes_, slots = windows * length, windows * model.chunker.slots(length)
    loops = min(loops, r.bptt or loops)

    norms, attention = 4 * D * 4 + 2 * D * size, _attention(c) * size
    dense = norms + attention + 4 * c.ffn_hidden * size
    core = norms + attention + _experts(c) * size
    engram = 9 * D * 4
    total = bytes_ * (c.prelude_layers + c.coda_layers) * dense
    total += slots * loops * 5 * D * 4
    if r.checkpointing:
        total += slots * (loops * r.layers * D * 4 + core + engram)
    else:
        total += slots * loops * (r.layers * core + len(c.engram.layers) * engram)
    # Embedding, boundaries, the way down and up, the head's norm; then the logits and their gradient.
    return int(total + bytes_ * (8 * D * 4 + 2 * model.tokens.size * 4))


def _attention(c: SpiderConfig) -> int:
    a = c.attention
    heads = 2 * (a.nope_dim + a.rope_dim) + (a.nope_dim + a.v_dim) + 2 * a.v_dim
    return a.heads * heads + 3 * a.kv_lora_rank + a.rope_dim


def _experts(c: SpiderConfig) -> int:
    if c.moe is None:
        return 4 * c.ffn_hidden
    return c.moe.top_k * (2 * c.hidden + 4 * c.moe.expert_hidden) + 4 * c.moe.shared_hidden
