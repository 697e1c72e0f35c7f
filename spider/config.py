"""The schema of ``config.yaml``: one model per block, and the only home of defaults.

A configuration names datasets and runs. A run trains one model through a list of stages; settings shared by
its stages stand in ``defaults`` and any stage may override any of them. ``Config.stage`` resolves that into a
`StageSpec`, the small file a training job reads. The part of a spec that decides the weights is hashed
(``StageSpec.identity``); what only decides how often we log or save is not, so that it may change mid-run.

This module imports neither torch nor anything of Spider's that does: the Snakefile loads it at every parse.
"""

from __future__ import annotations

import difflib
import glob
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from spider.files import digest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Block(BaseModel):
    """A block of the configuration: unknown keys are refused, values are frozen once validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


# ---------------------------------------------------------------------------------------------- datasets


class Source(Block):
    """Where a dataset's text comes from; each kind knows how many parts it has without touching a network."""

    def parts(self) -> list[str]:
        """Names of the parts, one download and one encode job each."""
        return [f"{i:03d}" for i in range(len(self.items()))]

    def items(self) -> list[str]:
        """What each part is made from, in order."""
        raise NotImplementedError

    def item(self, part: str) -> str:
        """What one part is made from."""
        if part not in self.parts():
            raise ConfigError(f"no part {part!r}; there are {len(self.parts())}, from 000")
        return self.items()[int(part)]


class PydocsSource(Source):
    """Docstrings and documentation of the installed standard library and of our dependencies; offline."""

    kind: Literal["pydocs"]
    pieces: Positive = 2
    """How many parquet files to split the corpus into."""

    def items(self) -> list[str]:
        return [f"{i}/{self.pieces}" for i in range(self.pieces)]


class HubSource(Source):
    """Named parquet files of a Hugging Face dataset repository at a pinned revision."""

    kind: Literal["hub"]
    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit (a branch may move under a run)."""
    files: Annotated[list[str], Field(min_length=1)]
    """Parquet files in it; one download and one encode job each."""

    def items(self) -> list[str]:
        return self.files


class LocalSource(Source):
    """Files you have: parquet, jsonl, jsonl.zst, or a folder of .txt files. Globs are expanded, sorted."""

    kind: Literal["local"]
    files: Annotated[list[str], Field(min_length=1)]
    """Paths and globs; one part each."""

    def items(self) -> list[str]:
        found: list[str] = []
        for pattern in self.files:
            matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
            if not matches:
                raise ConfigError(f"datasets: no file matches {pattern!r}")
            found += matches
        return found


class StreamSource(Source):
    """Train straight from the hub with ``datasets`` streaming: nothing is downloaded first or kept."""

    kind: Literal["stream"]
    repo: str
    """Dataset repository, owner/name."""
    revision: Annotated[str, Field(min_length=1)]
    """Commit."""
    files: Annotated[list[str], Field(min_length=1)]
    """Parquet files in it; a new order each epoch."""

    def items(self) -> list[str]:
        return []


class Dataset(Block):
    source: Annotated[PydocsSource | HubSource | LocalSource | StreamSource, Field(discriminator="kind")]
    text_column: str = "text"
    """Column that holds the documents."""
    id_column: str = "id"
    """Column whose hash decides the split; where it is absent the text itself is hashed."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of documents held out."""
    max_document_bytes: Annotated[int, Field(ge=4)] | None = None
    """Truncate longer documents at a UTF-8 boundary (null: keep them whole)."""


# ------------------------------------------------------------------------------------------------- model


class AttentionConfig(Block):
    """Multi-head latent attention: sizes of the heads and of the shared key-value latent."""

    heads: Positive = 16
    """Heads."""
    nope_dim: Positive = 64
    """Width of a head without position."""
    rope_dim: Positive = 64
    """Width of the rotated key that all heads share."""
    v_dim: Positive = 128
    """Width of a value."""
    kv_lora_rank: Positive = 320
    """Width of the latent that keys and values are made from."""
    rope_base: float = 10_000.0
    """Longest wavelength of the rotation."""

    @model_validator(mode="after")
    def _even_rope(self) -> AttentionConfig:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even, RoPE rotates pairs (got {self.rope_dim})")
        return self


