"""The contract between a model and the rest of Spider: the base class `Model`.

Training, evaluation, description, checkpoints and reports use a model through this file alone. A family is a
folder with ``config.py`` and ``model.py`` (`spider.config.model`). The class ``Model`` of the latter derives
from `Model` here. It implements ``forward``, ``flops_per_token`` and ``activation_bytes``, and overrides what
it does better than the base. The smallest family is ``tests/families/toy``.

A submodule that defines ``init_weights`` sets its own weights there; its constructor draws no random numbers.
Names of modules and their order are part of the checkpoint format. Persistent buffers must be finite, like
parameters, or nothing is saved.

Shapes: B windows, T tokens of a window, V vocabulary size, N new tokens of a stream, D features.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spider.config.model import ModelConfig
from spider.tokens import BYTES, Tokens

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup
    from spider.model.ngram_head import NgramHead


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
    and it decays only by the ``weight_decay`` of its group. vector: all else; AdamW trains it, undecayed."""
    rate: float = 1.0
    """Factor on the learning rate of its role."""
    name: str = ""
    """Its group in ``optimizer.groups``, one of `ModelConfig.GROUPS` (default: by the role, ``matrices``,
    ``tables`` or ``vectors``)."""

    def __post_init__(self) -> None:
        plural = {"matrix": "matrices", "table": "tables", "vector": "vectors"}
        object.__setattr__(self, "name", self.name or plural[self.role])


@dataclass(frozen=True)
class Fp8Parts:
    """Modules that multiply in fp8 by code of their own. Linear layers are not among them: torchao swaps
    those."""

    layers: Mapping[str, nn.Module]
    """The modules by name; each has an attribute ``fp8``, False at first."""
    runs_on: Callable[[torch.device], bool]
    """Whether a device supports them."""


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


def histogram(title: str, unit: str, things: str, counts: Mapping[int, int]) -> dict[str, Any]:
    """Return a figure of `Inspector.figures`: how many things have each size in units."""
    listed = [counts.get(n, 0) for n in range(max(counts, default=-1) + 1)]
    return {"kind": "histogram", "title": title, "unit": unit, "things": things, "counts": listed}


