"""Runs: the stages of a training, its optimizer, its evaluation and its resources."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, model_validator

from spider.config.block import Block, Fraction, Name, Positive, is_count, must_be, none_such, wrong_key
from spider.config.model import AnyModel, ModelConfig, merged, model_block
from spider.config.tasks import TaskConfig


def _no_bool(plain: Any) -> Any:
    """Refuse a bool, which pydantic would read as 1 or 0 inside of a mapping."""
    if isinstance(plain, bool):
        raise ValueError(f"must be a number (got {str(plain).lower()})")
    return plain


Number = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False), BeforeValidator(_no_bool)]

Mix = Annotated[dict[Name, Number], Field(min_length=1)]


class Mixture(Block):
    """Several datasets, each with its share of the windows."""

    mix: Mix
    """Weight of each dataset, by name. Weights are divided by their sum."""
    switches: dict[Positive, Mix] = {}
    """Other weights later in the stage, by the number of windows (or packed rows) of the stage, over all
    processes, that are read before. A dataset begins or ends where only one of two mixes names it."""

    @property
    def mixes(self) -> list[tuple[int, dict[str, float]]]:
        """First sample and share of each dataset, of all mixes in turn."""
        mixes = [(0, self.mix), *sorted(self.switches.items())]
        totals = [math.fsum(mix.values()) for _, mix in mixes]
        return [
            (sample, {name: weight / total for name, weight in mix.items()})
            for (sample, mix), total in zip(mixes, totals, strict=True)
        ]

    @property
    def weights(self) -> dict[str, float]:
        """Share of each dataset in means over datasets; with switches, the mean of its shares."""
        mixes = [mix for _, mix in self.mixes]
        names = dict.fromkeys(name for mix in mixes for name in mix)
        return {name: math.fsum(mix.get(name, 0) for mix in mixes) / len(mixes) for name in names}


def _named_or_mixed(plain: Any) -> Any:
    """Read a mapping as a `Mixture`, so that errors name its keys."""
    if isinstance(plain, dict):
        return Mixture.model_validate(plain)
    if isinstance(plain, (str, Mixture)):
        return plain
    raise ValueError(f"must be the name of a dataset, or a mapping with the key mix (got {plain!r})")


def _or_null(plain: Any) -> Any:
    return None if plain is None else _named_or_mixed(plain)


Data = Annotated[str | Mixture, BeforeValidator(_named_or_mixed)]


def weights_of(data: str | Mixture) -> dict[str, float]:
    """Return the share of each dataset that is trained on; a single dataset has the share 1."""
    return {data: 1.0} if isinstance(data, str) else data.weights


Beta = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Block):
    """Settings of one group of parameters, instead of those of the whole optimizer. `spider describe RUN`
    prints the groups of a model with their settings."""

    lr_ratio: Annotated[float, Field(gt=0)] | None = None
    """Learning rate, as a multiple of the stage's ``lr`` (null: the model's ratio, times ``muon_lr_ratio``
    for Muon)."""
    width_exponent: float = 0.0
    """Multiply the learning rate by the model's (width / 768) to this power."""
    betas: tuple[Beta, Beta] | None = None
    """Decay rates of AdamW's moments (null: the optimizer's)."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Constant weight decay (null: the optimizer's for what it decays, else none)."""
    decay: Literal["decoupled", "scaled", "l2"] = "decoupled"
    """decoupled: at the group's rate. scaled: at that times sqrt(max(1, out / in)), as Muon's updates. l2:
    weight decay times the weight is added to the gradient."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """bf16 (``precision: bf16`` or ``fp8`` only): half the memory. A table is rounded to nearest, a matrix
    stochastically (``kind: adamw8bit`` only)."""


#: Named choices of the optimizer's settings. nanochat: its base training; a stage's ``lr`` is the rate of the
#: head, 0.004. golf: the original description of the parameter golf; ``lr`` is the rate of the scalars, 0.04.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "nanochat": {
        "kind": "muon",
        "betas": (0.8, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.2,
        "weight_decay_end": 0.0,
        "muon_lr_ratio": 5.0,
        "muon_momentum_start": 0.85,
        "muon_beta2": 0.95,
        "clip": None,
        "groups": {
            "matrices": {"decay": "scaled"},
            "embedding": {"width_exponent": -0.5},
            "value_embeddings": {"width_exponent": -0.5},
            "head": {"width_exponent": -0.5},
            "x0": {"betas": (0.96, 0.95)},
        },
    },
    "golf": {
        "kind": "muon",
        "weight_decay": 0.09,
        "muon_lr_ratio": 1.0,
        "clip": None,
        "groups": {"matrices": {"decay": "l2"}, "embedding": {"lr_ratio": 1.25}},
    },
}


class OptimizerConfig(Block):
    """AdamW with moments in 32 or 8 bits, or Muon for the matrices and AdamW for all other parameters."""

    preset: str | None = None
    """Named choice to start from: nanochat or golf. Other keys override it. ``optimizer: NAME`` is the
    same."""
    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw8bit: AdamW with moments in 8 bits. muon: Muon for matrices, AdamW for all other parameters."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term in the denominator of AdamW's update."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of the matrices; other groups have their own."""
    cautious_decay: bool = True
    """Muon decays an entry only where the decay has the sign of the update; false: everywhere."""
    weight_decay_end: Annotated[float, Field(ge=0)] | None = None
    """Weight decay at the end of each stage, reached linearly, or with the learning rate where ``max_hours``
    ends the stage (null: constant)."""
    muon_lr_ratio: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of Muon, as a multiple of the stage's ``lr``."""
    muon_momentum: Fraction = 0.95
    """Momentum of Muon."""
    muon_momentum_start: Fraction | None = None
    """Momentum of Muon in the first step of the run (null: ``muon_momentum``)."""
    muon_momentum_steps: Positive = 300
    """Number of steps from ``muon_momentum_start`` to ``muon_momentum``, linearly."""
    muon_beta2: Beta | None = None
    """NorMuon: decay rate of the second moment that normalizes Muon's updates (null: plain Muon)."""
    muon_rows: bool = False
    """Normalize each row of Muon's momentum before it is orthogonalized."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient (null: no limit)."""
    groups: dict[str, GroupConfig] = {}
    """Settings of single groups of parameters, by name (docs/training.md)."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, plain: Any) -> Any:
        """Replace a named choice by its settings."""
        block = {"preset": plain} if isinstance(plain, str) else plain
        if not isinstance(block, dict) or (name := block.get("preset")) is None:
            return block
        if not isinstance(name, str) or name not in OPTIMIZERS:
            raise wrong_key("preset", none_such("optimizer", name, OPTIMIZERS))
        return merged(OPTIMIZERS[name], {**block, "preset": None})

    @model_validator(mode="after")
    def _only_muons(self) -> OptimizerConfig:
        for key in ("muon_beta2", "muon_momentum_start", "muon_rows", "cautious_decay"):
            if self.kind != "muon" and getattr(self, key) != type(self).model_fields[key].default:
                raise wrong_key(key, f"kind: {self.kind} does not use Muon; set kind: muon, or leave it out")
        if self.kind != "muon" and any(group.decay == "scaled" for group in self.groups.values()):
            text = f"kind: {self.kind} has no scaled decay; set kind: muon, or another decay"
            raise wrong_key("groups", text)
        return self

    @property
    def narrow(self) -> list[str]:
        """Names of the groups with bf16 weights, sorted."""
        return sorted(name for name, group in self.groups.items() if group.weights == "bf16")

    def problems(self, run: RunSettings) -> Iterator[str]:
        """Yield the settings that the run's model, precision or processes cannot have."""
        for name, group in self.groups.items():
            where, role = f"groups.{name}", run.model.GROUPS.get(name)
            if role is None:
                known = ", ".join(run.model.GROUPS)
                yield f"{where}: the family {run.model.family} has no such group; its groups are {known}"
                continue
            if group.decay == "scaled" and role != "matrix":
                yield f"{where}.decay: only matrices have a scaled rate; set decoupled or l2"
            if self.kind == "muon" and role == "matrix" and group.betas:
                yield f"{where}: Muon has no betas; set optimizer.muon_momentum and muon_beta2 instead"
            if group.weights == "bf16" and role == "vector":
                yield f"{where}.weights: only matrices and tables may be bf16; leave it out"
            if group.weights == "bf16" and role == "matrix" and self.kind != "adamw8bit":
                reason = f"bf16 matrices lose small updates with {self.kind}, which rounds to nearest"
                yield f"{where}.weights: {reason}; set kind: adamw8bit, or fp32"
            if group.width_exponent and run.model.WIDTH is None:
                yield f"{where}.width_exponent: the family {run.model.family} names no width; leave it out"
        if self.narrow and run.precision not in ("bf16", "fp8"):
            reason = f"bf16 weights cannot be multiplied in fp32, which precision: {run.precision} may choose"
            yield f"groups.{self.narrow[0]}.weights: {reason}; set precision: bf16 or fp8"
        if self.narrow and run.parallel == "fsdp":
            remedy = "set fp32 (each process then holds a share of them), or parallel: ddp"
            yield f"groups.{self.narrow[0]}.weights: parallel: fsdp shares fp32 weights only; {remedy}"