class BoundaryConfig(Block):
    """How bytes are grouped into patches."""

    kind: Literal["learned", "fixed", "whitespace", "none"] = "learned"
    """Where patches close; none: every byte is a patch."""
    hidden: Positive = 512
    """Width of the boundary predictor."""
    start: Literal["random", "whitespace"] = "random"
    """Where a new predictor cuts, before it has learned: anywhere at about ``rate``, or after words."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the relaxed Bernoulli in training."""
    stride: Positive = 4
    """Bytes a patch for ``kind: fixed``."""
    loss: Literal["flexi", "binomial"] = "flexi"
    """Pulls the boundary rate between rate - slack and rate (flexi), or to rate (binomial)."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.25
    """alpha, the upper end of the boundary rate that costs nothing (prior of the binomial loss)."""
    slack: Annotated[float, Field(ge=0)] = 0.1
    """lambda * sigma: how far below ``rate`` the boundary rate may fall at no cost."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the boundary loss."""
    capacity: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Patches a window may hold, as a share of its bytes; shapes never change."""


class MoEConfig(Block):
    """Routed experts beside one shared expert, all SwiGLU."""

    experts: Positive = 32
    """Routed experts."""
    top_k: Positive = 2
    """Experts a patch uses."""
    expert_hidden: Positive = 512
    """Width of a routed expert."""
    shared_hidden: Annotated[int, Field(ge=0)] = 1024
    """Width of the shared expert (0: none)."""
    aux_weight: Annotated[float, Field(ge=0)] = 0.01
    """Of the load-balancing loss."""
    z_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Of the router logits' z-loss."""
    bias_rate: Annotated[float, Field(ge=0)] = 1e-3
    """Step of the selection bias that balances the load (0: off)."""
    implementation: Literal["grouped", "loop"] = "grouped"
    """grouped: all experts in one product; loop: one after the other."""

    @model_validator(mode="after")
    def _k_fits(self) -> MoEConfig:
        if self.top_k > self.experts:
            raise ValueError(f"top_k must not exceed experts (got {self.top_k} of {self.experts})")
        return self


class EngramConfig(Block):
    """Hashed byte n-gram memory, read at the given recurrent layers (none: no memory)."""

    layers: list[Annotated[int, Field(ge=0)]] = [1, 4]
    """Recurrent layers that read the memory."""
    orders: Annotated[list[Positive], Field(min_length=1)] = [3, 4, 5, 6]
    """Lengths of the n-grams, in bytes."""
    heads: Positive = 4
    """Hash heads an order."""
    head_dim: Positive = 64
    """Width of a row."""
    table_size: Annotated[int, Field(gt=1)] = 81_307
    """Each head's table has the next unused prime from here on as its number of rows."""
    conv_kernel: Positive = 4
    """Patches the convolution after a read looks back on."""
    byte_orders: list[Positive] = []
    """Orders of n-grams whose rows are added to every byte's embedding (none: bytes alone)."""


