"""Training variants of the default run to compare them: same data, same held-out text, one thread each.

A variant is a change to the run of config.yaml, with its memory or of a larger network alone, which is
trained by the real engine in one stage (a rise of 30 steps, then linearly to zero) and scored. What two
variants may spend is made equal in bytes, or in processor time by `step_seconds`. Scores are kept in a folder
by the identity of the stage's spec, so that a benchmark of hours may be stopped, and goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from common import interleaved, network_alone, parser, report

from spider.config import Config, StageSpec, load_config, merged
from spider.config.memory import MemoryConfig
from spider.files import digest, read_json, write_json
from spider.memory.store import make_memories
from spider.results import Results, write_config

ROOT = Path(__file__).parents[1]
TOKENS = 500_000
EVALUATED_BYTES = 100_000
DATASET = "pydocs"
#: Part of a spec's identity, and so of the names of kept folders, whatever the benchmark.
RUN = "ablation"


@dataclass(frozen=True)
class Task:
    """One training of one variant: ``changes`` are laid on the run of config.yaml."""

    variant: str
    changes: dict[str, Any]
    seed: int
    tokens: int
    memory: bool = False
    """Beside the memory of the default run, or the network alone."""


class Comparison:
    """One benchmark of variants: what the command line asks for, where it is kept, and how it is told.

    Args:
        rounds: steps that are timed of each variant.
        with_memory: whether ``--memory`` may ask for a memory beside the network.
    """

    def __init__(self, name: str, description: str, rounds: int, *, with_memory: bool = False) -> None:
        options = parser(description)
        if with_memory:
            options.add_argument("--memory", action="store_true", help="beside the default run's memory")
        options.add_argument("--folder", type=Path, help="keep trained models here, and go on from them")
        options.add_argument("--seeds", type=int, default=3)
        options.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time")
        options.add_argument("--tokens", type=int, default=TOKENS, help="of a training at equal bytes")
        options.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
        self.options = asked = options.parse_args()
        self.tokens, self.seeds, self.rounds, self.scored_bytes = (
            (20_000, range(1), 3, 5_000)
            if asked.quick
            else (asked.tokens, range(asked.seeds), rounds, EVALUATED_BYTES)
        )
        self.folder = asked.folder or Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.memory = with_memory and asked.memory
        if self.memory:
            self.folder /= "with-memory"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_config(self.folder, {})  # a memory is looked for in results folders only
        prepare_data(self.folder, self.memory)

    def spec_of(self, task: Task) -> StageSpec:
        return spec_of(task, self.options.precision)

    def step_seconds(self, tasks: dict[str, Task], known_by: Any) -> dict[str, float]:
        """`step_seconds` of one task of each variant, kept under the digest of ``known_by``."""
        timed = self.folder / f"step-seconds-{digest(known_by)}.json"
        if not timed.exists():
            specs = {name: self.spec_of(task) for name, task in tasks.items()}
            write_json(timed, step_seconds(specs, self.rounds))
        return read_json(timed)

    def bpb(self, tasks: list[Task]) -> dict[str, float]:
        """Bits per byte of each task by its `key`."""
        where = (self.folder, self.options.precision, self.scored_bytes)
        for task in tasks if self.memory else []:
            config = self.spec_of(task).model.memory
            assert config is not None
            make_memories(Results(self.folder).shards(DATASET), config, *memories_of(self.folder, config))
        return {name: score["bpb"] for name, score in run_all(tasks, self.options.jobs, *where).items()}

    def report(self, columns: list[str], versus: str, rows: list[list[str]], figures: dict[str, Any]) -> None:
        """Columns of a benchmark's own, then those of `Outcome.row`."""
        shared = ["step", "equal bytes", f"vs {versus}", "MB in time", "equal time", f"vs {versus}"]
        title = f"{self.tokens:,} tokens, {len(self.seeds)} seeds, {self.options.precision}"
        title += ": bits per byte, mean +- deviation"
        report(title, columns + shared, rows, figures, self.options, ["torch"])


@dataclass(frozen=True)
class Outcome:
    """What one variant came to, seed by seed."""

    step_seconds: float
    tokens_in_time: int
    bpb_equal_bytes: list[float]
    bpb_equal_time: list[float]

    def row(self, reference: Outcome) -> list[str]:
        return [
            f"{self.step_seconds / reference.step_seconds:.2f}",
            spread(self.bpb_equal_bytes),
            difference(self.bpb_equal_bytes, reference.bpb_equal_bytes),
            f"{self.tokens_in_time / 1e6:.2f}",
            spread(self.bpb_equal_time),
            difference(self.bpb_equal_time, reference.bpb_equal_time),
        ]


def configuration(task: Task, precision: str) -> Config:
    """The default run with a task's changes, one stage, and no frills."""
    raw = yaml.safe_load((ROOT / "config.yaml").read_text())
    if not task.memory:
        raw = network_alone(raw)
    (run,) = raw["runs"].values()
    stage = {"name": "only", "tokens": task.tokens, "schedule": "linear", "warmup_steps": 30}
    # What the parts of a network alone are worth was asked of this size.
    run["model"] = {"preset": "slim" if task.memory else "tiny"}
    run = merged(run, task.changes) | {
        "seed": task.seed,
        "precision": precision,
        "compile": False,
        "stages": [stage | {"min_lr_ratio": 0.0, "ckpt_every": 10**6}],
    }
    raw["runs"] = {RUN: run}
    return load_config(raw)