class EmaConfig(Block):
    """Exponential moving average of the weights. The stage's evaluation measures the average; the next stage
    continues from the weights themselves."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that remains after each step."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Step of the stage whose weights start the average."""


class RolloutConfig(Block):
    """Answers to the prompts of conversations that a stage samples, and learns from by their rewards
    (docs/gpt.md)."""

    samples: Annotated[int, Field(ge=2)] = 16
    """Number of answers to a prompt. A step has ``micro_batch`` x ``grad_accum`` answers."""
    max_bytes: Positive = 1000
    """Bytes of the longest answer. One that does not end in time gets no reward."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling."""
    top_k: Positive | None = None
    """Sample from the k likeliest tokens (null: from all)."""
    val_prompts: Positive = 100
    """Number of held-out prompts that each validation (``val_every``) answers."""


_count_or_auto = must_be("a positive whole number, or auto", lambda one: one == "auto" or is_count(one))
_count_or_share = must_be(
    "a whole number, or a share below 1",
    lambda one: is_count(one, 0) or (isinstance(one, float) and 0 <= one < 1),
)


class StageSettings(Block):
    """Settings of the training of one stage."""

    tokens: Positive | None = None
    """Tokens to train on in this stage, special ones included. Without a tokenizer a token is a byte."""
    max_steps: Positive | None = None
    """Optimizer steps to train for."""
    target_flops: Annotated[float, Field(gt=0)] | None = None
    """FLOPs of forward and backward passes to train for (``spider describe`` counts them)."""
    tokens_per_parameter: Annotated[float, Field(gt=0)] | None = None
    """Tokens to train on for each parameter of the model. All experts count; of a GPT, matrices and head."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours to train for, over all restarts; ``schedule: wsd`` then decays in time. Not bit-reproducible."""
    data: Annotated[Data | None, BeforeValidator(_or_null)] = None
    """Dataset of this stage, or ``{mix: {NAME: WEIGHT}}`` (null: the run's)."""
    seq_len: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a window."""
    micro_batch: Annotated[Positive | Literal["auto"], _count_or_auto] = 64
    """Windows in a forward pass. auto: as many of ``windows_per_step`` as the device has memory for."""
    grad_accum: Positive = 1
    """Forward passes in an optimizer step."""
    windows_per_step: Positive | None = None
    """Windows in an optimizer step, instead of ``grad_accum`` (null: ``micro_batch`` x ``grad_accum``)."""
    order: Literal["shuffled", "text"] = "shuffled"
    """Order of windows and rows. text: as in the text, around the ring, without shuffling."""
    packing: Literal["ring", "best_fit"] = "ring"
    """ring: cut windows from the text at equal distances. best_fit: pack rows from whole documents."""
    attend: Literal["row", "document"] = "row"
    """Attention in a packed row. row: over all tokens before. document: over the same document only."""
    learn: Literal["all", "assistant"] = "all"
    """Tokens in the loss: all, or only those that the assistant writes in conversations."""
    rollouts: RolloutConfig | None = None
    """Reinforcement learning from sampled answers (null: learn to predict the text)."""
    n_loops: Positive | None = None
    """Loops of the model's recurrent part (null: the model's)."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay of the learning rate after the warm-up. wsd: constant, then linear at the end."""
    decay_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Length of the decay of ``schedule: wsd``, as a share of the stage's steps."""
    warmup_steps: Annotated[int | float, _count_or_share] = 200
    """Number of steps of the warm-up, which raises the learning rate linearly from 0; a number below 1 is a
    share of the stage's steps."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the schedule, as a share of ``lr``."""
    ema: EmaConfig | None = None
    """Moving average of the weights (null: none)."""
    stall_minutes: Annotated[float, Field(gt=0)] | None = 30
    """Minutes after which a step, or a measurement after it, counts as stalled and the job ends with status
    75. The first one of each kind may take four times as long (null: no limit)."""
    log_every: Positive = 10
    """Steps between log lines."""
    ckpt_every: Positive = 50
    """Steps between checkpoints."""
    ckpt_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, instead of ``ckpt_every`` (null: ``ckpt_every`` steps)."""
    val_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between validations, a multiple or a divisor of ``ckpt_every`` (null: so that validation costs
    1/400 of the training's FLOPs; 0: none)."""
    val_bytes: Positive = 16_384
    """Bytes that each validation scores, spread evenly over the text that the evaluation scores."""
    tasks_every: Annotated[int, Field(ge=0)] = 0
    """Steps between answers to the first 500 questions of each of ``evaluation.tasks`` (0: none during
    training)."""
    samples_every: Annotated[int, Field(ge=0)] = 0
    """Steps between samples: the texts that the evaluation's sample has (0: none during training)."""

    #: Settings that do not affect the weights and may change in the middle of a stage.
    BOOKKEEPING: ClassVar = frozenset(
        {"log_every", "ckpt_every", "ckpt_minutes", "stall_minutes"}
        | {"val_every", "val_bytes", "tasks_every", "samples_every"}
    )


