"""Runs: the stages of a training, and what each is trained, evaluated and given with."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from spider.config.block import Block, Fraction, Name, Positive, wrong_key
from spider.config.model import AnyModel, model_block
from spider.config.tasks import HarnessConfig, TaskConfig

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class OptimizerConfig(Block):
    """AdamW, its moments in 32 or 8 bits; or Muon for the matrices and AdamW for the rest."""

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw, the same with quantized moments, or Muon for the matrices beside it."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrices in half the memory, stochastically rounded (adamw8bit only)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled; of matrices only."""
    decay_embeddings: bool = False
    """Of embeddings too, and of other tables."""
    cautious_decay: bool = True
    """Muon's matrices decay only where that pulls the same way as their update; false: everywhere."""
    weight_decay_end: Annotated[float, Field(ge=0)] | None = None
    """It goes there linearly over each stage; with ``max_hours``, as the rate falls (null: stays)."""
    muon_lr_ratio: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of the matrices under Muon, as a multiple of the stage's ``lr``."""
    muon_momentum: Fraction = 0.95
    """Muon's."""
    muon_momentum_start: Fraction | None = None
    """Muon's in the first step of the run, from where it goes to ``muon_momentum`` (null: begins there)."""
    muon_momentum_steps: Positive = 300
    """Steps of the run in which it does, linearly."""
    muon_beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    """NorMuon: evens out Muon's updates by a running mean of their squares, which keeps this share of itself
    (null: plain Muon)."""
    muon_rows: bool = False
    """Bring each row of Muon's momentum to one length before its polar factor."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""

    @model_validator(mode="after")
    def _bf16_is_rounded(self) -> OptimizerConfig:
        if self.master_weights == "bf16" and self.kind != "adamw8bit":
            remedy = "set kind: adamw8bit, or master_weights: fp32"
            reason = f"bf16 loses small updates under {self.kind}, which rounds to nearest"
            raise ValueError(f"master_weights: {reason}; {remedy}")
        return self

    @model_validator(mode="after")
    def _only_muons(self) -> OptimizerConfig:
        for key in ("muon_beta2", "muon_momentum_start", "muon_rows", "cautious_decay"):
            if self.kind != "muon" and getattr(self, key) != type(self).model_fields[key].default:
                raise wrong_key(key, f"kind: {self.kind} has no Muon; set kind: muon, or leave it out")
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
    """Ids to train on in this stage: bytes, or a tokenizer's, and special ones."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    target_flops: Annotated[float, Field(gt=0)] | None = None
    """FLOPs of forward and backward passes (``spider describe`` counts them)."""
    tokens_per_parameter: Annotated[float, Field(gt=0)] | None = None
    """The same for each of the model's parameters, all experts counted (of a GPT: of matrices and head)."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of training, over all restarts; ``schedule: wsd`` then decays in time. Not bit-reproducible."""
    data: str | None = None
    """Dataset of this stage (default: the run's)."""
    seq_len: Annotated[int, Field(ge=8)] = 2048
    """Ids a window."""
    micro_batch: Positive = 64
    """Windows a forward pass."""
    grad_accum: Positive = 1
    """Forward passes an optimizer step."""
    packing: Literal["ring", "best_fit"] = "ring"
    """ring: windows cut from the text wherever they end; best_fit: whole documents, packed into rows."""
    attend: Literal["row", "document"] = "row"
    """What an id may see of a packed row: all before it, or its own document alone."""
    learn: Literal["all", "assistant"] = "all"
    """What is learned: every id, or what an assistant says in conversations."""
    n_loops: Positive | None = None
    """Loops of the model's recurrent part (default: the model's)."""
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
    ckpt_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, in place of ``ckpt_every`` (null: so many steps)."""
    keep_last: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept."""
    keep_every: Positive | None = None
    """Also keep those whose step in the stage is a multiple of this, a multiple of ``ckpt_every``."""
    val_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between validations, a multiple or a divisor of ``ckpt_every`` (null: as often as they cost a
    400th of the training's FLOPs; 0: none)."""
    val_bytes: Positive = 16_384
    """Of the text that the evaluation scores, so much is scored each time, spread evenly over it."""

    #: Settings that never touch the weights: they may change in the middle of a stage.
    BOOKKEEPING: ClassVar = frozenset(
        {"log_every", "ckpt_every", "ckpt_minutes", "keep_last", "keep_every", "stall_minutes"}
        | {"val_every", "val_bytes"}
    )


class Stage(StageSettings):
    """A stage ends with the first of ``tokens``, ``max_steps``, ``target_flops``, ``tokens_per_parameter``
    and ``max_hours`` that it reaches; it needs at least one of them."""

    name: Name
    """Its folder's name."""


class TTTConfig(Block):
    """Test-time training: score the text again and learn from each chunk of it once that is scored. A figure
    of its own beside the frozen model's (docs/evaluation.md)."""

    chunk: Positive = 8192
    """Ids scored before they are learned from; at least a window."""
    epochs: Positive = 1
    """Times that a chunk is read to learn from it, window by window from left to right."""
    lr: Annotated[float, Field(ge=0)] = 0.002
    """Of SGD, one for all parameters and all of the text (0: must score what the frozen model does)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD, kept from chunk to chunk."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    parameters: Literal["all", "ffn_down"] = "all"
    """What learns: every weight, or those that lead out of the feed-forwards."""
    reset: Literal["never", "document"] = "never"
    """document: back to the trained weights where a document begins."""


Bits = Annotated[int, Field(ge=2, le=8)]
Deviations = Annotated[float, Field(gt=0)]


class CompressConfig(Block):
    """Weights as small integers, coded near their entropy, in one file (docs/golf.md)."""

    cap: Positive = 16_000_000
    """Bytes that the file and the code it needs may take together."""
    bits: Bits = 6
    """Bits of an entry of a matrix, which takes one of 2^bits - 1 values."""
    embedding_bits: Bits = 8
    """Bits of an entry of a table: embeddings, heads, hashed n-grams."""
    clip: Deviations | None = None
    """Clipping range of a row, in standard deviations. A larger range gives a smaller file, more error (null:
    the smallest range that fits ``cap``)."""
    embedding_clip: Deviations = 20.0
    """The same of tables, each by one step."""
    scale: Literal["row", "matrix"] = "row"
    """What of a matrix shares a step."""
    method: Literal["gptq", "nearest"] = "gptq"
    """gptq: what is not rounded yet takes up the error, as training text enters; or to the nearest."""
    windows: Positive = 64
    """Windows of training text that are read for that."""
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Of what enters, in its mean square."""


class EvaluationConfig(Block):
    """What every stage's last checkpoint is measured on."""

    #: Keys of the sample alone: they change no score.
    SAMPLE: ClassVar[frozenset[str]] = frozenset({"prompt", "sample_bytes", "temperature"})

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
    training_bytes: Positive | None = 4_000_000
    """Training text that PPMd is given before the scored text, at most; slower compressors are given what is
    no more than a 16th of it, and eight times as much is searched for copies (null: all of it)."""
    ttt: TTTConfig | None = None
    """Also score the text while learning from it (null: do not)."""
    tasks: dict[Name, TaskConfig] = {}
    """Questions to answer beside, by name (docs/evaluation.md)."""
    measurements: dict[str, dict[str, Any]] = {}
    """Measurements of your own: settings by the name of the module that is imported (CONTRIBUTING.md)."""
    prompt: str = "The "
    """What the sample continues, or answers where the model was trained on conversations."""
    sample_bytes: Annotated[int, Field(ge=0)] = 400
    """Length of the sample."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """Of the sample."""

    def scoring(self) -> dict[str, Any]:
        """Return the changed keys that decide the scores."""
        return self.changed(exclude=set(self.SAMPLE))

    def sampling(self) -> dict[str, Any]:
        """Return the changed keys that decide the sample."""
        return self.changed(include={*self.SAMPLE, "seq_len", "n_loops"})


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
            what = f"{self.gpus} gpus and {self.processes} processes"
            remedy = f"make both multiples of {self.nodes}"
            raise ValueError(f"{self.nodes} nodes cannot share {what} evenly; {remedy}")
        return self


class RunSettings(Block):
    """What holds for all stages of a run."""

    model: AnyModel
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the weights, the order of the data, and every step's noise."""
    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    """Of matrix products; auto: what the warm-up measured to be fastest."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """What shares a scale in fp8: a tensor, a row, or a row with weight gradients left in bf16."""
    compile: bool | None = None
    """Use torch.compile (null: on a GPU, not on a CPU)."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Of experts and Engram: our own in Triton, or the same in torch; auto: Triton on a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes: each holds the whole model (ddp), or a share of it (fsdp)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class Run(RunSettings):
    """A model, trained through a list of stages."""

    model: Annotated[AnyModel, BeforeValidator(model_block)]
    """A preset's name, or a block."""
    data: str
    """Dataset to train on, unless a stage names another."""
    defaults: StageSettings = StageSettings()
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Trained one after the other."""
    harness: HarnessConfig | None = None
    """Standard tasks for the last checkpoint (null: none)."""
    compress: CompressConfig | None = None
    """Compress the last checkpoint into a file, and measure that (null: do not)."""
    resources: Resources = Resources()
    grid: dict[str, list[Any] | dict[str, Any]] = {}
    """Settings to sweep: each combination of their values becomes a run of its own (docs/sweeps.md)."""

    @model_validator(mode="after")
    def _decay_ends(self) -> Run:
        if self.optimizer.weight_decay_end is None:
            return self
        for stage in self.stages:
            own = stage.model_fields_set
            hours, schedule = (
                getattr(stage if key in own else self.defaults, key) for key in ("max_hours", "schedule")
            )
            if hours is not None and schedule == "constant":
                reason = f"stage {stage.name} ends by the clock (max_hours) and its rate never falls"
                remedy = "the decay would not either; set its schedule: wsd, or leave weight_decay_end out"
                raise wrong_key("optimizer.weight_decay_end", f"{reason}, {remedy}")
        return self


class TrackingConfig(Block):
    uri: str | None = None
    """MLflow store (default: SQLite in the results folder); MLFLOW_TRACKING_URI goes before it."""
    experiment: Name | None = None
    """Whose runs these are, on a store of several people: ada logs to ada/Training and ada/Pipeline."""
    enabled: bool = True
    """false: nothing is recorded."""
    registry: bool = True
    """Every run is a registered model in MLflow, every stage a version of it."""
    copy_weights: bool = False
    """true: the store gets a copy of each stage's weights, for who cannot read the results folder."""

    @model_validator(mode="after")
    def _names(self) -> TrackingConfig:
        if self.uri and re.search(r"://[^/@]*:[^/]*@|[?&]password=|(?i:^https?)://[^/@?#]*@", self.uri):
            raise ValueError(
                "uri holds a password or a token, which would be copied into the results folder; set it in "
                "the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN, for a server, PGPASSWORD for PostgreSQL, or the whole address in "
                "MLFLOW_TRACKING_URI"
            )
        return self
