"""Measure what compressing a model costs: bits per byte lost and bytes, by method, bits and clip.

The golf preset's model is trained on ``--tokens`` of the default run's text and compressed in many ways. Each
file is read back and scored on the same held-out bytes as the model. The table also has the error of GPTQ
over that of rounding, as the median and range of all matrices.

The last rows are the whole recipe of the original script, which `original` repeats: integers of 6 bits with a
step for each row, embeddings in 8 bits, and zlib. It keeps tensors of at most 65,536 numbers in fp16, and so
all matrices of this small model. Another row therefore rounds every matrix.

    python benchmarks/compress.py [--quick] [--json FILE] [--folder FOLDER]

The trained model stays in ``--folder`` and is not trained again.
"""

from __future__ import annotations

import copy
import io
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from common import ROOT, parser, report, workflow

from spider.checkpoints.compress import format
from spider.checkpoints.compress.pipeline import compress
from spider.checkpoints.load import Checkpoint
from spider.common.results import Results
from spider.config import CompressConfig, load_config
from spider.evaluation.bpb import score
from spider.evaluation.text import validation_stream
from spider.model.interface import Model, model_tensors
from spider.model.reading import Scoring

#: A cap that no file reaches.
PLENTY = 10**8
CLIP = 12.85
#: Label and settings of each way.
WAYS: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"{method}, {bits} bits", {"bits": bits, "clip": CLIP, "method": method})
        for bits in (7, 6, 5, 4)
        for method in ("gptq", "nearest")
    ),
    ("gptq, 6 bits, clip 8", {"clip": 8.0}),
    ("gptq, 6 bits, clip 20", {"clip": 20.0}),
    ("nearest, 6 bits, clip 2.5", {"method": "nearest", "clip": 2.5}),
]
#: Deviations from the mean of a row beyond which the original script clips.
DEVIATIONS = 2.5
#: Most numbers of a tensor that the original script keeps in fp16; 0 for the row that rounds every matrix.
KEPT = {"the original's recipe": 65_536, "the original's recipe, all matrices": 0}


def rounded(w_OI: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers and the steps (fp16) of the rows of a matrix, rounded as the original script does.

    A row is clipped to its mean and 2.5 deviations to each side. Its step is its largest number after that,
    divided by the largest integer.
    """
    w_OI = w_OI.float()
    mean_O1, deviation_O1 = w_OI.mean(1, keepdim=True), w_OI.std(1, keepdim=True).clamp(min=1e-9)
    w_OI = w_OI.clamp(mean_O1 - DEVIATIONS * deviation_O1, mean_O1 + DEVIATIONS * deviation_O1)
    step_O1 = w_OI.abs().amax(1, keepdim=True).clamp(min=1e-9) / largest
    return (w_OI / step_O1).round().clamp(-largest, largest).to(torch.int8), step_O1.half()


def original(model: Model, kept: int) -> tuple[int, Model]:
    """Return the bytes of a model compressed by the original script's recipe, and the model read back.

    Args:
        kept: most numbers of a matrix that stays in fp16.
    """
    groups = model.parameter_groups()
    integers, steps, exact = {}, {}, {}
    for name, tensor in model_tensors(model, "").items():
        role = groups[name].role if name in groups else "vector"
        if role == "vector" or not tensor.is_floating_point():
            exact[name] = tensor
        elif role == "matrix" and tensor.numel() <= kept:
            exact[name] = tensor.half()
        else:
            integers[name], steps[name] = rounded(tensor, 127 if role == "table" else 31)
    file = io.BytesIO()
    torch.save({"integers": integers, "steps": steps, "exact": exact}, file)
    read = copy.deepcopy(model)
    tensors = model_tensors(read, "")
    values = exact | {name: q.float() * steps[name].float() for name, q in integers.items()}
    for name, value in values.items():
        tensors[name].copy_(value)
    return len(zlib.compress(file.getvalue(), level=9)), read


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
        return score(model, tokens_N, Scoring(spec.window, spec.evaluation.overlap)).bpb

    trained = Checkpoint.at(stage.receipt).model()
    whole = bpb(trained)
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
    for label, kept in KEPT.items():
        size, model = original(trained, kept)
        lost = bpb(model) - whole
        rows.append([label, f"{size:,}", f"{lost:+.4f}", "", f"{DEVIATIONS:.2f}"])
        figures[label] = {"bytes": size, "lost": lost}
        print(f"{label}: {size:,} bytes, {lost:+.4f}", flush=True)
    title = f"golf-tiny, {whole:.4f} bits per byte of {scored:,} held-out bytes before compression"
    columns = ["way", "bytes", "lost", "error of GPTQ / nearest", "clip"]
    report(title, columns, rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