class Stage(StageSettings):
    """A stage of a run. It ends at the first of its limits, and needs at least one: ``tokens``,
    ``max_steps``, ``target_flops``, ``tokens_per_parameter`` or ``max_hours``."""

    name: Name
    """Name of the stage and of its folder."""


_layers_or_all = must_be(
    "all, or a list of layers, counted from 0",
    lambda given: given == "all" or (given and all(is_count(layer, 0) for layer in given)),
)


class TTTConfig(Block):
    """Test-time training: score the text a second time, and train on each chunk after it is scored. The
    result stands beside the score of the frozen model (docs/evaluation.md)."""

    chunk: Positive = 8192
    """Tokens that are scored before the model trains on them: at least a window, or a divisor of it. Windows
    then slide by a chunk."""
    lr: Annotated[float, Field(ge=0)] = 0.002
    """Learning rate of SGD, constant and equal for all parameters (0: the score of the frozen model)."""
    objective: Literal["next_token", "projection"] = "next_token"
    """next_token: the loss on the chunk, by SGD with momentum. projection: the distance of a GPT's last
    states from what its feed-forwards make of them, by plain steps without labels."""
    layers: Annotated[list[int] | Literal["all"] | None, _layers_or_all] = None
    """Layers, counted from 0, of whose feed-forwards only the output projection is trained; all: those of
    all layers (null: all parameters of the model)."""
    reset: Literal["never", "window"] = "never"
    """When the trained weights are restored. window: before each window, whose earlier chunks are then
    learned again."""

    @model_validator(mode="after")
    def _only_projections(self) -> TTTConfig:
        if self.objective == "projection" and self.layers is None:
            raise wrong_key("objective", "trains output projections of feed-forwards only; set layers: all")
        return self

    def problems(self, windows: Mapping[int, str], model: ModelConfig) -> Iterator[str]:
        """Yield the problems with the model and the windows of stages, whose names are by their windows."""
        for window, stage in windows.items():
            of = f"the window of its evaluation, {window} in stage {stage}"
            if (self.objective == "projection" or self.reset == "window") and self.chunk >= window:
                inside = "objective: projection" if self.objective == "projection" else "reset: window"
                yield f"chunk: with {inside} must be shorter than {of} (got {self.chunk})"
            elif self.chunk < window and window % self.chunk:
                yield f"chunk: must divide {of}, or be at least as long (got {self.chunk})"
        if self.objective == "projection" and not model.FFN_INPUTS:
            reason = f"the family {model.family} does not support it; set next_token, or use a gpt"
            yield f"objective: projection: {reason}"
        for layer in self.layers if isinstance(self.layers, list) else ():
            if layer >= model.feed_forwards:
                known = f"the model's {model.feed_forwards} layers, counted from 0"
                yield f"layers: {layer} is not one of {known}"


