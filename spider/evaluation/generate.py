"""Sampling text from a model, one id at a time, as a stream.

The model reads each id once (`spider.model.interface.Reader`). When the context is full, the model begins a
new one with the last half of it, so that the cost of a byte stays constant and what it can look back on is
between half the context and all of it.

The draw happens on the host in float64 with a generator of its own, so a seed gives one text whatever else
uses torch's random state. Only ids that stand for text and EOS can be drawn; EOS ends the stream and is not
part of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import torch

from spider.model.interface import Model
from spider.tokens import BYTES, Tokens


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
) -> Iterator[int]:
    """Stream the ids that the model writes after ``[BOS] + prompt``, without the prompt.

    Args:
        prompt: text or raw bytes, where empty, a document is written from its beginning; or ids, as they are.
        max_bytes: stop after so many bytes of text, if EOS does not come first.
        temperature: 0 takes the likeliest id each time.
        top_k: draw among the k likeliest ids only.
        top_p: draw among the fewest ids whose probabilities reach p (nucleus sampling, Holtzman et al. 2020).
        n_loops: loops of the recurrent core (default: the model's).
        context: ids the model reads at most; best the window it was trained on.
        ends: special ids that end the text, as EOS does.

    Raises:
        ValueError: at the call: an argument out of range, a prompt that is not text or exceeds the context.
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
    vocabulary = model.tokens
    given = _utf8(prompt) if isinstance(prompt, str) else prompt
    ids = given.tolist() if isinstance(given, np.ndarray) else vocabulary.encode(given)[:-1].tolist()
    if len(ids) > context:
        size = len(vocabulary.raw(ids))
        what = f"{size:,} bytes" + (f" ({len(ids) - 1:,} ids)" if len(ids) - 1 != size else "")
        raise ValueError(
            f"the prompt is {what} and the model reads {context - 1:,} at most after the "
            "document's start: give its end only, or a larger context"
        )
    model.loops(n_loops)
    closing = {vocabulary.eos, *ends}
    writable_W = np.append(np.flatnonzero(vocabulary.bytes_of), sorted(closing))
    generator = torch.Generator().manual_seed(seed)

    def stream(ids: list[int]) -> Iterator[int]:
        reader, written = model.incremental(context, n_loops), 0
        # The n-gram index looks back on the whole document, so it reads each id once, also in a new context.
        index = model.lookup.stream() if model.lookup else None
        new = unread = ids = list(ids)
        while written < max_bytes:
            given = {}
            if index is not None:
                new_NW = torch.from_numpy(index.extend(np.array(new)))
                given["candidates_NW"] = new_NW.to(next(model.parameters()).device)
            if len(ids) > context:
                unread = ids = ids[-max(1, context // 2) :]
                if index is not None:
                    assert reader.candidates_NW is not None, "the reader was given candidates"
                    known_NW = torch.cat([reader.candidates_NW, given["candidates_NW"]])
                    given["candidates_NW"] = known_NW[-len(ids) :]
                reader = model.incremental(context, n_loops)
            # Between ids the caller has the model back in the mode that it left it in.
            if was_training := model.training:
                model.eval()
            logits_V = reader.extend(unread, **given)[-1]
            if was_training:
                model.train()
            drawn = sample(logits_V, temperature, top_k, top_p, generator, writable_W)
            written += int(vocabulary.bytes_of[drawn])
            if drawn in closing or written > max_bytes:  # what would go beyond is left out
                return
            new = unread = [drawn]
            ids.append(drawn)
            yield drawn

    return stream(ids)


def _utf8(prompt: str) -> bytes:
    """The prompt's bytes; a command line hands over bytes that are not UTF-8 as lone surrogates."""
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
    """Draw one of the ids that may be written from unnormalised log probabilities (V,)."""
    allowed_W = logits_V[torch.from_numpy(writable_W).to(logits_V.device)].double().cpu()
    if temperature == 0:
        return int(writable_W[int(allowed_W.argmax())])
    p_W, order_W = (allowed_W / temperature).softmax(0).sort(descending=True, stable=True)
    if top_k is not None:
        p_W[top_k:] = 0
    if top_p is not None:
        p_W[p_W.cumsum(0) - p_W >= top_p * p_W.sum()] = 0  # the one that crosses p stays
    return int(writable_W[int(order_W[torch.multinomial(p_W, 1, generator=generator)])])


def stream_text(ids: Iterable[int], vocabulary: Tokens = BYTES) -> Iterator[str]:
    """Text of a stream as it arrives: a character waits until it is whole, malformed UTF-8 is U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        if text := decoder.decode(vocabulary.raw([i])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
