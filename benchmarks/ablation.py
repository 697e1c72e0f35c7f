"""What each part of the Spider is worth: the model without it, at equal bytes and at equal time.

Every variant is trained by the real engine on the embedded corpus with the default run's optimizer and batch,
in one stage (a rise of 30 steps, then linearly to zero), once a seed; its bits per byte are those of the same
held-out text. Twice: on the same number of bytes as the full model, and on as
many as fit into the time that the full model needs for its own (one thread; step times are processor time,
measured in turn before anything is trained). Where both numbers of bytes are within 3%, one training serves
for both.

    python benchmarks/ablation.py [--quick] [--json FILE] [--folder FOLDER] [--seeds N] [--jobs N]

Hours at full size; what is done is kept in ``--folder`` and not done again, so it may be stopped at any time.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from common import interleaved, parser, report

from spider.config import Config, StageSpec, load_config, merged
from spider.files import digest, read_json, write_json

ROOT = Path(__file__).parents[1]
TOKENS = 500_000
EVALUATED_BYTES = 100_000
DATASET = "pydocs"

PLAIN: dict[str, Any] = {
    "boundary": {"kind": "none"},
    "moe": None,
    "recurrence": {
        "loops": 1,
        "injection": False,
        "loop_embedding": False,
        "lora_rank": 0,
        "halting": False,
    },
}

#: The full model is the default run's with the recurrence that this table took out of its defaults.
FULL: dict[str, Any] = {"recurrence": {"loops": 2}}
#: Changes to the full model. ``plain`` is filled up to the full model's FLOPs by `equal_flops`.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no patches": {"boundary": {"kind": "none"}},
    "fixed patches": {"boundary": {"kind": "fixed", "stride": 5}},
    "whitespace patches": {"boundary": {"kind": "whitespace"}},
    "learned patches, random start": {"boundary": {"start": "random"}},
    "no recurrence, same parameters": {"recurrence": {"loops": 1}},
    "no recurrence, same FLOPs": {"recurrence": {"loops": 1, "layers": 2}},
    "no byte n-grams": {"engram": {"byte_orders": []}},
    "Engram in the core": {"engram": {"layers": [0]}},
    "Engram in the core, no byte n-grams": {"engram": {"layers": [0], "byte_orders": []}},
    "no ACT": {"recurrence": {"halting": False}},
    "no LoRA": {"recurrence": {"lora_rank": 0}},
    "no MoE": {"moe": None},
    "plain transformer, equal FLOPs": PLAIN | {"engram": {"layers": [], "byte_orders": []}},
    "plain transformer with byte n-grams, equal FLOPs": PLAIN,
}


@dataclass(frozen=True)
class Task:
    """One training of one variant."""

    variant: str
    model: dict[str, Any]
    seed: int
    tokens: int


def configuration(task: Task, precision: str) -> Config:
    """The default run with another model, one stage, and no frills."""
    raw = copy.deepcopy(yaml.safe_load((ROOT / "config.yaml").read_text()))
    (run,) = raw["runs"].values()
    stage = {"name": "only", "tokens": task.tokens, "schedule": "linear", "warmup_steps": 30}
    model = {"preset": run["model"]} if isinstance(run["model"], str) else run["model"]
    run |= {
        "model": merged(merged(model, FULL), task.model),
        "seed": task.seed,
        "precision": precision,
        "compile": False,
        "stages": [stage | {"min_lr_ratio": 0.0, "ckpt_every": 10**6}],
    }
    raw["runs"] = {"ablation": run}
    return load_config(raw)


def spec_of(task: Task, precision: str) -> StageSpec:
    return configuration(task, precision).stage("ablation", "only")


def flops(model: dict[str, Any]) -> tuple[float, int]:
    """FLOPs a byte of the default window and parameters of a variant, without allocating it."""
    import torch

    from spider.model import build_model

    spec = spec_of(Task("", model, 0, TOKENS), "fp32")
    with torch.device("meta"):
        built = build_model(spec.model)
    return built.flops_per_token(spec.settings.seq_len, spec.settings.n_loops), built.num_parameters()


def equal_flops(model: dict[str, Any], wanted: float) -> dict[str, Any]:
    """The variant with as many layers, and then as wide a feed-forward, as come nearest to ``wanted``."""

    def off(layers: int, ffn_hidden: int) -> float:
        return abs(flops(merged(model, size(layers, ffn_hidden)))[0] - wanted)

    def size(layers: int, ffn_hidden: int) -> dict[str, Any]:
        return {"recurrence": {"layers": layers}, "ffn_hidden": ffn_hidden}

    layers = min(range(1, 9), key=lambda n: off(n, 512))
    return merged(model, size(layers, min(range(256, 1025, 16), key=lambda f: off(layers, f))))


def prepare_data(folder: Path) -> Path:
    """The embedded corpus as shards."""
    from spider.data.corpus import write_pydocs
    from spider.data.encode import encode_part
    from spider.data.shards import build_metadata

    shards = folder / "shards"
    if not (shards / "metadata.json").exists():
        dataset = load_config(ROOT / "config.yaml").dataset(DATASET)
        settings = dataset.model_dump(exclude={"source"})
        for part in dataset.source.parts():
            raw = folder / f"{part}.parquet"
            write_pydocs(int(part), len(dataset.source.parts()), raw)
            encode_part(raw, shards, part, **settings)
        parts = dataset.source.parts()
        build_metadata(shards, DATASET, source=dataset.source.model_dump(), parts=parts, **settings)
    return shards


def step_seconds(models: dict[str, dict[str, Any]], precision: str, rounds: int) -> dict[str, float]:
    """Processor seconds of one optimizer step of each variant, all in turn."""
    import torch

    from spider.model import build_model
    from spider.training.optim import build_optimizer
    from spider.training.precision import Precision

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def stepper(model: dict[str, Any]) -> Any:
        spec = spec_of(Task("", model, 0, TOKENS), precision)
        arithmetic = Precision(spec.precision, "asked for")  # type: ignore[arg-type]
        built = build_model(spec.model).train()
        optimizer = build_optimizer(built, spec.optimizer, spec.settings.lr, arithmetic.compute)
        x = torch.randint(32, 127, (spec.settings.micro_batch, spec.settings.seq_len + 1))

        def step() -> None:
            with arithmetic.autocast(x.device):
                loss = built(x[:, :-1], x[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        return step

    return interleaved({name: stepper(model) for name, model in models.items()}, rounds)[1]


def run(task: Task, shards: Path, folder: Path, precision: str, scored_bytes: int) -> dict[str, Any]:
    """Train and score one variant, unless that was done before."""
    import torch

    from spider.evaluation.bpb import score
    from spider.evaluation.evaluate import validation_stream
    from spider.training.checkpoint import load_model
    from spider.training.loop import train
    from spider.training.memory import keep_freed_memory

    spec = spec_of(task, precision)
    stage = folder / "trained" / spec.identity
    done = stage / "score.json"
    if done.exists():
        return read_json(done)
    keep_freed_memory()
    torch.set_num_threads(1)
    receipt = train(spec, stage, shards)
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
    found = {"bpb": scored.bpb, "bytes": receipt["bytes"], "seconds": receipt["seconds"], **scored.metrics}
    write_json(done, found)
    return found


def run_all(tasks: list[Task], jobs: int, *where: Any) -> dict[Task | str, dict[str, Any]]:
    """Each task's score, by the digest of the task; ``jobs`` processes at a time."""
    found = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(run, task, *where): task for task in tasks}
        for number, future in enumerate(as_completed(waiting), 1):
            task = waiting[future]
            found[key(task)] = future.result()
            print(
                f"[{number}/{len(tasks)}] {task.variant}, seed {task.seed}, {task.tokens:,} tokens: "
                f"{found[key(task)]['bpb']:.4f}",
                flush=True,
            )
    return found


