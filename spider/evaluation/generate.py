"""Sample text from a model, one id at a time, as a stream.

The model reads each id once (`spider.model.interface.Reader`). When the context is full, the model starts a
new one with the last half of it. So the cost of a byte stays constant, and the model reads between half of
the context and all of it.

Ids are drawn on the host in float64 with a generator of their own, so a seed gives the same text for any
state of torch's generators. Only ids of text and EOS can be drawn. EOS ends the stream and is not part of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from spider.model.interface import Model
from spider.model.layers import wide
from spider.tokens import BYTES, Tokens

if TYPE_CHECKING:
    from spider.evaluation.mixer import Mixer


def generate(
    model: Model,
    prompt: bytes | str | np.ndarray,
    *,
    max_bytes: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int,
    n_loops: int | None = None,
    context: int = 1024,
    ends: Collection[int] = (),
    mixer: Mixer | None = None,
) -> Iterator[int]:
    """Stream the ids that the model writes after ``[BOS] + prompt``, without the prompt.

    Args:
        prompt: Text or raw bytes (empty: begin a document), or ids, which are read without a BOS in front.
        max_bytes: Most bytes of text. EOS may end the text before.
        temperature: 0 takes the likeliest id each time.
        top_k: Draw from the k likeliest ids.
        top_p: Draw from the fewest ids whose probabilities reach p (nucleus sampling, Holtzman et al. 2020).
        n_loops: Loops of the recurrent core (default: the model's).
        context: Most ids that the model reads. The window of its training is best.
        ends: Special ids that end the text, as EOS does.
        mixer: Mixes the model's distribution, and learns from the prompt and from what is written.

    Raises:
        ValueError: An argument is out of range, or the prompt is not text or exceeds the context. The call
            raises it, before the first id.
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
    prompt_ids = _prompt_ids(prompt, model.tokens, context)
    model.loops(n_loops)
    closing = {model.tokens.eos, *ends}
    writable_W = np.append(np.flatnonzero(model.tokens.bytes_of), sorted(closing))
    generator = torch.Generator().manual_seed(seed)

    def stream() -> Iterator[int]:
        ids = list(prompt_ids)
        reader = model.incremental(context, n_loops)
        device = next(model.parameters()).device
        # The n-gram index reads the whole document, so it reads each id once, also in a new context.
        index = model.lookup.stream() if model.lookup else None
        new = ids
        written = 0
        before_1V = np.empty((0, model.tokens.size), np.float32)
        while written < max_bytes:
            unread = new
            candidates = None
            if index is not None:
                candidates = torch.from_numpy(index.extend(np.array(new))).to(device)
            if len(ids) > context:
                ids = ids[-max(1, context // 2) :]
                unread = ids
                if candidates is not None:
                    candidates = torch.cat([*reader.candidates, candidates])[-len(ids) :]
                reader = model.incremental(context, n_loops)
            # Restore the model's mode before each id is handed to the caller.
            was_training = model.training
            if was_training:
                model.eval()
            logits_NV = reader.extend(unread, candidates)[-len(new) :]
            if was_training:
                model.train()
            logits_V = logits_NV[-1]
            if mixer is not None:
                log_p_NV = wide(logits_NV).log_softmax(-1).cpu().numpy()
                before_NV = np.concatenate([before_1V, log_p_NV])
                mixer.read(np.array(new)[1 - len(before_1V) :], before_NV[:-1])
                before_1V = before_NV[-1:]
                logits_V = torch.from_numpy(mixer.log_p(before_NV[-1]))
            drawn = sample(logits_V, temperature, top_k, top_p, generator, writable_W)
            written += int(model.tokens.bytes_of[drawn])
            if drawn in closing or written > max_bytes:
                return
            new = [drawn]
            ids.append(drawn)
            yield drawn

    return stream()


def _prompt_ids(prompt: bytes | str | np.ndarray, vocabulary: Tokens, context: int) -> list[int]:
    """Return the ids of a prompt, and refuse one that does not fit into the context."""
    if isinstance(prompt, np.ndarray):
        ids = prompt.tolist()
    else:
        ids = vocabulary.encode(_utf8(prompt) if isinstance(prompt, str) else prompt)[:-1].tolist()
    if len(ids) > context:
        size = len(vocabulary.raw(ids))
        length = f"{size:,} bytes" + (f" ({len(ids) - 1:,} ids)" if len(ids) - 1 != size else "")
        raise ValueError(
            f"the prompt is {length} and the model reads {context - 1:,} at most after the "
            "document's start: give its end only, or a larger context"
        )
    return ids


def _utf8(prompt: str) -> bytes:
    """Return the prompt's bytes. A command line passes bytes that are not UTF-8 as lone surrogates."""
    try:
        return prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        wrong = prompt[error.start : error.end].encode("utf-8", "surrogateescape").hex(" ")
        raise ValueError(
            f"the prompt is not valid UTF-8: {wrong} (hexadecimal) after {prompt[: error.start][-20:]!r}; "
            "raw bytes can be given as bytes, on the command line by --prompt-file"
        ) from None


def sample(
    logits_V: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
    writable_W: np.ndarray,
) -> int:
    """Draw one of the ids in ``writable_W`` from unnormalised log probabilities (V,)."""
    allowed_W = logits_V[torch.from_numpy(writable_W).to(logits_V.device)].double().cpu()
    if temperature == 0:
        return int(writable_W[int(allowed_W.argmax())])
    p_W, order_W = (allowed_W / temperature).softmax(0).sort(descending=True, stable=True)
    if top_k is not None:
        p_W[top_k:] = 0
    if top_p is not None:
        p_W[p_W.cumsum(0) - p_W >= top_p * p_W.sum()] = 0  # the id that crosses p stays
    return int(writable_W[int(order_W[torch.multinomial(p_W, 1, generator=generator)])])


def stream_text(ids: Iterable[int], vocabulary: Tokens = BYTES) -> Iterator[str]:
    """Yield the text of a stream of ids, character by character; malformed UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        text = decoder.decode(vocabulary.raw([i]))
        if text:
            yield text
    text = decoder.decode(b"", final=True)
    if text:
        yield text