class RecurrenceConfig(Block):
    """The core that is looped: its layers, what enters each loop, and when a patch may stop."""

    layers: Positive = 6
    """Layers of the core."""
    loops: Positive = 6
    """Times the core runs."""
    sample_loops: bool = False
    """Draw the depth of each training step from 1..2*loops-1 (mean ``loops``) instead of fixing it."""
    bptt: Positive | None = None
    """Backpropagate through the last ``bptt`` loops only."""
    injection: bool = True
    """Re-inject the patches in every loop (linear time-invariant, stable)."""
    loop_embedding: bool = True
    """Tell the core which loop it is in."""
    lora_rank: Annotated[int, Field(ge=0)] = 16
    """Rank of the per-loop adapter (0: none)."""
    halting: bool = True
    """Let each patch stop early (ACT)."""
    halt_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """A patch stops when its halting probabilities reach 1 - this."""
    ponder_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Price of a loop."""
    checkpointing: bool = True
    """Recompute recurrent layers in the backward pass instead of keeping their activations."""


class ModelConfig(Block):
    """The Spider. Its defaults are spider-1b; ``tiny`` and others are named in `MODEL_PRESETS`."""

    preset: str = "spider-1b"
    """Named sizes to start from; keys beside it change a part."""
    hidden: Positive = 2048
    """Width of the residual stream."""
    prelude_layers: Positive = 2
    """Dense byte-level layers before patching."""
    coda_layers: Positive = 2
    """Dense byte-level layers after the core."""
    ffn_hidden: Positive = 3072
    """Width of their feed-forward."""
    norm_eps: float = 1e-6
    attention: AttentionConfig = AttentionConfig()
    boundary: BoundaryConfig = BoundaryConfig()
    moe: MoEConfig | None = MoEConfig()
    """null: one dense SwiGLU of ``ffn_hidden``."""
    engram: EngramConfig = EngramConfig()
    recurrence: RecurrenceConfig = RecurrenceConfig()

    @property
    def groups_experts(self) -> bool:
        """Whether the experts run as one grouped product."""
        return self.moe is not None and self.moe.implementation == "grouped"

    @model_validator(mode="after")
    def _experts_can_be_grouped(self) -> ModelConfig:
        if self.moe is not None and self.groups_experts and (self.hidden % 8 or self.moe.expert_hidden % 8):
            raise ValueError(
                "grouped experts are multiplied in blocks of 16 bytes: hidden and moe.expert_hidden must be "
                f"multiples of 8 (got {self.hidden} and {self.moe.expert_hidden}), or set "
                "moe.implementation: loop"
            )
        return self

    @model_validator(mode="after")
    def _engram_layers_exist(self) -> ModelConfig:
        for layer in self.engram.layers:
            if layer >= self.recurrence.layers:
                raise ValueError(
                    f"engram.layers: {layer} is not one of {self.recurrence.layers} recurrent layers"
                )
        return self


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "spider-1b": {},
    "tiny": {
        "hidden": 192,
        "prelude_layers": 1,
        "coda_layers": 1,
        "ffn_hidden": 512,
        "attention": {"heads": 4, "nope_dim": 32, "rope_dim": 16, "v_dim": 48, "kv_lora_rank": 64},
        "boundary": {"hidden": 64, "capacity": 0.25, "start": "whitespace"},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 128, "shared_hidden": 256},
        "engram": {"layers": [], "head_dim": 16, "table_size": 16384, "byte_orders": [2, 3, 4, 5, 6]},
        "recurrence": {"layers": 1, "loops": 1, "lora_rank": 4, "checkpointing": False},
    },
}


# ------------------------------------------------------------------------------------------------ stages


class OptimizerConfig(Block):
    """AdamW for everything, its moments in 32, 8 or 4 bits; or Muon for the matrices and AdamW for the
    rest."""

    kind: Literal["adamw", "adamw8bit", "adamw4bit", "muon"] = "adamw"
    """adamw, the same with quantized moments, or Muon for the matrices beside it."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrices in half the memory, stochastically rounded (adamw8bit and adamw4bit only)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled; of matrices only."""
    muon_lr_ratio: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of the matrices under Muon, as a multiple of the stage's ``lr``."""
    muon_momentum: Fraction = 0.95
    """Muon's."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""

    @model_validator(mode="after")
    def _bf16_is_rounded(self) -> OptimizerConfig:
        if self.master_weights == "bf16" and self.kind not in ("adamw8bit", "adamw4bit"):
            raise ValueError(
                f"master_weights: bf16 loses small updates under {self.kind}, which rounds to nearest; "
                "set kind: adamw8bit or adamw4bit, or master_weights: fp32"
            )
        return self


class EmaConfig(Block):
    """A running average of the weights, which is what the stage's evaluation measures. The next stage goes
    on from the weights themselves."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that a step leaves as it was."""
    start_step: Annotated[int, Field(ge=0)] = 0
    """Step of the stage after which it starts, from the weights of that moment."""