def key(task: Task) -> str:
    return digest([task.variant, task.model, task.seed, task.tokens])


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--folder", type=Path, help="keep trained models here, and go on from them")
    options_parser.add_argument("--seeds", type=int, default=3)
    options_parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time")
    options_parser.add_argument("--tokens", type=int, default=TOKENS, help="of the full model's trainings")
    options_parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    options = options_parser.parse_args()
    tokens, seeds, rounds, scored_bytes = options.tokens, range(options.seeds), 15, EVALUATED_BYTES
    if options.quick:
        tokens, seeds, rounds, scored_bytes = 20_000, range(1), 3, 5_000
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ablation-"))
    folder.mkdir(parents=True, exist_ok=True)

    wanted, _ = flops({})
    models = {
        name: equal_flops(changes, wanted) if name.startswith("plain") else changes
        for name, changes in VARIANTS.items()
    }
    if options.quick:
        models = {name: models[name] for name in ("full", "no patches", "no MoE")}
    shards = prepare_data(folder)
    timed = folder / f"step-seconds-{digest(models)}.json"
    if not timed.exists():
        write_json(timed, step_seconds(models, options.precision, rounds))
    seconds = read_json(timed)

    in_time = {name: round(tokens * seconds["full"] / took) for name, took in seconds.items()}
    in_time = {name: tokens if abs(n / tokens - 1) < 0.03 else n for name, n in in_time.items()}
    plan = {
        (name, budget, seed): Task(name, model, seed, count)
        for seed in seeds
        for budget in ("bytes", "time")
        for name, model in models.items()
        for count in [tokens if budget == "bytes" else in_time[name]]
    }
    unique = {key(task): task for task in plan.values()}
    scores = run_all(list(unique.values()), options.jobs, shards, folder, options.precision, scored_bytes)

    def bpb(name: str, budget: str) -> list[float]:
        return [scores[key(plan[name, budget, seed])]["bpb"] for seed in seeds]

    rows, figures = [], {}
    for name, model in models.items():
        cost, parameters = flops(model)
        by_bytes, by_time = bpb(name, "bytes"), bpb(name, "time")
        rows.append(
            [
                name,
                f"{parameters / 1e6:.2f}M",
                f"{cost / 1e6:.2f}",
                f"{seconds[name] / seconds['full']:.2f}",
                spread(by_bytes),
                difference(by_bytes, bpb("full", "bytes")),
                f"{in_time[name] / 1e6:.2f}",
                spread(by_time),
                difference(by_time, bpb("full", "time")),
            ]
        )
        figures[name] = {
            "model": model,
            "parameters": parameters,
            "flops_per_byte": cost,
            "step_seconds": seconds[name],
            "tokens_in_time": in_time[name],
            "bpb_equal_bytes": by_bytes,
            "bpb_equal_time": by_time,
        }
    report(
        f"{tokens:,} tokens, {len(seeds)} seeds, {options.precision}: bits per byte, mean +- deviation",
        [
            "variant",
            "params",
            "MFLOPs/B",
            "step",
            "equal bytes",
            "vs full",
            "MB in time",
            "equal time",
            "vs full",
        ],
        rows,
        figures,
        options,
        ["torch"],
    )


def spread(values: list[float], sign: str = "") -> str:
    """Mean and sample standard deviation over seeds."""
    return f"{mean(values):{sign}.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def difference(values: list[float], full: list[float]) -> str:
    """The same of the differences from the full model, seed by seed: what the seed does to both drops out."""
    return spread([v - f for v, f in zip(values, full, strict=True)], sign="+")


if __name__ == "__main__":
    main()
