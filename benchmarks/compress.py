"""Measure what compressing a model costs: bits per byte lost and bytes, by method, bits and clip.

The golf preset's model is trained on ``--tokens`` of the default run's text and compressed in many ways. Each
file is read back and scored on the same held-out bytes as the model. One row rounds the matrices as the
original does: to the nearest, at a clip of 2.5 deviations. The table also has the error of GPTQ over that of
rounding, as the median and range of all matrices.

    python benchmarks/compress.py [--quick] [--json FILE] [--folder FOLDER]

The trained model stays in ``--folder`` and is not trained again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from common import ROOT, parser, report, workflow

from spider.checkpoints.load import Checkpoint
from spider.compress import format
from spider.compress.pipeline import compress
from spider.config import CompressConfig, load_config
from spider.evaluation.bpb import score
from spider.evaluation.text import validation_stream
from spider.model.interface import Model
from spider.model.reading import Reading
from spider.results import Results

#: A cap that no file reaches.
PLENTY = 10**8
CLIP = 12.85
#: Label and settings of each way.
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("gptq, 7 bits", {"bits": 7, "clip": CLIP}),
    ("nearest, 7 bits", {"bits": 7, "clip": CLIP, "method": "nearest"}),
    ("gptq, 6 bits", {"bits": 6, "clip": CLIP}),
    ("nearest, 6 bits", {"bits": 6, "clip": CLIP, "method": "nearest"}),
    ("gptq, 5 bits", {"bits": 5, "clip": CLIP}),
    ("nearest, 5 bits", {"bits": 5, "clip": CLIP, "method": "nearest"}),
    ("gptq, 4 bits", {"bits": 4, "clip": CLIP}),
    ("nearest, 4 bits", {"bits": 4, "clip": CLIP, "method": "nearest"}),
    ("gptq, 6 bits, clip 8", {"clip": 8.0}),
    ("gptq, 6 bits, clip 20", {"clip": 20.0}),
    ("nearest, 6 bits, clip 2.5", {"method": "nearest", "clip": 2.5}),
]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="folder of the trained model, read again later")
    arguments.add_argument("--tokens", type=int, default=1_800_000, help="tokens to train on")
    options = arguments.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="compress-"))).resolve()
    results, scored = Results(folder / "results"), 20_000 if options.quick else 200_000
    raw = yaml.safe_load((ROOT / "presets/golf-cpu.yaml").read_text()) | {"tracking": {"enabled": False}}
    raw["runs"]["golf"]["stages"][0]["tokens"] = 20_000 if options.quick else options.tokens
    spec, stage = load_config(raw).stage("golf", "main"), results.stage("golf", "main")
    workflow(raw, results.root, stage.receipt)
    shards = results.shards(spec.data)

    def bpb(model: Model) -> float:
        tokens_N, _ = validation_stream(shards, scored, model.tokens)
        return score(model, tokens_N, Reading(spec.window, spec.evaluation.overlap)).bpb

    whole = bpb(Checkpoint.at(stage.receipt).model())
    rows, figures = [], {"model": {"bpb": whole}}
    ways = WAYS[2:4] if options.quick else [*WAYS, ("searched, for 700,000 bytes", {"cap": 700_000})]
    for number, (label, changes) in enumerate(ways):
        output, began = folder / f"compressed-{number}", time.perf_counter()
        settings = CompressConfig(**{"cap": PLENTY, **changes})
        record = compress(stage.receipt, spec, settings, shards, output).compressed
        seconds, began = time.perf_counter() - began, time.perf_counter()
        model = format.read(output / "model.spider").model()
        decoding = time.perf_counter() - began
        lost = bpb(model) - whole
        ratios = [
            matrix.error / matrix.error_nearest
            for matrix in record.matrices.values()
            if matrix.error is not None and matrix.error_nearest
        ]
        errors = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append([label, f"{record.bytes:,}", f"{lost:+.4f}", errors, f"{record.clip:.2f}"])
        figures[label] = {
            **record.model_dump(include={"bytes", "total_bytes", "code_bytes", "clip"}),
            "lost": lost,
            "ratios": ratios,
            "seconds": seconds,
            "decoded_seconds": decoding,
        }
        print(f"{label}: {record.bytes:,} bytes, {lost:+.4f}, in {seconds:.1f} s", flush=True)
    title = f"golf-tiny, {whole:.4f} bits per byte of {scored:,} held-out bytes before compression"
    columns = ["way", "bytes", "lost", "error of GPTQ / nearest", "clip"]
    report(title, columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