class StageSettings(Block):
    """How one stage trains. The names are the command line's."""

    tokens: Positive | None = None
    """Bytes (and special ids) to train on in this stage."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    target_flops: Annotated[float, Field(gt=0)] | None = None
    """FLOPs of forward and backward passes (``spider describe`` counts them)."""
    tokens_per_parameter: Annotated[float, Field(gt=0)] | None = None
    """Bytes (and special ids) for each of the model's parameters, all experts counted."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of training, over all restarts; ``schedule: wsd`` then decays in time. Not bit-reproducible."""
    data: str | None = None
    """Dataset of this stage (default: the run's)."""
    seq_len: Annotated[int, Field(ge=8)] = 2048
    """Bytes a window."""
    micro_batch: Positive = 64
    """Windows a forward pass."""
    grad_accum: Positive = 1
    """Forward passes an optimizer step."""
    n_loops: Positive | None = None
    """Loops of the recurrent core (default: the model's)."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate (AdamW's)."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate goes down after the warm-up; wsd: constant, then linear at the end."""
    decay_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the stage's steps in which ``wsd`` goes down."""
    warmup_steps: Annotated[int, Field(ge=0)] = 200
    """Steps in which it rises from 0."""
    min_lr_ratio: Fraction = 0.1
    """The schedule ends at this share of ``lr``."""
    ema: EmaConfig | None = None
    """Average the weights (null: do not)."""
    nan_patience: Positive = 10
    """Steps with a non-finite loss that are skipped before the run stops."""
    stall_minutes: Annotated[float, Field(gt=0)] | None = 30
    """End a step that takes longer (the first: four times as long) with status 75 (null: wait for ever)."""
    log_every: Positive = 10
    """Steps between log lines."""
    ckpt_every: Positive = 50
    """Steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept."""
    keep_every: Positive | None = None
    """Also keep those whose step in the stage is a multiple of this, a multiple of ``ckpt_every``."""

    #: Settings that never touch the weights: they may change in the middle of a stage.
    BOOKKEEPING: ClassVar[frozenset[str]] = frozenset(
        {"log_every", "ckpt_every", "keep_last", "keep_every", "stall_minutes"}
    )


class Stage(StageSettings):
    """A stage ends with the first of ``tokens``, ``max_steps``, ``target_flops``, ``tokens_per_parameter``
    and ``max_hours`` that it reaches; it needs at least one of them."""

    name: str
    """Its folder's name."""


class EvaluationConfig(Block):
    """What every stage's last checkpoint is measured on."""

    data: str | None = None
    """Dataset whose validation split is scored (default: the run's)."""
    max_bytes: Positive = 1_000_000
    """Score at most this much of it, from the start."""
    seq_len: Positive | None = None
    """Window (default: the stage's seq_len)."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of each window that is context only; every byte is scored exactly once."""
    batch: Positive = 16
    """Windows scored at once."""
    n_loops: Positive | None = None
    """Loops (default: the stage's)."""
    loops_bytes: Annotated[int, Field(ge=0)] = 50_000
    """Score this much with 1, 2, ... twice the stage's loops, for the curve (0: no curve)."""
    prompt: str = "The "
    """What the sample continues."""
    sample_bytes: Annotated[int, Field(ge=0)] = 400
    """Length of the sample."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """Of the sample."""


class Resources(Block):
    """What one training or evaluation job asks of the machine or the cluster."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs a job asks a scheduler for."""
    processes: Positive = Field(default_factory=lambda given: max(1, given.get("gpus", 0)))
    """Processes that train together (default: one a GPU, at least one)."""
    nodes: Positive = 1
    """Machines that share a training: the GPUs and processes evenly; threads and memory are of each."""
    threads: Positive = 2
    """CPU threads, at most those there are."""
    mem_mb: Positive = 6000
    """Memory in MB."""
    runtime: Positive = 60
    """Minutes."""

    @model_validator(mode="after")
    def _share(self) -> Resources:
        if self.processes % self.nodes or self.gpus % self.nodes:
            raise ValueError(
                f"{self.nodes} nodes cannot share {self.gpus} gpus and {self.processes} processes evenly; "
                f"make both multiples of {self.nodes}"
            )
        return self


