"""Check the chain of digests from raw files to checkpoints, link by link.

    raw file (sha256) -> shard (sha256) -> dataset (digest) -> stage spec (digest) -> checkpoint (digest)

Each job writes down the digest of what it reads. A link holds if this is still the digest of the file. The
receipt's dataset is compared with metadata.json, a stage's parent weights with the stage before, and an
evaluation's XX"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spider.config.data import recorded_source
from spider.data.metadata import Metadata, Shard
from spider.files import digest
from spider.report.stages import StageRecord
from spider.results import Results


class Link(NamedTuple):
    """One thing that was made from others, by digest."""

    kind: str
    """``dataset``, ``stage``, ``checkpoint`` or ``evaluation``."""
    name: str
    digest: str
    made_from: str
    problem: str
    """Why the link does not hold; empty: it does."""


class DatasetRecord(NamedTuple):
    """A dataset as its metadata.json has it; without a digest where that is not there."""

    name: str
    digest: str | None
    made_from: str
    raw: Sequence[dict[str, Any]] = ()
    shards: Sequence[Shard] = ()


def read_datasets(results: Results, stages: list[StageRecord]) -> list[DatasetRecord]:
    """The datasets that the stages train on or are scored on."""
    streams: dict[str, dict[str, Any] | None] = {}
    for stage in stages:
        streams[stage.spec["data"]] = stage.spec.get("stream")
        if stage.evaluation:
            streams.setdefault(stage.evaluation.data, None)
    return [_dataset(results, name, stream) for name, stream in streams.items()]


def _dataset(results: Results, name: str, stream: dict[str, Any] | None) -> DatasetRecord:
    if stream is not None:
        return DatasetRecord(name, digest(stream), recorded_source(stream["source"]).description)
    path = results.shards(name) / "metadata.json"
    if not path.exists():
        return DatasetRecord(name, None, f"not in this folder ({path} is missing)")
    metadata = Metadata.read(path)
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    raw = metadata.source.get("files", [])
    origin = recorded_source(metadata.source).description
    said = f"{len(raw)} raw file{'s' * (len(raw) != 1)} ({origin}), encoded into {len(shards)} shards"
    return DatasetRecord(name, metadata.digest, said, raw, shards)


def chain(stages: list[StageRecord], datasets: list[DatasetRecord]) -> Iterator[Link]:
    """Datasets, then each stage that was trained with its final checkpoint and its evaluation."""
    digests = {data.name: data.digest for data in datasets}
    for data in datasets:
        problem = "" if data.digest else "its metadata.json is not there"
        yield Link("dataset", data.name, data.digest or "?", data.made_from, problem)
    for before, stage in zip([None, *stages], stages, strict=False):
        yield from _links(stage, before, digests)


def _links(stage: StageRecord, before: StageRecord | None, digests: dict[str, str | None]) -> Iterator[Link]:
    """Yield the links of a stage, its checkpoint and its evaluation."""
    if not (manifest := stage.manifest):
        return
    receipt, measured = stage.receipt, stage.evaluation
    data, parent = stage.spec["data"], manifest.parent_weights
    made_from = f"dataset {data}, " + (f"weights {parent}" if parent else "new weights")
    problems = []
    if digests.get(data) != manifest.data_digest:
        now = digests.get(data) or "not there"
        problems.append(f"dataset {data} was {manifest.data_digest}, now it is {now}")
    if before and before.receipt and parent != before.receipt.weights:
        problems.append(f"stage {before.name} now ends with weights {before.receipt.weights}")
    yield Link("stage", stage.name, manifest.identity, made_from, "; ".join(problems))

    size, step = sum(one.size for one in manifest.files.values()), f"step {manifest.global_step:,}"
    made_from = f"stage {stage.name} at {step}: weights {manifest.weights}, {size / 1e6:,.1f} MB"
    problem = ""
    if receipt and receipt.weights != manifest.weights:
        problem = f"the receipt names weights {receipt.weights}"
    elif not receipt:
        problem = "not the stage's last one"
    yield Link("checkpoint", f"{stage.name}, {step}", manifest.digest, made_from, problem)

    if not (receipt and measured):
        return
    averaged = "averaged " if measured.averaged else ""
    made_from = f"{averaged}weights {measured.weights} on {measured.bytes:,} bytes of {measured.data}"
    problems = []
    if measured.weights != (receipt.averaged_weights or receipt.weights):
        problems.append("the stage has other weights now")
    if digests.get(measured.data) != measured.data_digest:
        problems.append(f"dataset {measured.data} was {measured.data_digest} then")
    yield Link(
        "evaluation", measured.stage, f"text sha256 {measured.text_sha256}", made_from, "; ".join(problems)
    )
