"""What pressing a model costs: bits per byte lost and bytes, by method, bits and clip.

A golf-tiny over 2,048 tokens, trained for so many ``--tokens`` on the default run's text, then pressed in
many ways; each file is read back and scored on the same held-out bytes as the model. The seed's recipe (each
weight to the nearest, clipped at 2.5 deviations, zlib) is a row. Beside it: what each coder makes of the same
integers, and the errors of GPTQ against those of rounding, matrix by matrix.

    python benchmarks/compress.py [--quick] [--json FILE] [--folder FOLDER] [--figure FILE.svg]

What was trained is kept in ``--folder``, and not trained again.
"""

from __future__ import annotations

import lzma
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import brotli
import numpy as np
import yaml
from common import parser, report

from spider.checkpoints.load import Checkpoint
from spider.compress import artifact, rans
from spider.compress.press import press
from spider.config import CompressConfig, Config, load_config
from spider.data.encode import encode_part
from spider.data.metadata import build_metadata
from spider.data.pydocs import write_pydocs
from spider.data.tokenizer import learn
from spider.evaluation.bpb import score
from spider.evaluation.held_out import validation_stream
from spider.model.interface import Model
from spider.report.charts import MARKERS, Axis, Chart, Level, Series
from spider.report.formatting import bits as bits_label
from spider.report.formatting import bytes_label
from spider.report.render import picture
from spider.results import Results, write_config
from spider.tokens.stored import read_tokens
from spider.training.stage import train

ROOT = Path(__file__).parents[1]
#: A cap that nothing reaches.
PLENTY = 10**8
#: Label and settings: the search's own, coarser ones, and the seed's.
WAYS: list[tuple[str, dict[str, Any]]] = [
    *((f"{method}, {bits} bits", {"method": method, "bits": bits, "clip": 12.85})
      for bits in (7, 6, 5, 4) for method in ("gptq", "nearest")),
    ("gptq, 6 bits, clip 8", {"clip": 8.0}),
    ("gptq, 6 bits, clip 20", {"clip": 20.0}),
    ("gptq, 6 bits, one step a matrix", {"clip": 12.85, "scale": "matrix"}),
    ("the seed's, nearest, 6 bits, clip 2.5", {"method": "nearest", "clip": 2.5, "embedding_clip": 2.5}),
]  # fmt: skip


def prepare(folder: Path, tokens: int) -> tuple[Config, Results]:
    """The preset's corpus, tokenizer and shards, and one stage of so many tokens, trained."""
    raw = yaml.safe_load((ROOT / "presets/golf-cpu.yaml").read_text())
    raw["runs"]["golf"]["stages"][0]["tokens"] = tokens
    config, results = load_config(raw), Results(folder)
    write_config(folder, {})
    for number, part in enumerate(parts := config.datasets["pydocs"].source.parts()):
        if not results.raw("pydocs", part).exists():
            write_pydocs(number, len(parts), results.raw("pydocs", part))
    raws = [results.raw("pydocs", part) for part in parts]
    learned, dataset = results.tokenizer("bpe2k"), config.datasets["pydocs-2k"]
    if not learned.exists():
        learn(raws, learned, "bpe2k", config.tokenizers["bpe2k"], config.datasets["pydocs"])
    shards = results.shards("pydocs-2k")
    if not (shards / "metadata.json").exists():
        for part, path in zip(parts, raws, strict=True):
            encode_part(path, shards, part, dataset, read_tokens(learned))
        build_metadata(shards, "pydocs-2k", dataset, source={}, parts=parts, tokenizer=learned)
    if not (stage := results.stage("golf", "main")).receipt.exists():
        train(config.stage("golf", "main"), stage.path, shards)
    return config, results