class Run(Block):
    data: str
    """Dataset to train on, unless a stage names another."""
    model: ModelConfig
    """A preset's name, or a block."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the weights, the order of the data, and every step's noise."""
    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    """auto: what the warm-up measured to be fastest."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """What shares a scale in fp8: a tensor, a row, or a row with weight gradients left in bf16."""
    compile: bool | None = None
    """null: compile on a GPU, not on a CPU."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Of experts and Engram: our own in Triton, or the same in torch; auto: Triton on a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes: each holds the whole model (ddp), or a share of it (fsdp)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    defaults: StageSettings = StageSettings()
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Trained one after the other."""
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: Resources = Resources()
    grid: dict[str, list[Any] | dict[str, Any]] = {}
    """Settings to sweep: each combination of their values becomes a run of its own (docs/sweeps.md)."""


class TrackingConfig(Block):
    uri: str | None = None
    """MLflow store (default: SQLite in the results folder); MLFLOW_TRACKING_URI goes before it."""
    experiment: str | None = None
    """Whose runs these are, on a store of several people: ada logs to ada/Training and ada/Pipeline."""
    enabled: bool = True
    """false: nothing is recorded."""

    @model_validator(mode="after")
    def _names(self) -> TrackingConfig:
        if self.uri and re.search(r"://[^/@]*:[^/]*@|[?&]password=", self.uri):
            raise ValueError(
                "uri holds a password, which would be copied into the results folder; set it in the "
                "environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for a server, PGPASSWORD "
                "for PostgreSQL, or the whole address in MLFLOW_TRACKING_URI"
            )
        if self.experiment is not None and not NAME.fullmatch(self.experiment):
            raise ValueError(f"experiment: a name is letters, digits, - and _ (got {self.experiment!r})")
        return self


class StageSpec(Block):
    """One stage, resolved: all that a training job needs to know."""

    format: Literal[1] = 1
    run: str
    stage: str
    index: int
    data: str
    stream: Dataset | None
    """The dataset itself where it is a stream: it has no shards to be known by."""
    model: ModelConfig
    seed: int
    precision: Literal["auto", "fp8", "bf16", "fp32"]
    fp8_recipe: Fp8Recipe
    compile: bool | None
    kernels: Literal["auto", "triton", "torch"]
    parallel: Literal["ddp", "fsdp"]
    processes: int
    """That the workflow starts; by hand there may be more or fewer."""
    optimizer: OptimizerConfig
    settings: StageSettings
    evaluation: EvaluationConfig

    def deciding(self) -> dict[str, Any]:
        """The fields that decide the weights, as plain JSON."""
        plain = self.model_dump(mode="json", exclude={"evaluation", "format", "parallel", "processes"})
        for name in StageSettings.BOOKKEEPING:
            del plain["settings"][name]
        return plain

    @property
    def identity(self) -> str:
        """Digest of what decides the weights; equal identities may resume each other's checkpoints."""
        return digest(self.deciding())

    def shape_fields(self) -> dict[str, Any]:
        """The fields that decide what the warm-up measures: which matrices, in which arithmetic."""
        batch = {"seq_len": self.settings.seq_len, "n_loops": self.settings.n_loops}
        batch["micro_batch"] = self.micro_batch(self.processes)
        optimizer = {"kind": self.optimizer.kind, "master_weights": self.optimizer.master_weights}
        chosen = {k: getattr(self, k) for k in ("precision", "fp8_recipe", "compile", "kernels")}
        chosen["optimizer"] = optimizer
        return {"model": self.model.model_dump(mode="json"), **chosen, **batch}

    @property
    def shape(self) -> str:
        """Digest of `shape_fields`: stages of one shape share one warm-up."""
        return digest(self.shape_fields())

    def compiled_on(self, device_type: str) -> bool:
        """Whether the model is compiled there: as asked, else on a GPU only."""
        return self.compile if self.compile is not None else device_type == "cuda"

    @property
    def loops(self) -> int:
        """Loops of the core in this stage."""
        return self.settings.n_loops or self.model.recurrence.loops

    @property
    def depths(self) -> int:
        """How many different numbers of loops a step may draw."""
        return 2 * self.loops - 1 if self.model.recurrence.sample_loops else 1

    @property
    def window(self) -> int:
        """Bytes that a trained model is given at a time: those it is evaluated with."""
        return self.evaluation.seq_len or self.settings.seq_len

    @property
    def windows_per_step(self) -> int:
        """Windows of an optimizer step, however many processes share them."""
        return self.settings.micro_batch * self.settings.grad_accum

    @property
    def tokens_per_step(self) -> int:
        return self.settings.seq_len * self.windows_per_step

    def micro_batch(self, processes: int) -> int:
        """Windows of one forward pass, where so many processes share a step.

        As many as ``micro_batch`` allows such that all passes are equal; so with ``grad_accum`` a multiple of
        ``processes`` the passes are exactly those of one process.

        Raises:
            ConfigError: the windows cannot be dealt evenly.
        """
        mine, rest = divmod(self.windows_per_step, processes)
        if rest:
            raise ConfigError(
                f"a step has micro_batch x grad_accum = {self.windows_per_step} windows, which {processes} "
                f"processes cannot share evenly; make that product a multiple of {processes}, or start "
                "another number of processes"
            )
        return next(n for n in range(min(mine, self.settings.micro_batch), 0, -1) if mine % n == 0)