def note(title: str, text: str) -> dict[str, Any]:
    """Return a text in the place of a figure."""
    return {"kind": "note", "title": title, "text": text}


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
    window: int | None = None
    """Length of the model's windows. A shorter text is read as the beginning of one, so its predictions do
    not depend on its length; None: it is a window of its own. The code that loads a model sets it, and
    `Scoring.of` for as long as a text is scored."""
    most_documents: int | None = None
    """Maximum number of documents in a row where ``document_BT`` is given; set by the code that packs
    rows."""
    shown: Mapping[str, str] = {}
    """Format of each own metric in the training log line: ``{"loops": "{:.1f} loops"}``."""
    gathering: Mapping[nn.Module, Sequence[nn.Module]] = {}
    """Modules around a call of each of the `units`; set where processes share the weights."""

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

        A family whose configuration sets `DOCUMENTS` also takes ``document_BT``: the number of each token's
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

    def after_step(self, *, updated: Tensor | bool = True) -> None:
        """Run after every optimizer step; ``updated`` is False if the update was skipped.

        In a training it is a scalar of the device. To read it would make the host wait: multiply by it.
        """
        return None

    def parts_to_compile(self) -> Sequence[tuple[nn.Module, str]]:
        """Return the functions of the forward pass that are compiled separately, as (module, attribute).

        A part that runs often is compiled once for each kind of its arguments.
        """
        return [(self, "forward")]

    def units(self) -> Mapping[nn.Module, Sequence[nn.Module]]:
        """Return the modules that `through` calls, in the order of a pass, with the parts of each.

        Processes that share weights exchange those of a part at once, and gather all parts for a call. The
        call alone uses their matrices and tables, in the dtype of matrix products, except for those that
        `keeps_wide` names. Without units all weights are gathered for the whole pass.
        """
        return {}

    def through(self, unit: nn.Module, call: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``call(unit, *inputs)``, with the weights of one of the `units` gathered meanwhile."""
        for part in reversed(self.gathering.get(unit, ())):
            call = partial(part, call)
        return call(unit, *inputs)

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
        decision. Several processes then share its weights outside of the `units`, in fp32."""
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
    """Streams of tokens that a model reads piece by piece, for generation. It begins with one stream.

    `select` makes several of it, which then read pieces of one length. This base class reads the whole
    streams again for each piece, which is correct for any family, and slow. A family that caches the past
    overrides ``read`` and ``choose``.

    Shapes: R streams, N new tokens of each, T tokens of each so far, W bytes of a candidate.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None = None) -> None:
        self.model = model
        self.context = context
        self.n_loops = model.loops(n_loops)
        self.length = 0
        device = next(model.parameters()).device
        self._buffer = torch.empty(1, context, dtype=torch.int64, device=device)
        self.candidates: list[Tensor] = []
        """Candidates after each token, one tensor (R, N, W) for each piece; empty without an n-gram index."""

    @property
    def ids_RT(self) -> Tensor:
        """Tokens of each stream so far, (R, T) int64."""
        return self._buffer[:, : self.length]

    def extend(self, ids: Sequence[int], candidates_NW: Tensor | None = None) -> Tensor:
        """Read N more tokens of the only stream and return the logits after each of them, (N, V) float32.

        The arguments and errors are those of `extend_all`, for one stream.
        """
        candidates_1NW = None if candidates_NW is None else candidates_NW[None]
        return self.extend_all(torch.tensor([list(ids)], dtype=torch.int64), candidates_1NW)[0]

    @torch.inference_mode()
    def extend_all(self, ids_RN: Tensor, candidates_RNW: Tensor | None = None) -> Tensor:
        """Read N more tokens of each stream and return the logits after them, (R, N, V) float32.

        Args:
            candidates_RNW: candidates after each token, where the model reads an n-gram index.

        Raises:
            ValueError: there are no tokens, or the context is too short for them.
        """
        N = ids_RN.shape[1]
        if not N or self.length + N > self.context:
            raise ValueError(f"cannot read {N} ids after {self.length} with a context of {self.context}")
        self._buffer[:, self.length : self.length + N] = ids_RN
        self.length += N
        if candidates_RNW is not None:
            self.candidates.append(candidates_RNW)
        return self.read(N)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these streams, numbered from 0. One that occurs several times is copied."""
        if list(rows) != list(range(len(self._buffer))):
            self.choose(torch.tensor(list(rows), device=self._buffer.device))

    def read(self, N: int) -> Tensor:
        """Return the logits of the last N tokens of each stream, the newest piece."""
        optional = {"candidates_BTW": torch.cat(self.candidates, dim=1)} if self.candidates else {}
        logits_RTV = self.model(self.ids_RT, n_loops=self.n_loops, **optional).logits
        assert logits_RTV is not None, "a call without labels returns logits"
        return logits_RTV[:, -N:]

    def choose(self, row_R: Tensor) -> None:
        """Replace the state by that of these streams."""
        self._buffer = self._buffer[row_R]
        self.candidates = [candidates_RNW[row_R] for candidates_RNW in self.candidates]


def model_tensors(model: nn.Module, prefix: str = "model.") -> dict[str, Tensor]:
    """Return the parameters (a tied one once) and persistent buffers, as ``{prefix}{name}``."""
    persistent = model.state_dict()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {prefix + name: tensor.detach() for name, tensor in named.items()}


def weights_digest(tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> str:
    """Return a hash of the names, types, shapes and bytes of the ``model.*`` tensors.

    A tensor may be given as its slices by rows, which need not be in memory together.
    """
    h = hashlib.sha256()
    for name in sorted(n for n in tensors if n.startswith("model.")):
        given = tensors[name]
        slices = [given] if isinstance(given, Tensor) else given
        shape = list(slices[0].shape)
        if len(slices) > 1:
            shape[0] = sum(map(len, slices))
        h.update(f"{name} {slices[0].dtype} {shape}\n".encode())
        for t in slices:
            h.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]