def coders(folder: Path) -> list[list[str]]:
    """The integers of a file by several coders, against their entropy."""
    pressed = artifact.read(folder / "model.spider")
    symbols = pressed._symbols(_shapes(pressed)).values()
    raw = b"".join(one.tobytes() for one in symbols)
    entropy = sum(rans.bits(np.bincount(one.ravel())) for one in symbols) / 8
    ours = sum(len(pressed.sections[part]) for part in ("stream", "tables", "classes"))
    made = {
        "ours, tables and classes included": ours,
        "brotli -q 11": len(brotli.compress(raw, quality=11)),
        "xz -9e": len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)),
        "zlib -9": len(zlib.compress(raw, 9)),
    }
    return [[name, f"{size:,}", f"{100 * (size / entropy - 1):+.2f}%", "", ""] for name, size in made.items()]


def _shapes(pressed: artifact.Pressed) -> dict[str, tuple[int, ...]]:
    named = dict(pressed.model().named_parameters())
    return {name: tuple(artifact.matrices(named[name]).shape) for name, *_ in pressed.header["quantized"]}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="keep what is trained here, and go on from it")
    options.add_argument("--tokens", type=int, default=1_800_000)
    options.add_argument("--figure", type=Path, help="draw bytes against bits per byte")
    asked = options.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="compress-"))
    config, results = prepare(folder, 20_000 if asked.quick else asked.tokens)
    spec, stage = config.stage("golf", "main"), results.stage("golf", "main")
    shards, scored = results.shards("pydocs-2k"), 20_000 if asked.quick else 200_000

    def bpb(model: Model) -> float:
        tokens_N, _ = validation_stream(shards, scored, model.tokens)
        return score(model, tokens_N, seq_len=spec.window, overlap=spec.evaluation.overlap).bpb

    whole = bpb(Checkpoint.at(stage.receipt).model())
    rows, figures, points = [], {"model": {"bpb": whole}}, {}
    ways = [*WAYS, ("found, for 700,000", {"cap": 700_000})] if not asked.quick else WAYS[2:4]
    for number, (label, changes) in enumerate(ways):
        output, began = folder / f"pressed-{number}", time.perf_counter()
        settings = CompressConfig(**{"cap": PLENTY, **changes})
        told = press(stage.receipt, spec, settings, shards, output).artifact
        seconds, began = time.perf_counter() - began, time.perf_counter()
        model = artifact.read(output / "model.spider").model()
        decoded, lost = time.perf_counter() - began, bpb(model) - whole
        matrices = [one for one in told.matrices.values() if one.error is not None and one.error_nearest]
        ratios = [one.error / one.error_nearest for one in matrices]
        errors = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        coded = sum(told.parts[part] for part in ("stream", "tables", "steps"))
        rows.append([label, f"{told.bytes:,}", f"{lost:+.4f}", errors, f"{told.clip:.2f}"])
        figures[label] = {
            **told.model_dump(include={"bytes", "total_bytes", "code_bytes", "clip"}), "lost": lost,
            "coded": coded, "ratios": ratios, "seconds": seconds, "decoded_seconds": decoded,
        }  # fmt: skip
        if lost < 0.5:  # what loses more is in the table
            points.setdefault(label.partition(",")[0], []).append((told.bytes, whole + lost))
        print(f"{label}: {told.bytes:,} bytes, {lost:+.4f}, pressed in {seconds:.1f} s", flush=True)
    rows += coders(folder / "pressed-0" if asked.quick else folder / "pressed-2")
    if asked.figure:
        draw(points, whole, asked.figure)
    title = f"golf-tiny, {whole:.4f} bits per byte of {scored:,} held-out bytes before it is pressed"
    columns = ["how", "bytes", "lost", "error of GPTQ / nearest", "clip"]
    report(title, columns, rows, figures, asked, ["torch"])


def draw(points: dict[str, list[tuple[int, float]]], whole: float, path: Path) -> None:
    """Bytes of the file against its bits per byte, a line a method."""
    series = [
        Series(name, *zip(*sorted(own), strict=True), colour=number, style="dots", marker=MARKERS[number])
        for number, (name, own) in enumerate(points.items())
    ]
    x, y = Axis("bytes of the file", bytes_label, margin=0.05), Axis("bits per byte", bits_label, margin=0.1)
    before = Level("as trained", whole)
    picture(path, [(1, [Chart("What pressing costs", x, y, series, levels=[before], far_levels=True)])])


if __name__ == "__main__":
    main()