class Config(Block):
    results: str = "results"
    """Folder for everything that is made."""
    datasets: dict[str, Dataset]
    """Datasets by name."""
    runs: Annotated[dict[str, Run], Field(min_length=1)]
    tracking: TrackingConfig = TrackingConfig()
    scaling: str | None = None
    """Fit a scaling law to this run's grid, over models and ``target_flops`` (docs/sweeps.md)."""
    _sweeps: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Of each block with a grid, the names of the runs that it became."""
        return self._sweeps

    def stage(self, run_name: str, stage_name: str) -> StageSpec:
        """Resolve one stage: its own settings over the run's defaults over the schema's."""
        run = self.run(run_name)
        names = [s.name for s in run.stages]
        if stage_name not in names:
            raise ConfigError(f"runs.{run_name}: no stage {stage_name!r}{nearest(stage_name, names)}")
        index = names.index(stage_name)
        stage = run.stages[index]
        own = {k: getattr(stage, k) for k in stage.model_fields_set - {"name"}}
        settings = run.defaults.model_copy(update=own)
        data = settings.data or run.data
        dataset = self.datasets.get(data)
        stream = dataset if dataset and isinstance(dataset.source, StreamSource) else None
        loops = settings.n_loops or run.model.recurrence.loops
        return StageSpec(
            run=run_name,
            stage=stage_name,
            index=index,
            data=data,
            stream=stream,
            model=run.model,
            seed=run.seed,
            precision=run.precision,
            fp8_recipe=run.fp8_recipe,
            compile=run.compile,
            kernels=run.kernels,
            parallel=run.parallel,
            processes=run.resources.processes,
            optimizer=run.optimizer,
            settings=settings.model_copy(update={"data": data, "n_loops": loops}),
            evaluation=run.evaluation.model_copy(update={"data": run.evaluation.data or run.data}),
        )

    def dataset(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise ConfigError(f"datasets: no dataset {name!r}{nearest(name, list(self.datasets))}")
        return self.datasets[name]

    def run(self, name: str) -> Run:
        if name in self.sweeps:
            raise ConfigError(
                f"runs: {name} is a sweep, name one of its runs: {', '.join(self.sweeps[name])}"
            )
        if name not in self.runs:
            raise ConfigError(f"runs: no run {name!r}{nearest(name, list(self.runs))}")
        return self.runs[name]


# ----------------------------------------------------------------------------------- loading and errors


class ConfigError(ValueError):
    """What is wrong in the configuration, one problem a line, each with the path of its key."""


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelt name, or the names there are."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f" (there are: {', '.join(sorted(known))})"


def load_config(source: Path | dict[str, Any]) -> Config:
    """Validate a YAML file or a parsed mapping.

    Raises:
        ConfigError: names the key of every problem, such as
            ``runs.demo.stages[1].tokens: must be positive (got -5)``.
    """
    if isinstance(source, Path):
        try:
            raw = yaml.safe_load(source.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{source}: no such file") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{source}: not valid YAML: {error}") from None
    else:
        raw = source
    if not isinstance(raw, dict):
        raise ConfigError("the configuration must be a mapping with the keys datasets and runs")
    from spider.grid import expand_grids  # here, because it reads this schema

    runs, sweeps = raw.get("runs"), dict[str, list[str]]()
    if isinstance(runs, dict):
        runs, sweeps = expand_grids(runs)
    raw = {**raw, "runs": _expand_models(runs)}
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None
    config.sweeps.update(sweeps)
    problems = [*_cross_check(config), *_scaling_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _expand_models(runs: Any) -> Any:
    """Replace ``model: tiny`` and ``model: {preset: tiny, ...}`` by the preset's full mapping."""
    if not isinstance(runs, dict):
        return runs
    expanded = {}
    for name, run in runs.items():
        if isinstance(run, dict) and "model" in run:
            model = run["model"]
            if isinstance(model, str):
                model = {"preset": model}
            if isinstance(model, dict):
                preset = model.get("preset", "spider-1b")
                if preset not in MODEL_PRESETS:
                    hint = nearest(preset, list(MODEL_PRESETS))
                    raise ConfigError(f"runs.{name}.model.preset: no preset {preset!r}{hint}")
                model = merged(MODEL_PRESETS[preset], model)
            run = {**run, "model": model}
        expanded[name] = run
    return expanded


