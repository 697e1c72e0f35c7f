"""What the rest of Spider asks of a model: the protocol that every family keeps, and a base to begin from.

Training, evaluation, description, checkpoints and reports know a model by this page alone. A family is a
folder with ``config.py`` and ``model.py`` (`spider.config.model`), and the latter's ``Model`` is a
``torch.nn.Module`` that keeps `LanguageModel`. One that derives from `Model` here adds ``forward`` and three
counts (``parameters_by_part``, ``flops_per_token``, ``activation_bytes``), and replaces what it does better.
The smallest family is ``tests/families/toy``.

What is not asked for here is told by marks: ``init_weights`` of a module sets its own weights (making it
draws nothing), and `spider.model.layers` marks parameters for the optimizer. Names of modules and the order
in which they are made are part of what checkpoints hold.

Shapes: B windows, T ids of a window, V ids of the vocabulary, N new ids of a stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spider.config.model import ModelConfig
from spider.tokens import BYTES, Tokens

if TYPE_CHECKING:
    from spider.ngram.layout import Layout
    from spider.ngram.lookup import NgramLookup


@dataclass
class ModelOutput:
    loss: Tensor | None
    """For training, or (B, T) cross entropies for ``reduction="none"``; None without labels."""
    logits: Tensor | None
    """(B, T, V) float32 without labels, else None: training has no use for them."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars, ``cross_entropy`` (nats a target) among them where there are labels."""
    trace: Any = None
    """What happened inside, in the family's own words, where it was asked for."""


@dataclass(frozen=True)
class Fp8Parts:
    """What a family multiplies in fp8 itself, beside the linear layers, which are swapped for it."""

    layers: Mapping[str, nn.Module]
    """Those modules by name; each has a switch ``fp8``, off at first."""
    runs_on: Callable[[torch.device], bool]
    """Whether a device has what they need."""
    example: Callable[[int, int, torch.device], tuple[nn.Module, Tensor]]
    """Of (windows, ids of a window, device): one such module with random weights, and as many rows (M, K) as
    it gets in a forward pass, for the warm-up to time."""


