"""The contract between a model and the rest of Spider: the base class `Model`.

Training, evaluation, description, checkpoints and reports use a model through this file alone. A family is a
folder with ``config.py`` and ``model.py`` (`spider.config.model`). The class ``Model`` of the latter derives
from `Model` here. It implements ``forward``, ``flops_per_token`` and ``activation_bytes``, and overrides what
it does better than the base. The smallest family is ``tests/families/toy``.

A submodule that defines ``init_weights`` sets its own weights there; its constructor draws no random numbers.
Names of modules and their order are part of the checkpoint format.

Shapes: B windows, T tokens of a window, V vocabulary size, N new tokens of a stream, D features.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spider.config.model import ModelConfig
from spider.tokens import BYTES, Tokens

if TYPE_CHECKING:
    from spider.model.ngram_head import NgramHead
    from spider.ngram.lookup import NgramLookup


@dataclass
class ModelOutput:
    loss: Tensor | None
    """Training loss, or (B, T) cross entropies for ``reduction="none"``; None without labels."""
    logits: Tensor | None
    """(B, T, V) float32; None with labels, because training does not need them."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars; with labels they include ``cross_entropy``, in nats per target."""
    trace: Any = None
    """Record of what happened inside, in the family's own format; None unless requested."""


@dataclass(frozen=True)
class ParameterGroup:
    """How the optimizer and the compressor treat a parameter."""

    role: Literal["matrix", "table", "vector"]
    """matrix: multiplied; Muon may train it, and it decays. table: its rows are looked up; AdamW trains it,
    and it decays only under ``decay_embeddings``. vector: all else; AdamW trains it without decay."""
    rate: float = 1.0
    """Factor on the learning rate of its role."""


@dataclass(frozen=True)
class Fp8Parts:
    """Modules that multiply in fp8 by code of their own. Linear layers are not among them: torchao swaps
    those."""

    layers: Mapping[str, nn.Module]
    """The modules by name; each has an attribute ``fp8``, False at first."""
    runs_on: Callable[[torch.device], bool]
    """Whether a device supports them."""
    example: Callable[[int, int, torch.device], tuple[nn.Module, Tensor]]
    """Maps (windows, tokens of a window, device) to one such module with random weights and its input (M, K)
    of the size of a forward pass. The warm-up times it."""