def merged(base: Any, over: Any) -> Any:
    """``over`` laid on ``base``: mappings are merged key by key, anything else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{k: merged(base.get(k), v) for k, v in over.items()}}


def _cross_check(config: Config) -> list[str]:
    problems = []
    for kind, names in (("datasets", config.datasets), ("runs", config.runs)):
        problems += [
            f"{kind}.{n}: a name is letters, digits, - and _ (it becomes a folder)"
            for n in names
            if not NAME.fullmatch(n)
        ]
    for run_name, run in config.runs.items():
        where = f"runs.{run_name}"
        if run.compile and run.precision == "fp32" and run.model.groups_experts:
            problems.append(
                f"{where}.compile: torch compiles the grouped expert product in bf16 only; "
                "set precision: bf16, or model.moe.implementation: loop"
            )
        if run.optimizer.master_weights == "bf16" and run.precision not in ("bf16", "fp8"):
            problems.append(
                f"{where}.optimizer.master_weights: bf16 weights cannot be multiplied in fp32, which "
                f"precision: {run.precision} may come to; set precision: bf16 or fp8"
            )
        if run.optimizer.master_weights == "bf16" and run.parallel == "fsdp":
            problems.append(
                f"{where}.optimizer.master_weights: parallel: fsdp shares fp32 weights only; set fp32 (each "
                "process then holds a share of them), or parallel: ddp"
            )
        stages = [s.name for s in run.stages]
        for i, stage in enumerate(run.stages):
            at = f"{where}.stages[{i}]"
            if not NAME.fullmatch(stage.name):
                problems.append(f"{at}.name: a name is letters, digits, - and _ (got {stage.name!r})")
            if stage.name in stages[:i]:
                problems.append(f"{at}.name: {stage.name!r} is used twice in this run")
                continue
            resolved = config.stage(run_name, stage.name)
            problems += [f"{at}{problem}" for problem in _horizon_problems(resolved.settings)]
            try:
                resolved.micro_batch(resolved.processes)
            except ConfigError as error:
                problems.append(f"{at}: {error}")
            keep_every, ckpt_every = resolved.settings.keep_every, resolved.settings.ckpt_every
            if keep_every and keep_every % ckpt_every:
                problems.append(
                    f"{at}.keep_every: must be a multiple of ckpt_every, only what is saved can be kept "
                    f"(got {keep_every}, ckpt_every is {ckpt_every})"
                )
            if resolved.data not in config.datasets:
                problems.append(
                    f"{at}.data: no dataset {resolved.data!r}{nearest(resolved.data, list(config.datasets))}"
                )
        scored = run.evaluation.data or run.data
        if scored not in config.datasets:
            problems.append(
                f"{where}.evaluation.data: no dataset {scored!r}{nearest(scored, list(config.datasets))}"
            )
        elif isinstance(config.datasets[scored].source, StreamSource):
            problems.append(
                f"{where}.evaluation.data: {scored!r} is a stream and has no validation shards; name another"
            )
        elif config.datasets[scored].validation == 0:
            problems.append(
                f"datasets.{scored}.validation: must be above 0, runs.{run_name} is evaluated on it"
            )
    return problems


def _scaling_problems(config: Config) -> list[str]:
    """What keeps a law from being fitted; better said before its runs are trained than after."""
    sweep = config.scaling
    if sweep is None:
        return []
    if sweep not in config.sweeps:
        return [f"scaling: no run {sweep!r} with a grid{nearest(sweep, list(config.sweeps))}"]
    runs = [config.runs[name] for name in config.sweeps[sweep]]
    if (count := len(runs[0].stages)) != 1:
        return [f"runs.{sweep}.stages: what a scaling law is fitted to has one stage (here are {count})"]
    budgets = {
        config.stage(name, runs[0].stages[0].name).settings.target_flops for name in config.sweeps[sweep]
    }
    models = {run.model.model_dump_json() for run in runs}
    if None in budgets or len(budgets) < 2 or len(models) < 3:
        return [
            f"runs.{sweep}.grid: a scaling law needs at least 3 models and 2 values of target_flops "
            f"(here are {len(models)} and {len(budgets - {None})})"
        ]
    return []


def _horizon_problems(s: StageSettings) -> list[str]:
    known = (s.tokens, s.max_steps, s.target_flops, s.tokens_per_parameter)
    if all(n is None for n in (*known, s.max_hours)):
        return [": needs tokens, max_steps, target_flops, tokens_per_parameter or max_hours"]
    if s.max_hours is not None and s.schedule not in ("wsd", "constant"):
        return [
            f".max_hours: schedule: {s.schedule} must know its last step from the first; set schedule: wsd, "
            "which decays when time runs out, or constant"
        ]
    return []


_PLAIN = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is required",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "union_tag_not_found": "needs a kind",
    "too_short": "must not be empty",
}


def _explain(error: Any) -> str:
    loc, kind, ctx = error["loc"], error["type"], error.get("ctx", {})
    where = _path(loc)
    if kind == "extra_forbidden":
        return f"{where}: unknown key{nearest(str(loc[-1]), _siblings(loc))}"
    if kind == "greater_than" and ctx.get("gt") == 0:
        text = "must be positive"
    elif kind == "value_error":
        return f"{where}: {ctx['error']}"
    else:
        text = _PLAIN.get(kind, error["msg"]).format(**ctx)
    got = error["input"]
    shown = "" if kind == "missing" or isinstance(got, (dict, list)) else f" (got {got!r})"
    return f"{where}: {text}{shown}"


def _path(loc: tuple[Any, ...]) -> str:
    """``("runs", "demo", "stages", 1, "tokens")`` as ``runs.demo.stages[1].tokens``."""
    path = ""
    for i, part in enumerate(loc):
        if i and loc[i - 1] == "source" and part in ("pydocs", "hub", "local", "stream"):
            continue  # pydantic names the branch of the union, the file does not
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Keys that the block holding an unknown key does know."""
    block: Any = Config
    for part in loc[:-1]:
        block = _child(block, part)
    return list(block.model_fields) if isinstance(block, type) and issubclass(block, Block) else []


def child_block(block: Any, key: str) -> type[Block] | None:
    """The block that a key of a block holds, if it holds one."""
    found = _child(block, key)
    return found if isinstance(found, type) and issubclass(found, Block) else None


def _child(annotation: Any, part: Any) -> Any:
    """The type found under one step of an error's path."""
    if isinstance(annotation, type) and issubclass(annotation, Block) and part in annotation.model_fields:
        annotation = annotation.model_fields[part].annotation
    else:  # an item of a list, a value of a mapping, or the member of a union that ``kind`` names
        blocks = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, Block)]
        named = [
            b
            for b in blocks
            if "kind" in b.model_fields and part in get_args(b.model_fields["kind"].annotation)
        ]
        annotation = next(iter(named or blocks), None)
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    present = [a for a in get_args(annotation) if a is not type(None)]
    optional = len(present) == 1 and len(get_args(annotation)) == 2
    return present[0] if optional else annotation
