"""Families of models on the same text at equal processor time, in bits per byte, beside compressors.

The runs of presets/arena.yaml, or of ``--runs FILE`` (benchmarks/golf.yaml has variants of golf's model,
which are told apart there), each with its settings there but one stage (a rise of 30 steps, then linearly
to zero) of as many tokens as take it ``--seconds`` of one core by the measured time of a step, once a seed.
Scored are the same held-out bytes, cut in bytes, whatever a model reads.

    python benchmarks/families.py [--search] [--switch KEY=VALUE] [--quick] [--json FILE] [--folder FOLDER]

``--search`` trains each for a third of the time at every point of one grid instead, the same for all (rate,
ids of a window, windows of a step), and prints the best of each: so the preset's settings were found.
``--switch value_embeddings=alternate`` trains the GPTs alone, with that key of their model: what a part is
worth at equal time.
``--tokens N`` trains each on so many ids, to compare at equal steps; ``--only NAME ...`` trains some of the
runs. ``--press CLIP`` presses each, and prints the bytes of its file and the bits per byte read back from it.
What was trained is kept in ``--folder``, and not trained again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from common import parser, report
from variants import spread, step_seconds

from spider.config import Config, load_config, merged
from spider.files import digest, read_json, write_json
from spider.results import Results, write_config

ROOT = Path(__file__).parents[1]
#: Points of the search: rate, ids of a window, windows of a step.
GRID = list(itertools.product([4e-3, 8e-3, 16e-3, 32e-3], [(256, 2), (256, 4), (256, 8), (512, 4)]))


def configuration(arena: Path, changes: dict[str, Any], tokens: int, seed: int) -> Config:
    """The arena with every run's stage made one of so many tokens; with a ``switch``, of its GPTs alone."""
    raw = yaml.safe_load(arena.read_text())
    stage = {"name": "only", "tokens": tokens, "schedule": "linear"}
    defaults = {key: value for key, value in changes.items() if key != "switch"}
    if switch := changes.get("switch"):
        raw["runs"].pop("spider", None)
    for run in raw["runs"].values():
        model = run["model"] if isinstance(run["model"], dict) else {"preset": run["model"]}
        run["model"] = merged(model, switch or {})
        run["defaults"] = merged(run["defaults"], defaults)
        run |= {"seed": seed, "stages": [stage], "precision": "fp32", "compile": False}
    return load_config(raw)


def prepare(arena: Path, folder: Path, quick: bool) -> None:
    """The corpus once, and what it is written in."""
    from spider.data.encode import encode_part
    from spider.data.metadata import build_metadata
    from spider.data.pydocs import write_pydocs
    from spider.data.tokenizer import learn
    from spider.tokens import BYTES
    from spider.tokens.stored import read_tokens

    config, results = configuration(arena, {}, 1, 0), Results(folder)
    write_config(folder, {})
    parts = config.datasets["pydocs"].source.parts()[: 1 if quick else None]
    raws = [results.raw("pydocs", part) for part in parts]
    for number, raw in enumerate(raws):
        if not raw.exists():
            write_pydocs(number, len(config.datasets["pydocs"].source.parts()), raw)
    for name, tokenizer in config.tokenizers.items():
        if not results.tokenizer(name).exists():
            learn(raws, results.tokenizer(name), name, tokenizer, config.datasets[tokenizer.data])
    for name, dataset in config.datasets.items():
        learned = results.tokenizer(dataset.tokenizer) if dataset.tokenizer else None
        if not (results.shards(name) / "metadata.json").exists():
            tokens = read_tokens(learned) if learned else BYTES
            for part, raw in zip(parts, raws, strict=True):
                encode_part(raw, results.shards(name), part, dataset, tokens)
            build_metadata(results.shards(name), name, dataset, source={}, parts=parts, tokenizer=learned)


