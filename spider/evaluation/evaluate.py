"""One stage's last checkpoint, measured: bits per byte, compressors on the same text, a sample, figures.

The text is the beginning of the validation split, at most ``max_bytes`` of it; the very array that the model
is scored on goes to the compressors. What was measured on what is written beside the figures (data digest,
hash of the text, window, overlap, loops, weights digest), so that two evaluations can be told comparable or
not. Where the stage averaged its weights, the average is what is measured (``averaged``), and the digest its.

The pass that scores also fills the histograms of what happened inside (`spider.evaluation.inside`). The curve
over loops reads a shorter beginning of the text once for each number of loops: compare its figures with each
other, not with those of the whole text.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spider import files
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation import compressors
from spider.evaluation.boundaries import Patch, caption, cut
from spider.evaluation.bpb import clip_stream, score
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.inside import Inside, loops_curve
from spider.model import choose_kernels
from spider.report.curves import stage_curve
from spider.report.inside_plots import plot_inside, plot_loops
from spider.report.patch_views import plot_boundaries, write_page
from spider.report.plots import Curve, plot_loss
from spider.results import StageFolder
from spider.vocab import BOS

log = logging.getLogger(__name__)

FORMAT = 1

#: What an evaluation leaves in its folder, `evaluation.json` last.
OUTPUTS = (
    "loss.png",
    "loops.png",
    "inside.png",
    "boundaries.png",
    "boundaries.html",
    "sample.txt",
    "evaluation.json",
)
#: Of the text, shown with its patches coloured.
_SHOWN_BYTES = 1500


def evaluate(
    receipt: Path, spec: StageSpec, data: Path, output: Path, *, device: str | None = None
) -> dict[str, Any]:
    """Measure the checkpoint that a receipt names; write `OUTPUTS`.

    Args:
        receipt: the stage's train.json.
        spec: the stage; only ``evaluation``, ``settings`` (window and loops where evaluation does not say;
            loops trained with), ``kernels`` and ``seed`` (of the sample) are read. The model's own
            configuration is in the checkpoint.
        data: shards folder of ``spec.evaluation.data``.
        output: folder to write into; evaluation.json comes last.
        device: where to run (default: the GPU where there is one).

    Returns:
        what evaluation.json holds.

    Raises:
        ValueError: a receipt of another stage or version, a missing or damaged checkpoint, no validation
            text, or a model whose loss is not finite.
    """
    trained = Receipt.read(receipt)
    if (trained.run, trained.stage) != (spec.run, spec.stage):
        raise ValueError(
            f"{receipt}: is the receipt of {trained.run}/{trained.stage}, not of {spec.run}/{spec.stage}"
        )
    asked = spec.evaluation
    tokens_N, data_digest = validation_stream(data, asked.max_bytes)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    model = Checkpoint.at(receipt).model(device)
    config = model.config
    seq_len, n_loops = spec.window, asked.n_loops or spec.loops
    # A model trained in low precision is judged in the precision it will be used in.
    autocast = trained.precision in ("bf16", "fp8")
    text = compressors.text_bytes(tokens_N)
    log.info("scoring %s bytes with windows of %d on %s", f"{len(text):,}", seq_len, device)
    reading: dict[str, Any] = {
        "seq_len": seq_len,
        "overlap": asked.overlap,
        "batch": asked.batch,
        "autocast": autocast,
    }
    inside = Inside(patched=config.boundary.kind != "none")
    result = score(model, tokens_N, n_loops=n_loops, observe=inside, **reading)
    loops = None
    if asked.loops_bytes:
        begin_N = clip_stream(tokens_N, asked.loops_bytes)
        curve = loops_curve(model, begin_N, 2 * spec.loops, **reading)
        loops = {"bytes": int(np.count_nonzero(begin_N < 256)), "trained": spec.loops, "bpb": curve}
    patches = cut(model, clip_stream(tokens_N, _SHOWN_BYTES), **reading)
    written = generate(
        model,
        asked.prompt,
        max_bytes=asked.sample_bytes,
        temperature=asked.temperature,
        seed=spec.seed,
        n_loops=n_loops,
        context=seq_len,
    )
    sample = "".join(stream_text(written))
    found = {
        "format": FORMAT,
        "run": spec.run,
        "stage": spec.stage,
        "index": spec.index,
        "bpb": result.bpb,
        "bpb_strict": result.bpb_strict,
        "bytes": result.counts["byte"],
        "documents": int(np.count_nonzero(tokens_N == BOS)),
        "seconds": result.seconds,
        "bytes_per_second": result.bytes_per_second,
        "nats": result.nats,
        "targets": result.counts,
        "compressors": compressors.bits_per_byte(tokens_N),
        "compressor_settings": compressors.SETTINGS,
        "data": asked.data,
        "data_digest": data_digest,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "seq_len": seq_len,
        "overlap": asked.overlap,
        "n_loops": n_loops,
        "device": device,
        "precision": "bf16" if autocast else "fp32",
        "checkpoint": trained.checkpoint,
        "averaged": bool(trained.averaged_weights),
        "weights": trained.averaged_weights or trained.weights,
        "global_step": trained.global_step,
        "training": {k: getattr(trained, k) for k in ("steps", "global_step", "tokens", "bytes", "seconds")},
        "model": result.metrics,
        "inside": inside.summary(),
        "loops": loops,
        "prompt": asked.prompt,
        "sample": sample,
    }
    files.write_text(output / "sample.txt", asked.prompt + sample + "\n")
    training = stage_curve(StageFolder(receipt.parent).metrics, trained.plain(), begin=0, held_out=result.bpb)
    _draw(found, training, patches, caption(config.boundary.kind, patches), output)
    files.write_json(output / "evaluation.json", found)
    return found


def _draw(
    found: dict[str, Any], training: Curve, patches: list[Patch], patches_caption: str, output: Path
) -> None:
    where = f"{found['run']}, stage {found['stage']}"
    plot_loss([training], output / "loss.png", where)
    plot_loops(found["loops"], output / "loops.png", f"{where}: what more loops are worth")
    plot_inside(found["inside"], output / "inside.png", f"{where}: inside the model")
    said = f"{where}: held-out text in patches", patches_caption
    plot_boundaries(patches, output / "boundaries.png", *said)
    write_page(patches, output / "boundaries.html", *said)


def validation_stream(data: Path, max_bytes: int) -> tuple[np.ndarray, str]:
    """The first ``max_bytes`` raw bytes of the validation split as a uint16 stream, and the dataset's digest.

    Raises:
        ValueError: the dataset has no validation text.
    """
    metadata = load_metadata(data)
    split = metadata.splits.get("validation")
    if split is None or not split.bytes:
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    shards = Shards(data, "validation")
    # A document of n bytes is n + 2 ids, and encoding drops empty ones: three ids a byte are always enough.
    count = min(shards.tokens, 3 * max_bytes)
    return clip_stream(np.asarray(shards.read(0, count)), max_bytes), metadata.digest
