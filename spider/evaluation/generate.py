"""Sampling bytes from a model, one at a time, as a stream.

Each step reads the last ``context`` ids again and samples one more: no cache, so the cost of a byte is that
of a whole window, in exchange for code that is right for any model with the common interface. The draw
happens on the host in float64 with a generator of its own, so a seed gives one text whatever else uses
torch's random state.

The window is padded on the right to a multiple of `BLOCK`. A causal model cannot see padding, but a model
that grants a window patches in proportion to its length would grant a window of five bytes only three.

Only bytes and EOS can be drawn. EOS ends the stream and is not part of it.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Iterator

import torch

from spider.vocab import BOS, EOS, PAD

BLOCK = 64

log = logging.getLogger(__name__)


def generate(
    model: torch.nn.Module,
    prompt: bytes | str,
    *,
    max_bytes: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int,
    n_loops: int | None = None,
    context: int = 1024,
) -> Iterator[int]:
    """Stream the bytes (0..255) that the model writes after ``[BOS] + prompt``, without the prompt.

    Args:
        prompt: text or raw bytes; where empty, a document is written from its beginning.
        max_bytes: stop after so many bytes, if EOS does not come first.
        temperature: 0 takes the likeliest id each time.
        top_k: draw among the k likeliest ids only.
        top_p: draw among the fewest ids whose probabilities reach p (nucleus sampling, Holtzman et al. 2020).
        context: ids the model reads at most; best the window it was trained on. A longer
            prompt loses its beginning, which is logged once.

    Raises:
        ValueError: an argument out of range (at the call, before the first byte is drawn).
    """
    if max_bytes < 0 or temperature < 0 or context < 1:
        raise ValueError(
            "generation needs max_bytes >= 0, temperature >= 0 and context >= 1 "
            f"(got {max_bytes}, {temperature}, {context})"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 (got {top_k})")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (got {top_p})")
    ids = [BOS, *(prompt.encode("utf-8") if isinstance(prompt, str) else prompt)]
    if len(ids) > context:
        log.warning(
            "the prompt is %d bytes and the model reads %d at a time: only its end is read",
            len(ids) - 1,
            context,
        )
    return _stream(model, ids, max_bytes, temperature, top_k, top_p, seed, n_loops, context)


def _stream(
    model: torch.nn.Module,
    ids: list[int],
    max_bytes: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    n_loops: int | None,
    context: int,
) -> Iterator[int]:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_bytes):
        ids = ids[-context:]
        padding = min(-len(ids) % BLOCK, context - len(ids))
        # Not around the yield: the caller must get back neither inference mode nor a model in the wrong mode.
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            logits_BTV = model(torch.tensor([ids + [PAD] * padding], device=device), n_loops=n_loops).logits
        model.train(was_training)
        drawn = sample(logits_BTV[0, len(ids) - 1], temperature, top_k, top_p, generator)
        if drawn == EOS:
            return
        ids.append(drawn)
        yield drawn


def sample(
    logits_V: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """Draw one id among the bytes and EOS from unnormalised log probabilities (V,)."""
    allowed_V = torch.cat([logits_V[:256], logits_V[EOS : EOS + 1]]).double().cpu()
    if temperature == 0:
        place = int(allowed_V.argmax())
    else:
        p_V, order_V = (allowed_V / temperature).softmax(0).sort(descending=True, stable=True)
        if top_k is not None:
            p_V[top_k:] = 0
        if top_p is not None:
            p_V[p_V.cumsum(0) - p_V >= top_p * p_V.sum()] = 0  # the one that crosses p stays
        place = int(order_V[torch.multinomial(p_V, 1, generator=generator)])
    return place if place < 256 else EOS


def stream_text(ids: Iterable[int]) -> Iterator[str]:
    """Text of a byte stream as it arrives: a character waits until it is whole, malformed UTF-8 is U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        if i < 256 and (text := decoder.decode(bytes([i]))):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