def spec_of(task: Task, precision: str) -> StageSpec:
    return configuration(task, precision).stage(RUN, "only")


def memories_of(root: Path, config: MemoryConfig) -> tuple[Path, Path]:
    """Folders of the memory to train with and of the folded one."""
    memory, folded = (Results(root).memory(DATASET, config.counted, text) for text in ("memory", "folded"))
    return memory, folded


def prepare_data(root: Path, memory: bool) -> None:
    """The embedded corpus as shards, where the results in ``root`` have them."""
    from spider.data.encode import encode_part
    from spider.data.metadata import build_metadata
    from spider.data.pydocs import write_pydocs

    shards = Results(root).shards(DATASET)
    if not (shards / "metadata.json").exists():
        raw_config = yaml.safe_load((ROOT / "config.yaml").read_text())
        dataset = load_config(raw_config if memory else network_alone(raw_config)).dataset(DATASET)
        for part in dataset.source.parts():
            raw = root / f"{part}.parquet"
            write_pydocs(int(part), len(dataset.source.parts()), raw)
            encode_part(raw, shards, part, dataset)
        parts = dataset.source.parts()
        build_metadata(shards, DATASET, dataset, source=dataset.source.model_dump(), parts=parts)


def step_seconds(specs: dict[str, StageSpec], rounds: int) -> dict[str, float]:
    """Processor seconds of one optimizer step of each, all in turn, on one thread."""
    import torch

    from spider.model import build_model
    from spider.training.optim import build_optimizer
    from spider.training.precision import Precision

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def stepper(spec: StageSpec) -> Callable[[], None]:
        arithmetic = Precision(spec.precision, "asked for")  # type: ignore[arg-type]
        built = build_model(spec.model).train()
        optimizer = build_optimizer(built, spec.optimizer, spec.settings.lr, arithmetic.compute)
        x = torch.randint(32, 127, (spec.settings.micro_batch, spec.settings.seq_len + 1))

        def step() -> None:
            with arithmetic.autocast(x.device):
                loss = built(x[:, :-1], x[:, 1:], **built.without_knowledge(x[:, :-1])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return step

    return interleaved({name: stepper(spec) for name, spec in specs.items()}, rounds)[1]


def run(task: Task, root: Path, precision: str, scored_bytes: int) -> dict[str, Any]:
    """Train and score one variant, unless that was done before."""
    import torch

    from spider import load_model
    from spider.evaluation.bpb import score
    from spider.evaluation.held_out import validation_stream
    from spider.training.allocator import keep_freed_memory
    from spider.training.stage import train

    spec, results = spec_of(task, precision), Results(root)
    stage, shards = results.stage(spec.identity, spec.stage).path, results.shards(DATASET)
    done = stage / "score.json"
    if done.exists():
        return read_json(done)
    keep_freed_memory()
    torch.set_num_threads(1)
    memories = memories_of(root, spec.model.memory) if spec.model.memory else None
    receipt = train(spec, stage, shards, memories=memories)
    model, _ = load_model(stage)
    tokens_N, _ = validation_stream(shards, scored_bytes)
    asked = spec.evaluation
    scored = score(
        model,
        tokens_N,
        seq_len=asked.seq_len or spec.settings.seq_len,
        overlap=asked.overlap,
        autocast=precision == "bf16",
    )
    told = {"bpb": scored.bpb, "bytes": receipt.bytes, "seconds": receipt.seconds, **scored.metrics}
    write_json(done, told)
    return told


def run_all(tasks: list[Task], jobs: int, *where: Any) -> dict[str, dict[str, Any]]:
    """Each task's score, by the digest of the task; ``jobs`` processes at a time."""
    scores = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(run, task, *where): task for task in tasks}
        for number, future in enumerate(as_completed(waiting), 1):
            task = waiting[future]
            scores[key(task)] = future.result()
            print(
                f"[{number}/{len(tasks)}] {task.variant}, seed {task.seed}, {task.tokens:,} tokens: "
                f"{scores[key(task)]['bpb']:.4f}",
                flush=True,
            )
    return scores


def key(task: Task) -> str:
    return digest([task.variant, task.changes, task.seed, task.tokens])


def equal_time(tokens: int, seconds: dict[str, float], reference: str) -> dict[str, int]:
    """Tokens each variant trains on in the time that ``reference`` needs for ``tokens``.

    Within 3% of them it is just these, so that one training serves for both comparisons.
    """
    fitting = {name: round(tokens * seconds[reference] / took) for name, took in seconds.items()}
    return {name: tokens if abs(n / tokens - 1) < 0.03 else n for name, n in fitting.items()}


def spread(values: list[float], sign: str = "") -> str:
    """Mean and sample standard deviation over seeds."""
    return f"{mean(values):{sign}.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def difference(values: list[float], reference: list[float]) -> str:
    """The same of the differences from a reference, seed by seed: what the seed does to both drops out."""
    return spread([v - f for v, f in zip(values, reference, strict=True)], sign="+")