class Inspector(Protocol):
    """Observer of a family's inner workings; evaluation stores its figures and the report draws them."""

    segments: str
    """Name of the segments into which the model cuts a text, for example ``patches``."""

    uncut: str | None
    """One sentence that explains why the model does not cut its text; None for a model that does."""

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        """Add the trace of a forward pass to the counts, for the positions that were scored in it."""

    def figures(self) -> list[dict[str, Any]]:
        """Return the counts as plain JSON, in the kinds of `spider.evaluation.records`."""
        ...

    def cut(self, tokens_BT: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the positions that close a segment, (B, T) bool, and their probabilities if predicted."""
        ...

    def caption(self, total: int, closed: list[int]) -> str:
        """Describe a text of ``total`` bytes that is cut into segments of these sizes, in one line."""
        ...


class _SkipRandomInit(TorchFunctionMode):
    """Skip random initialisation.

    Tensors on the meta device have no values, and torch imports its compiler to fill them, which takes two
    seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class Model(nn.Module):
    """Base class of every family's model; its docstrings are the contract."""

    TABLES: ClassVar[str] = ""
    """Regular expression that matches the full names of the parameters whose rows are looked up."""
    PARTS: ClassVar[Mapping[str, str]] = {"ngram": r"ngram\.", "network": ""}
    """Regular expression of each part's parameters, under a name for people. The first one that matches the
    beginning of a parameter's name counts."""

    config: ModelConfig
    """The family's block of the configuration."""
    tokens: Tokens = BYTES
    """Vocabulary: bytes, or the one given to `spider.model.build_model`."""
    ngram: NgramHead | None
    """Head that scores the candidates of an n-gram index; None unless the configuration has ``ngram``."""
    lookup: NgramLookup | None = None
    """Source of the candidates. It is not part of the model's state: the code that loads a model sets it."""
    most_documents: int | None = None
    """Maximum number of documents in a row where ``segments_BT`` is given; set by the code that packs
    rows."""
    shown: Mapping[str, str] = {}
    """Format of each own metric in the training log line: ``{"loops": "{:.1f} loops"}``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_module("ngram", None)

    # ------------------------------------------------------------------------------------ a family implements

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
        candidates_BTW: Tensor | None = None,
    ) -> ModelOutput:
        """Predict the next token at every position of ``tokens_BT`` (int64).

        A family whose configuration sets `DOCUMENTS` also takes ``segments_BT``: the number of each token's
        document within its row, 0 for padding.

        Args:
            labels_BT: the next token of each position. `spider.tokens.IGNORED` marks a position without a
                target.
            n_loops: runs of the looped part (default: the configuration's).
            reduction: "mean" for training. "none" returns each position's cross entropy in nats, which is 0
                where the label is ignored.
            trace: whether to return `ModelOutput.trace`.
            candidates_BTW: candidates for the next byte, uint8. A model with an n-gram head requires them.
        """
        raise NotImplementedError

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """Return the FLOPs of the forward and backward pass per token of a window of ``length`` tokens."""
        raise NotImplementedError

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        """Estimate the bytes that a forward pass over a batch keeps for the backward pass; ``narrow`` means
        that matrix products run in two bytes, under autocast."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- a family may override

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Return the group of each parameter, by its name.

        Here a parameter is a table if `TABLES` matches its name, a matrix (or a stack of matrices) if its
        last two axes are both longer than 1, else a vector.
        """
        groups: dict[str, ParameterGroup] = {}
        for name, p in self.named_parameters():
            if re.fullmatch(self.TABLES, name) or name == "ngram.symbols":
                groups[name] = ParameterGroup("table")
            elif p.ndim in (2, 3) and min(p.shape[-2:]) > 1:
                groups[name] = ParameterGroup("matrix")
            else:
                groups[name] = ParameterGroup("vector")
        return groups

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every weight and buffer from the torch RNG, so that a seed determines the model.

        Here ``init_weights`` of every module that defines it is called, in order. Parameters on the meta
        device hold no values; buffers beside them are set all the same.
        """
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        with _SkipRandomInit() if on_meta else contextlib.nullcontext():
            for module in self.modules():
                init_weights: Callable[[], None] | None = getattr(module, "init_weights", None)
                if init_weights is not None:
                    init_weights()

    def incremental(self, context: int, n_loops: int | None = None) -> Reader:
        """Return a stream of at most ``context`` tokens. Its logits equal those of one forward pass over the
        whole stream."""
        return Reader(self, context, n_loops)

    def after_step(self, *, updated: bool = True) -> None:
        """Run after every optimizer step; ``updated`` is False if the update was skipped."""
        return None

    def parts_to_compile(self) -> Sequence[tuple[nn.Module, str]]:
        """Return the functions of the forward pass that are compiled separately, as (module, attribute).

        A part that runs often is compiled once for each kind of its arguments.
        """
        return [(self, "forward")]

    def loops(self, requested: int | None) -> int:
        """Return how often the looped part runs: as requested, else as configured.

        Raises:
            ValueError: the request is below 1, or the model does not loop.
        """
        if requested is not None and requested < 1:
            raise ValueError(f"n_loops: must be at least 1 (got {requested})")
        if not self.config.looped and requested not in (None, 1):
            raise ValueError(
                f"n_loops: this model of family {self.config.family} has no loops (got {requested})"
            )
        return requested or self.config.loops

    def inspector(self) -> Inspector | None:
        """Return a new observer of the model's inner workings; None if the family has none."""
        return None

    def ffn_down(self) -> list[list[Tensor]]:
        """Return the output matrices of the feed-forward of each layer; here those named ``down`` inside each
        ``ffn``."""
        layers: dict[str, list[Tensor]] = {}
        for name, p in self.named_parameters():
            if found := re.match(r"(.*\bffn)\b.*\bdown\b", name):
                layers.setdefault(found[1], []).append(p)
        return list(layers.values())

    def ffn_inputs(
        self, tokens_BT: Tensor, layers: Sequence[int], n_loops: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the normalised states before the head, (B, T, D), and the products of the feed-forwards of
        these layers with them, up to the output matrix, (B, T, F) each.

        Only a family whose configuration sets `FFN_INPUTS` has it. Each of its layers has one output matrix.
        """
        raise NotImplementedError

    def looked_up(self) -> int:
        """Count the parameters that are only looked up. They cost no FLOPs, and autocast does not copy
        them."""
        return 0

    def scaling_parameters(self) -> int:
        """Count the parameters that ``tokens_per_parameter`` refers to."""
        return self.num_parameters()

    def keeps_wide(self, name: str) -> bool:
        """Tell whether the linear layer of this name stays out of fp8, because it is tiny or makes a discrete
        decision."""
        return False

    def fp8_parts(self) -> Fp8Parts | None:
        """Return the modules with fp8 code of their own; None if there are none."""
        return None

    # ------------------------------------------------------------------------------------- the same for all

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def parameters_by_part(self) -> dict[str, int]:
        """Return the number of parameters of each of the `PARTS` that has any."""
        counts = dict.fromkeys(self.PARTS, 0)
        for name, p in self.named_parameters():
            part = next(part for part, pattern in self.PARTS.items() if re.match(pattern, name))
            counts[part] += p.numel()
        return {part: count for part, count in counts.items() if count}

    def with_ngrams(self, logits: Tensor, h: Tensor, candidates: Tensor | None) -> Tensor:
        """Return the logits (..., V) corrected by the n-gram head, given the last normalised state h (...,
        D); without a head, return them unchanged.

        Raises:
            ValueError: the model has a head and gets no candidates. Zeros would give bad scores silently.
        """
        if self.ngram is None:
            return logits
        if candidates is None:
            raise ValueError("this model reads an n-gram index: pass its candidates as `candidates_BTW`")
        return self.ngram(logits, h, candidates)

    def empty_candidates(self, tokens_BT: Tensor) -> dict[str, Tensor]:
        """Return keyword arguments with the candidates of an empty n-gram index, or none without a head.

        They serve calls whose predictions do not matter, only their cost or what happens before the head.
        """
        if self.ngram is None:
            return {}
        shape = (*tokens_BT.shape, self.ngram.layout.width)
        return {"candidates_BTW": torch.zeros(shape, dtype=torch.uint8, device=tokens_BT.device)}


class Reader:
    """A stream of tokens that a model reads piece by piece, for generation.

    This base class reads the whole stream again for each piece, which is correct for any family, and slow. A
    family that caches the past overrides ``read``.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None = None) -> None:
        self.model = model
        self.context = context
        self.n_loops = model.loops(n_loops)
        self.ids: list[int] = []
        self.candidates: list[Tensor] = []
        """Candidates after each token, one tensor (N, W) for each piece; empty without an n-gram index."""

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], candidates_NW: Tensor | None = None) -> Tensor:
        """Read N more tokens and return the logits after each of them, (N, V) float32.

        Args:
            candidates_NW: candidates after each token, where the model reads an n-gram index.

        Raises:
            ValueError: ``ids`` is empty, or the context is too short for them.
        """
        N = len(ids)
        before = len(self.ids)
        if not N or before + N > self.context:
            raise ValueError(f"cannot read {N} ids after {before} with a context of {self.context}")
        self.ids += ids
        if candidates_NW is not None:
            self.candidates.append(candidates_NW)
        return self.read(N)

    def read(self, N: int) -> Tensor:
        """Return the logits of the last N tokens of the stream, its newest piece."""
        ids_1T = torch.tensor([self.ids], device=next(self.model.parameters()).device)
        optional = {"candidates_BTW": torch.cat(self.candidates)[None]} if self.candidates else {}
        logits_1TV = self.model(ids_1T, n_loops=self.n_loops, **optional).logits
        assert logits_1TV is not None, "a call without labels returns logits"
        return logits_1TV[0, -N:]


def model_tensors(model: nn.Module, prefix: str = "model.") -> dict[str, Tensor]:
    """Return the parameters (a tied one once) and persistent buffers, as ``{prefix}{name}``."""
    persistent = model.state_dict()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {prefix + name: tensor.detach() for name, tensor in named.items()}


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and bytes of the ``model.*`` tensors."""
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        t = tensors[name].detach()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]
