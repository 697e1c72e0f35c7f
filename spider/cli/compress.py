"""`spider compress`: a stage's last checkpoint, pressed into one file."""

from __future__ import annotations

from pathlib import Path

from spider import tracking
from spider.cli.session import THREADS, Session, log, prepare_torch, verb
from spider.config import CompressConfig
from spider.results import ArtifactFolder


@verb("run", "stage")
@THREADS
def compress(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Press a stage's last checkpoint into model.spider, with the code it needs no larger than the cap.

    How is said by `compress` of RUN in the configuration; without, by its defaults.
    """
    from spider.compress.press import press

    results, spec = session.results, session.config.stage(run, stage)
    asked = session.config.runs[run].compress or CompressConfig()
    folder = results.stage(run, stage)
    made, data = ArtifactFolder(folder.artifact), results.shards(spec.data)
    inputs: list[Path] = [folder.receipt, data / "metadata.json"]
    outputs = [made.model, made.receipt]
    with session.tracked("compress", f"{run}/{stage}", asked.changed(), inputs, outputs) as job:
        prepare_torch(threads)
        told = press(folder.receipt, spec, asked, data, made.path)
        job.metric("bytes", told.artifact.total_bytes)
        job.artifact(made.receipt)
        tracking.log_checkpoint(results.root, run, stage, told, made)
    one = told.artifact
    sizes = (f"{size:,}" for size in (one.bytes, one.code_bytes, one.total_bytes, one.cap))
    log.info("%s: %s bytes and %s of code, %s of %s; clip %.3g", made.model, *sizes, one.clip)