def train_and_score(
    arena: Path, folder: Path, name: str, changes: dict[str, Any], tokens: int, seed: int, scored: int,
    clip: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One training, unless it was done before: its bits per byte, and the bytes that it read; with a ``clip``
    also the bytes of its file, and the bits per byte of that."""
    import torch

    from spider import load_model
    from spider.evaluation.bpb import score
    from spider.evaluation.held_out import validation_stream
    from spider.training.stage import train

    spec = configuration(arena, changes, tokens, seed).stage(name, "only")
    shards = Results(folder).shards(spec.data)
    stage = Results(folder).stage(digest([spec.identity, scored]), "only").path
    torch.set_num_threads(1)

    def bpb(path: Path) -> float:
        model, _ = load_model(path)
        tokens_N, _ = validation_stream(shards, scored, model.tokens)
        return score(model, tokens_N, seq_len=spec.window, overlap=spec.evaluation.overlap).bpb

    if not (done := stage / "score.json").exists():
        receipt = train(spec, stage, shards)
        told = {"bpb": bpb(stage), "bytes": receipt.bytes, "seconds": receipt.seconds}
        write_json(done, {**told, "parameters": load_model(stage)[0].num_parameters()})
    if clip is not None and not (pressed := stage / f"pressed-{clip:g}.json").exists():
        from spider.compress.press import press
        from spider.config import CompressConfig

        asked, output = CompressConfig(cap=10**9, clip=clip), stage / f"pressed-{clip:g}"
        file = press(stage / "train.json", spec, asked, shards, output, "cpu").artifact
        write_json(pressed, {"file_bytes": file.bytes, "pressed_bpb": bpb(output / "model.spider")})
    return read_json(done) | ({} if clip is None else read_json(pressed))


def token_seconds(arena: Path, folder: Path, changes: dict[str, Any], rounds: int) -> dict[str, float]:
    """Processor seconds of a token of each run with these settings, measured in turn."""
    kept = folder / f"token-seconds-{digest([changes, yaml.safe_load(arena.read_text())['runs']])}.json"
    if not kept.exists():
        config = configuration(arena, changes, 1, 0)
        specs = {name: config.stage(name, "only") for name in config.runs}
        took = step_seconds(specs, rounds)
        write_json(kept, {name: took[name] / spec.tokens_per_step for name, spec in specs.items()})
    return read_json(kept)


def compressors(folder: Path, scored: int) -> dict[str, float]:
    """Bits per byte of the same text: xz alone, PPMd given the training text."""
    from spider.data.shards import Shards
    from spider.evaluation.compressors import Ppmd, bits
    from spider.evaluation.held_out import validation_stream
    from spider.tokens import BYTES

    shards = Results(folder).shards("pydocs")
    text = BYTES.raw(validation_stream(shards, scored)[0])
    train = Shards(shards, "train")
    given = BYTES.raw(train.read(0, train.tokens))
    return {
        "xz": bits("xz", b"", [text])[0] / len(text),
        "PPMd": sum(Ppmd(b"", len(text)).bits([text])) / len(text),
        f"PPMd given all {len(given) / 1e6:.1f} MB": sum(Ppmd(given, len(text)).bits([text])) / len(text),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--search", action="store_true")
    options.add_argument("--runs", type=Path, default=ROOT / "presets/arena.yaml", help="whose to train")
    options.add_argument("--switch", metavar="KEY=VALUE", help="of the GPTs' model")
    options.add_argument("--folder", type=Path, help="keep trained models here, and go on from them")
    options.add_argument("--seconds", type=float, default=120.0, help="of one core, for each training")
    options.add_argument("--tokens", type=int, help="for each training, instead of seconds")
    options.add_argument("--only", nargs="+", metavar="NAME", help="of the runs")
    options.add_argument("--press", type=float, metavar="CLIP", help="press each at so many deviations")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    asked = options.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="families-"))
    seconds, scored, rounds = (2.0, 5_000, 2) if asked.quick else (asked.seconds, 100_000, 9)
    prepare(asked.runs, folder, asked.quick)
    points = [{"lr": lr, "seq_len": seq_len, "micro_batch": windows} for lr, (seq_len, windows) in GRID]
    points = points[:2] if asked.quick else points
    points, seeds = (points, range(1)) if asked.search else ([{}], range(1 if asked.quick else asked.seeds))
    if asked.switch:
        key, value = asked.switch.split("=")
        points = [{**point, "switch": {key: yaml.safe_load(value)}} for point in points]
    budget = seconds / 3 if asked.search else seconds
    names = asked.only or list(configuration(asked.runs, points[0], 1, 0).runs)
    # Of a token, and how many then are trained.
    costs = [{} if asked.tokens else token_seconds(asked.runs, folder, one, rounds) for one in points]
    tokens = [{name: asked.tokens or round(budget / cost[name]) for name in names} for cost in costs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        waiting = {
            (name, i, seed): pool.submit(
                train_and_score,
                asked.runs,
                folder,
                name,
                changes,
                tokens[i][name],
                seed,
                scored,
                asked.press,
            )
            for seed in seeds
            for i, changes in enumerate(points)
            for name in names
        }
        told = {}
        for number, (one, future) in enumerate(waiting.items(), 1):
            told[one] = future.result()
            print(f"[{number}/{len(waiting)}] {one[0]} {points[one[1]]}: {told[one]['bpb']:.4f}", flush=True)
    rows, figures = [], {}
    for name in names:
        best = min(range(len(points)), key=lambda i: told[name, i, 0]["bpb"])
        bpb = [told[name, best, seed]["bpb"] for seed in seeds]
        one = told[name, best, 0]
        found = " ".join(f"{key} {value}" for key, value in points[best].items())
        if asked.press is not None:
            files = [told[name, best, seed] for seed in seeds]
            found += f"{one['file_bytes']:,} bytes: {spread([file['pressed_bpb'] for file in files])}"
        rows.append(
            [name, f"{one['parameters'] / 1e6:.2f}M", f"{one['bytes'] / 1e6:.2f}", spread(bpb), found]
        )
        figures[name] = {"bpb": bpb, **one, "settings": points[best]}
        figures[name]["all"] = [[point, told[name, i, 0]["bpb"]] for i, point in enumerate(points)]
    if not asked.search:
        for name, rate in compressors(folder, scored).items():
            rows.append([name, "", "", f"{rate:.3f}", ""])
            figures[name] = {"bpb": [rate]}
    much = f"{asked.tokens:,} tokens" if asked.tokens else f"{budget:.0f} s of one core"
    title = f"{much} each, {len(seeds)} seeds, {scored:,} held-out bytes"
    columns = ["family", "params", "MB read", "bits per byte", "best, pressed"]
    report(title, columns, rows, figures, asked, ["torch"])


if __name__ == "__main__":
    main()
