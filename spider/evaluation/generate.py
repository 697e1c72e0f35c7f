"""Sample text from a model, one id at a time: one text as a stream, or several as a batch.

The model reads each id once, and begins a new context when one is full (`spider.model.reading`). So the cost
of a byte stays constant.

Ids are drawn on the host in float64 with a generator of their own, so a seed gives the same text for any
state of torch's generators. Only ids of text and EOS can be drawn. EOS ends the stream and is not part of it.
With the calculator, ids that begin and end a call can be drawn as well.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.common import files
from spider.common.errors import Diverged
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.data.chat import opening
from spider.evaluation.calculator import Calls
from spider.evaluation.records import Sample, Written
from spider.model import choose_kernels
from spider.model.interface import Model
from spider.model.reading import Streams
from spider.processes.device import available, choose_tf32
from spider.tokens import BYTES, Tokens
from spider.tokens.turns import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, TURN

log = logging.getLogger(__name__)

#: What the tokens of calls look like in text: ⟨48/2⟩⟨= 24⟩.
_SHOWN = {PYTHON_START: "⟨", PYTHON_END: "⟩", OUTPUT_START: "⟨= ", OUTPUT_END: "⟩"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a generated text."""

    max_bytes: int
    """Most bytes of text, where a token of a call counts as one. EOS may end the text before."""
    max_ids: int | None = None
    """Most ids, also those of calls (None: no limit)."""
    temperature: float = 1.0
    """0 takes the likeliest id each time."""
    top_k: int | None = None
    """Draw from the k likeliest ids."""
    top_p: float | None = None
    """Draw from the fewest ids whose probabilities reach p (nucleus sampling, Holtzman et al. 2020)."""
    n_loops: int | None = None
    """Loops of the recurrent core (None: the model's)."""
    context: int = 1024
    """Most ids that the model reads. The window of its training is best."""
    ends: Collection[int] = ()
    """Special ids that end the text, as EOS does."""
    calculator: bool = False
    """Compute the calls that the model writes, and continue the text with their outputs."""

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or self.temperature < 0 or self.context < 1:
            raise ValueError(
                "generation needs max_bytes >= 0, temperature >= 0 and context >= 1 "
                f"(got {self.max_bytes}, {self.temperature}, {self.context})"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 (got {self.top_k})")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (got {self.top_p})")


def generate(model: Model, prompt: bytes | str | np.ndarray, *, seed: int, **settings: Any) -> Iterator[int]:
    """Stream the ids that the model writes after ``[BOS] + prompt``, without the prompt and the end.

    Args:
        prompt: Text or raw bytes (empty: begin a document), or ids, which are read without a BOS in front.
        settings: Fields of `Settings`.

    Raises:
        ValueError: An argument is out of range, or the prompt is not text or exceeds the context. The call
            raises it, before the first id.
    """
    closing = {model.tokens.eos, *settings.get("ends", ())}
    steps = _steps(model, prompt, [seed], Settings(**settings))
    return (drawn for step in steps for drawn in step.values() if drawn not in closing)


def generate_many(
    model: Model, prompt: bytes | str | np.ndarray, *, seeds: Sequence[int], **settings: Any
) -> list[list[int]]:
    """Return several texts that the model writes after one prompt, as ids. The id that ends a text is
    included.

    The model reads the prompt once. It then reads the texts as one batch, and a text leaves the batch when it
    ends. Each text is the one that `generate` writes with its seed, as far as batches of several sizes round
    alike. The arguments and errors are those of `generate`.
    """
    texts: list[list[int]] = [[] for _ in seeds]
    for step in _steps(model, prompt, seeds, Settings(**settings)):
        for text, drawn in step.items():
            texts[text].append(drawn)
    return texts


def _steps(
    model: Model, prompt: bytes | str | np.ndarray, seeds: Sequence[int], settings: Settings
) -> Iterator[dict[int, int]]:
    """Yield the next id of each text that has not ended, by the number of its seed."""
    prompt_ids = _prompt_ids(prompt, model.tokens, settings.context)
    model.loops(settings.n_loops)  # raises if the model cannot have so many
    closing = {model.tokens.eos, *settings.ends}
    calls = [Calls(model.tokens) for _ in seeds] if settings.calculator else []
    marks = {PYTHON_START, PYTHON_END} if calls else set()
    writable_W = np.append(np.flatnonzero(model.tokens.bytes_of), sorted(closing | marks))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def steps() -> Iterator[dict[int, int]]:
        if not settings.max_bytes:
            return
        texts = Streams(model, settings.context, settings.n_loops)
        numbers = list(range(len(seeds)))
        written = [0] * len(seeds)
        new = [prompt_ids]
        while True:
            logits_RV = texts.read(new)[:, -1]
            if len(logits_RV) < len(numbers):  # the prompt, which all texts continue
                texts.select([0] * len(numbers))
                logits_RV = logits_RV.expand(len(numbers), -1)
            drawing = [generators[number] for number in numbers]
            drawn_R = draw(logits_RV, settings, drawing, writable_W)
            if calls:
                drawn_R = [calls[number].next(drawn) for number, drawn in zip(numbers, drawn_R, strict=True)]
            step = {}
            going = []
            for row, (number, drawn) in enumerate(zip(numbers, drawn_R, strict=True)):
                written[number] += int(model.tokens.bytes_of[drawn]) or 1
                if written[number] <= settings.max_bytes:
                    step[number] = drawn
                if written[number] < settings.max_bytes and drawn not in closing:
                    going.append(row)
            yield step
            if not going:
                return
            texts.select(going)
            new = [[drawn_R[row]] for row in going]
            numbers = [numbers[row] for row in going]

    return islice(steps(), settings.max_ids)


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