Bits = Annotated[int, Field(ge=2, le=8)]


class CompressConfig(Block):
    """Compression of the last checkpoint: quantized weights, entropy-coded, in one file (docs/golf.md)."""

    cap: Positive = 16_000_000
    """Largest size in bytes of the file and of the code that reads it, together."""
    bits: Bits = 6
    """Bits of an entry of a matrix, which has one of 2^bits - 1 values. A table (embeddings, heads, hashed
    n-grams) has 8."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Clipping range of a row, in standard deviations. A larger range gives a coarser step, a smaller file
    and more error (null: the smallest range that fits ``cap``)."""
    method: Literal["gptq", "nearest"] = "gptq"
    """gptq: round so that the outputs for training text change least. nearest: round to nearest."""


class EvaluationConfig(Block):
    """Evaluation of the last checkpoint of each stage."""

    #: Keys that affect only the sample, not the scores.
    SAMPLE: ClassVar[frozenset[str]] = frozenset({"prompts", "sample_bytes", "unconditioned"})
    #: Keys that decide bits per byte.
    BPB: ClassVar[frozenset[str]] = frozenset(
        {"data", "max_bytes", "largest_group", "seq_len", "overlap", "batch", "carry_over", "n_loops"}
    )
    #: Keys of the baselines, which are scored by themselves.
    BASELINES: ClassVar[frozenset[str]] = frozenset({"training_bytes", "zpaq"})

    data: str | None = None
    """Dataset whose validation split is scored (null: the run's, of a mixture the first)."""
    max_bytes: Positive = 1_000_000
    """Bytes of the validation split to score, from its start; in a run with a mixture, of each dataset."""
    largest_group: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of the scored bytes that one group of ``split_by`` may have. The first documents of each
    group are scored, whole and in order (null: the first ``max_bytes`` of the split)."""
    seq_len: Positive | None = None
    """Tokens in a window (null: the stage's ``seq_len``)."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of each window that is context only; every byte is scored exactly once."""
    batch: Positive = 16
    """Windows scored at once."""
    carry_over: Annotated[int, Field(ge=0)] = 1 << 18
    """Bytes of earlier held-out documents that a second score may look back on (0: no second score)."""
    n_loops: Positive | None = None
    """Loops of the model's recurrent part (null: the stage's)."""
    checkpoints: Annotated[int, Field(ge=0)] = 4
    """Checkpoints of each stage to save, keep and score on a sample of the text, at equal shares of the stage
    up to its end (0: none)."""
    loops_bytes: Annotated[int, Field(ge=0)] = 50_000
    """Bytes to score with each number of loops from 1 to twice the stage's, for a curve (0: no curve)."""
    training_bytes: Annotated[int, Field(ge=0)] | None = 4_000_000
    """Bytes of training text that prime PPMd (null: all). Slower compressors are primed only if the text is
    at most 1/64 of this. 0: neither they nor the search for overlap read training text."""
    train_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of the train split to score as well, from its start, to compare with held-out text (0: none)."""
    zpaq: bool = False
    """Prime zpaq, the strongest and slowest compressor, with as much as PPMd (27 MB: 80 s, twice)."""
    ttt: TTTConfig | None = None
    """Test-time training (null: none)."""
    tasks: dict[Name, TaskConfig] = {}
    """Questions to answer, by name (docs/evaluation.md)."""
    measurements: dict[str, dict[str, Any]] = {}
    """Your own measurements: the settings of each, by the name of its Python module (docs/extending.md)."""
    prompts: Annotated[list[str], Field(min_length=1)] = ["The "]
    """Texts that the sample continues, or answers where the model was trained on conversations: the first at
    temperature 0.7, others by the likeliest tokens."""
    sample_bytes: Annotated[int, Field(ge=0)] = 400
    """Length of the sample, in bytes."""
    unconditioned: Annotated[int, Field(ge=0)] = 0
    """Number of further texts of the sample, drawn from the start of a document at temperature 1."""

    def scoring(self) -> dict[str, Any]:
        """Return the changed keys that decide the scores."""
        return self.changed(exclude={*self.SAMPLE, *self.BASELINES})

    def foreign_scoring(self) -> dict[str, Any]:
        """Return the changed keys that decide the scores of foreign models."""
        return self.changed(include={*self.BPB, "tasks"})

    def sampling(self) -> dict[str, Any]:
        """Return the changed keys that decide the sample."""
        return self.changed(include={*self.SAMPLE, "seq_len", "n_loops"})


class Resources(Block):
    """Resources of one training or evaluation job, on this machine or on a cluster."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a job."""
    processes: Positive = Field(default_factory=lambda given: max(1, given.get("gpus", 0)))
    """Processes that train together (default: one for each GPU, at least one)."""
    nodes: Positive = 1
    """Machines of a training. They share GPUs and processes evenly; each has ``threads`` and ``mem_mb``."""
    threads: Positive = 2
    """CPU threads, limited to those of the machine."""
    mem_mb: Positive = 6000
    """Memory in MB."""
    runtime: Positive = 60
    """Time limit in minutes."""

    @model_validator(mode="after")
    def _share(self) -> Resources:
        if self.processes % self.nodes or self.gpus % self.nodes:
            what = f"{self.gpus} gpus and {self.processes} processes"
            remedy = f"make both multiples of {self.nodes}"
            raise ValueError(f"{self.nodes} nodes cannot share {what} evenly; {remedy}")
        return self


class RunSettings(Block):
    """Settings that all stages of a run share."""

    model: AnyModel
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the weights, of the order of the data, and of the noise in each step."""
    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    """Precision of matrix products. auto: the fastest that the warm-up measures."""
    tf32: bool | None = None
    """Round factors of fp32 products to TF32 on a GPU, in training and evaluation; a CPU has none (null: as
    torch does)."""
    compile: bool | None = None
    """Use torch.compile (null: on a GPU only)."""
    graphs: Literal["auto", "off"] = "auto"
    """Launch the passes of a micro-batch on a GPU at once, as a CUDA graph. auto: where shapes allow it."""
    deterministic: bool = True
    """Train with equal bits each time on one GPU. false: in any order of sums, which may be faster."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Kernels of experts and Engram: Spider's own in Triton, or PyTorch's. auto: Triton on a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several processes: each has the whole model (ddp), or a share of its weights (fsdp)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class Run(RunSettings):
    """A model that is trained through a list of stages."""

    model: Annotated[AnyModel, BeforeValidator(model_block)]
    """Name of a preset, or a block."""
    data: Data
    """Dataset to train on, or ``{mix: {NAME: WEIGHT}}`` (docs/data.md), unless a stage names another."""
    defaults: StageSettings = StageSettings()
    """Settings that the stages share."""
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Stages in the order of training."""
    compress: CompressConfig | None = None
    """Compress the last checkpoint into one file, and evaluate that (null: no)."""
    resources: Resources = Resources()
    """Resources of the run's jobs."""
    grid: dict[str, list[Any] | dict[str, Any]] = {}
    """Values of settings to sweep. Each combination becomes a run of its own (docs/sweeps.md)."""

    @property
    def dataset(self) -> str:
        """Name of the dataset, or of the first one of a mixture. What needs one dataset takes this one."""
        return next(iter(weights_of(self.data)))

    def data_of(self, stage: StageSettings) -> str | Mixture:
        """Return what a stage is trained on."""
        return stage.data or self.defaults.data or self.data

    def settings_of(self, stage: Stage) -> StageSettings:
        """Return the settings of a stage. Those that it sets itself override the defaults of the run."""
        own = {key: getattr(stage, key) for key in stage.model_fields_set - {"name"}}
        return self.defaults.model_copy(update=own)

    def problems(self) -> Iterator[str]:
        """Yield the problems of settings with each other, each with its key."""
        yield from self.model.problems(self.precision, self.compile)
        yield from (f"optimizer.{problem}" for problem in self.optimizer.problems(self))
        if ttt := self.evaluation.ttt:
            windows = {
                self.evaluation.seq_len or self.settings_of(one).seq_len: one.name for one in self.stages
            }
            yield from (f"evaluation.ttt.{problem}" for problem in ttt.problems(windows, self.model))


def not_a_store(uri: str) -> str | None:
    """Return why an address is none of an MLflow store, with a remedy; None for a database or a server."""
    if re.match(r"(https?|(postgresql|mysql|mssql|sqlite(?=[+\w]*:///))(\+\w+)?)://", uri):
        return None
    parts = urlsplit(uri)
    folder = shlex.quote(unquote(parts.path)) if parts.scheme in ("", "file") else "FOLDER"
    copy = f"mlflow migrate-filestore --source {folder} --target sqlite:///mlflow.db"
    return (
        f"{uri} is no database and no server, and MLflow no longer writes into folders; set "
        f"sqlite:///mlflow.db, which `{copy}` makes of a folder, or http://HOST:PORT"
    )


class TrackingConfig(Block):
    """Records of all jobs in MLflow (docs/tracking.md)."""

    uri: str | None = None
    """Address of the MLflow store, a database or a server (null: SQLite in the results folder).
    MLFLOW_TRACKING_URI overrides it."""
    experiment: Name | None = None
    """Prefix of the experiments on a shared store: ``ada`` logs to ada/Training and ada/Pipeline."""
    enabled: bool = True
    """false: record nothing."""

    @model_validator(mode="after")
    def _names(self) -> TrackingConfig:
        if self.uri and re.search(r"://[^/@]*:[^/]*@|[?&]password=|(?i:^https?)://[^/@?#]*@", self.uri):
            raise ValueError(
                "uri holds a password or a token, which would be copied into the results folder; set it in "
                "the environment: for a server MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN; for PostgreSQL PGPASSWORD; or the whole address in "
                "MLFLOW_TRACKING_URI"
            )
        if self.uri and (problem := not_a_store(self.uri)):
            raise wrong_key("uri", problem)
        return self