class Inspector(Protocol):
    """What a family shows of a model, in its own words; evaluation stores it, the report draws it."""

    segments: str
    """What the model cuts a text into: ``patches``."""

    uncut: str | None
    """Why it cuts nothing, a sentence; None for a model that does."""

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        """Count what the trace of a forward pass says of the positions that were scored in it."""

    def figures(self) -> list[dict[str, Any]]:
        """What was counted, as plain JSON of the kinds in `spider.evaluation.records`."""
        ...

    def cut(self, tokens_BT: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """At which positions a segment closes, (B, T) bool, and how probable that was, where predicted."""
        ...

    def caption(self, total: int, closed: list[int]) -> str:
        """A line about a text of so many bytes, cut into segments of these sizes."""
        ...


class NgramHead(Protocol):
    """What reads an n-gram index for a model: `spider.model.ngram_head.NgramHead`."""

    layout: Layout

    def __call__(self, logits: Tensor, h: Tensor, candidates: Tensor) -> Tensor: ...


class LanguageModel(Protocol):
    """A model of any family; the bodies here are right for one without parts of its own for fp8."""

    config: Any
    """Its block of the configuration, a `ModelConfig` of the family's."""
    tokens: Tokens = BYTES
    """The vocabulary that it reads and writes: bytes, or what `spider.model.build_model` was given."""
    ngram: NgramHead | None
    """What prices the candidates of an n-gram index, where the configuration has ``ngram``."""
    lookup: NgramLookup | None = None
    """Where they come from: not a part of the model, but what it must be read with. Whoever loads a model
    sets it, and whoever calls one asks it."""
    most_documents: int | None = None
    """Of a row, where ``segments_BT`` are given: whoever packs rows says it."""
    shown: Mapping[str, str] = {}
    """Which of its own metrics stand in the training's log line, and how: ``{"loops": "{:.1f} loops"}``."""

    def reset_parameters(self) -> None:
        """Set every weight and buffer from the torch RNG; the same seed gives the same model."""

    def __call__(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
        candidates_BTW: Tensor | None = None,
        **documents: Tensor,
    ) -> ModelOutput:
        """Predict, at every position of ``tokens_BT`` (int64), the id that follows.

        Args:
            labels_BT: the id that follows each, `spider.tokens.IGNORED` where it does not count.
            n_loops: how often the looped part runs (default: the configuration's).
            reduction: "mean" for training; "none" for each position's cross entropy in nats, 0 where ignored.
            trace: also tell what happened inside.
            candidates_BTW: uint8, candidates for the next byte; given only to a model with an n-gram index.
            documents: ``segments_BT``, which of its row's documents each id is of, 0 for padding; only for a
                family whose configuration has `DOCUMENTS`.
        """
        ...

    def incremental(self, context: int, n_loops: int | None = None) -> Reader:
        """A stream of at most ``context`` ids; its logits are those of one forward pass over all of it."""
        ...

    def after_step(self, *, updated: bool = True) -> None:
        """Called once after every optimizer step; ``updated`` is false where its update was skipped."""
        return None

    def parts_to_compile(self) -> Sequence[tuple[nn.Module, str]]:
        """Functions of a forward pass that are compiled apart, each with the module that has it. A part that
        runs often is compiled once for every kind of its arguments."""
        ...

    def loops(self, asked: int | None) -> int:
        """How often the looped part runs: as asked, else as configured; ``ValueError`` for what cannot be."""
        if asked is not None and asked < 1:
            raise ValueError(f"n_loops: a model runs at least once (got {asked})")
        if not self.config.looped and asked not in (None, 1):
            raise ValueError(f"n_loops: this model of family {self.config.family} has no loops (got {asked})")
        return asked or self.config.loops

    def inspector(self) -> Inspector | None:
        """A new observer of what happens inside; None for a family that shows nothing."""
        return None

    def num_parameters(self) -> int: ...

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each part, under names for people; they sum to `num_parameters`."""
        ...

    def ffn_down(self) -> list[Tensor]:
        """The matrices that lead out of its feed-forwards; none for a family without."""
        ...

    def looked_up(self) -> int:
        """Parameters that are looked up and not multiplied: they cost no FLOPs, and autocast no copy."""
        return 0

    def scaling_parameters(self) -> int:
        """Those for each of which ``tokens_per_parameter`` asks for so many ids."""
        return self.num_parameters()

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """FLOPs of forward and backward for each id of a window of ``length`` ids."""
        ...

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        """Estimate of what a forward pass over so many windows keeps for the backward pass; ``narrow``: its
        matrix products run in two bytes, under autocast."""
        ...

    def keeps_wide(self, name: str) -> bool:
        """Whether fp8 leaves that linear layer alone: it is tiny, or decides something discrete."""
        return False

    def fp8_parts(self) -> Fp8Parts | None:
        """What it multiplies in fp8 itself, if anything."""
        return None


class _WithoutDraws(TorchFunctionMode):
    """Leave tensors as they are where random values would fill them.

    A tensor on the meta device has no values, and torch imports its compiler to fill it: two seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class Model(nn.Module, LanguageModel):
    """A torch module that is a `LanguageModel`: for annotations, and as the base of a family's model."""

    config: ModelConfig

    def __init__(self) -> None:
        super().__init__()
        self.register_module("ngram", None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Call ``init_weights`` of every module that has it, in order."""
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        with _WithoutDraws() if on_meta else contextlib.nullcontext():
            for module in self.modules():
                getattr(module, "init_weights", lambda: None)()

    def incremental(self, context: int, n_loops: int | None = None) -> Reader:
        return Reader(self, context, n_loops)

    def parts_to_compile(self) -> Sequence[tuple[nn.Module, str]]:
        return [(self, "forward")]

    def with_ngrams(self, logits: Tensor, h: Tensor, candidates: Tensor | None) -> Tensor:
        """The logits (..., V) as the index corrects them, by the last normalised state h (..., D); as they
        are where there is none. `ValueError` without candidates: zeros would merely score badly."""
        if self.ngram is None:
            return logits
        if candidates is None:
            raise ValueError("this model reads an index: give it what that proposes, as `candidates_BTW`")
        return self.ngram(logits, h, candidates)

    def without_knowledge(self, tokens_BT: Tensor) -> dict[str, Tensor]:
        """What to call the model with where its predictions do not matter, only their cost or what happens
        before them: the candidates of an n-gram index that knows nothing, if it reads one."""
        if self.ngram is None:
            return {}
        shape = *tokens_BT.shape, self.ngram.layout.width
        return {"candidates_BTW": torch.zeros(shape, dtype=torch.uint8, device=tokens_BT.device)}

    def ffn_down(self) -> list[Tensor]:
        """Those named ``down`` in what is named ``ffn``."""
        return [p for name, p in self.named_parameters() if re.search(r"\bffn\b.*\bdown\b", name)]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class Reader:
    """One stream of ids that a model reads piece by piece: what generation runs.

    This one reads all of its stream again for every piece: right for any family, and slow. A family that
    keeps what it needs of the past replaces ``read``.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None = None) -> None:
        self.model, self.context, self.n_loops = model, context, model.loops(n_loops)
        self.ids: list[int] = []
        self.candidates_NW: Tensor | None = None
        """The candidates after each id so far, where there are any: a view of a buffer that grows."""
        self._buffer_NW: Tensor | None = None

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], candidates_NW: Tensor | None = None) -> Tensor:
        """Read N more ids, with the candidates after each where the model reads an n-gram index; return the
        logits of what follows each of them, (N, V) float32.

        Raises:
            ValueError: there is nothing to read, or more than the context holds.
        """
        N, before = len(ids), len(self.ids)
        if not N or before + N > self.context:
            raise ValueError(f"cannot read {N} ids after {before} with a context of {self.context}")
        self.ids += ids
        if candidates_NW is not None:
            self._keep(candidates_NW, before)
        return self.read(N)

    def _keep(self, candidates_NW: Tensor, before: int) -> None:
        """Put candidates behind the ``before`` earlier ones. The buffer doubles, so that an id costs the same
        wherever it stands."""
        total, buffer_NW = before + len(candidates_NW), self._buffer_NW
        if buffer_NW is None or total > len(buffer_NW):
            rows = min(self.context, 1 << total.bit_length())
            buffer_NW = candidates_NW.new_empty(rows, candidates_NW.shape[1])
            if self._buffer_NW is not None:
                buffer_NW[:before] = self._buffer_NW[:before]
            self._buffer_NW = buffer_NW
        buffer_NW[before:total] = candidates_NW
        self.candidates_NW = buffer_NW[:total]

    def read(self, N: int) -> Tensor:
        """The logits of the last N ids of the stream."""
        given: dict[str, Any] = {}
        if self.candidates_NW is not None:
            given["candidates_BTW"] = self.candidates_NW[None]
        ids_1T = torch.tensor([self.ids], device=next(self.model.parameters()).device)
        logits_1TV = self.model(ids_1T, n_loops=self.n_loops, **given).logits
        assert logits_1TV is not None, "asked for without labels"
        return logits_1TV[0, -N:]


def model_tensors(model: nn.Module, prefix: str = "model.") -> dict[str, Tensor]:
    """Return the parameters (a tied one once) and persistent buffers, as ``{prefix}{name}``."""
    kept = model.state_dict()
    named = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
    return {prefix + name: tensor.detach() for name, tensor in named.items()}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and bytes of the ``model.*`` tensors."""
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        t = tensors[name].detach()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]