def draw(
    logits_RV: Tensor, settings: Settings, generators: Sequence[torch.Generator], writable_W: np.ndarray
) -> list[int]:
    """Draw one of the ids in ``writable_W`` for each row of unnormalised log probabilities (R, V).

    Raises:
        Diverged: they are not finite.
    """
    allowed_RW = logits_RV[:, torch.from_numpy(writable_W).to(logits_RV.device)].double().cpu()
    if not allowed_RW.amax(-1).isfinite().all():
        raise Diverged(
            "the model's predictions are not finite, its weights have diverged; use an earlier checkpoint"
        )
    if settings.temperature == 0:
        return [int(i) for i in writable_W[allowed_RW.argmax(-1).numpy()]]
    p_RW = (allowed_RW / settings.temperature).softmax(-1)
    order_RW = None
    if settings.top_k is not None or settings.top_p is not None:
        p_RW, order_RW = p_RW.sort(descending=True, stable=True)
    if settings.top_k is not None:
        p_RW[:, settings.top_k :] = 0
    if settings.top_p is not None:  # the id that crosses p stays
        p_RW[p_RW.cumsum(-1) - p_RW >= settings.top_p * p_RW.sum(-1, keepdim=True)] = 0
    # The first id whose cumulated probability exceeds a uniform share of the whole.
    sum_RW = p_RW.cumsum(-1)
    share_R = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    chosen_R1 = torch.searchsorted(sum_RW, share_R[:, None] * sum_RW[:, -1:], right=True)
    if order_RW is not None:
        chosen_R1 = order_RW.gather(1, chosen_R1)
    return [int(i) for i in writable_W[chosen_R1[:, 0].numpy()]]


def stream_text(ids: Iterable[int], vocabulary: Tokens = BYTES) -> Iterator[str]:
    """Yield the text of a stream of ids, character by character; malformed UTF-8 becomes U+FFFD.

    A call is shown as ``⟨48/2⟩`` and its output as ``⟨= 24⟩``.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        text = decoder.decode(_SHOWN[i].encode() if i in _SHOWN else vocabulary.raw([i]))
        if text:
            yield text
    text = decoder.decode(b"", final=True)
    if text:
        yield text


#: Temperature of the sample. Below 1 it shows what the model finds likely, and it rarely repeats itself.
TEMPERATURE = 0.7


def sample(receipt: Path, spec: StageSpec, output: Path, *, device: str | None = None) -> Sample:
    """Continue the prompts with the checkpoint of a receipt; write sample.txt and then sample.json.

    A model that was trained on conversations answers the prompts.

    Args:
        spec: the stage. Its ``evaluation`` block holds the prompts and the length.
        device: device to run on (default: the GPU if torch can use one, else the CPU).

    Raises:
        ValueError: the receipt is of another stage or format, or the checkpoint is missing or damaged.
    """
    trained = Receipt.of_stage(receipt, spec)
    checkpoint = Checkpoint.at(receipt)
    device = device or available()
    choose_kernels(spec.kernels)
    choose_tf32(spec.tf32)
    log.info("writing %s bytes on %s", f"{spec.evaluation.sample_bytes:,}", device)
    model = checkpoint.model(device)
    first, *more = written(model, spec, converses=checkpoint.manifest.conversations is not None)
    files.write_text(StageFolder(output).sample_text, as_text([first, *more]))
    return Sample(
        format=Sample.FORMAT,
        run=spec.run,
        stage=spec.stage,
        weights=trained.averaged_weights or trained.weights,
        prompt=first.prompt,
        text=first.text,
        more=tuple(more),
    ).write(StageFolder(output).sample)


def written(model: Model, spec: StageSpec, *, converses: bool) -> Iterator[Written]:
    """Yield the sample, the continuation of each further prompt, and the texts from the start of a document.

    Args:
        converses: Whether the model has learned from conversations. It then answers the prompts.
    """
    settings = spec.evaluation
    first, *others = settings.prompts
    texts = [(first, TEMPERATURE), *((prompt, 0.0) for prompt in others)]
    for number, (prompt, temperature) in enumerate(texts + [("", 1.0)] * settings.unconditioned):
        answers = bool(prompt) and converses
        ids = generate(
            model,
            opening([("user", prompt)], model.tokens, answer=True) if answers else prompt,
            max_bytes=settings.sample_bytes,
            temperature=temperature,
            seed=spec.seed + number,
            n_loops=settings.n_loops or spec.loops,
            context=spec.window,
            ends=[TURN] if answers else (),
            calculator=answers,
        )
        text = ("\n" if answers else "") + "".join(stream_text(ids, model.tokens))
        yield Written(prompt=prompt, text=text)


def as_text(texts: Iterable[Written]) -> str:
    """Return texts for people, with a line between two of them."""
    return "\n---\n\n".join(one.prompt + one.text + "\n" for one in texts)
