"""Check the chain of digests from raw files to evaluations, link by link.

    raw file (sha256) -> shard (sha256) -> dataset (digest) -> stage spec (digest) -> checkpoint (digest)

Each job records the digest of what it reads. A link is intact if this is still the digest of the file. The
dataset in a stage's manifest is compared with metadata.json, and the stage's parent weights with the stage
before. An evaluation's weights are compared with the receipt, and its dataset with metadata.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spider.common.files import digest
from spider.common.results import Results
from spider.config.data import recorded_source
from spider.config.spec import sources_of
from spider.data.shards import Metadata, Shard
from spider.report.stages import StageRecord


class Link(NamedTuple):
    """One result that was made from others, by digest."""

    kind: str
    """``dataset``, ``stage``, ``checkpoint`` or ``evaluation``."""
    name: str
    digest: str
    made_from: str
    problem: str
    """Reason why the link is broken; empty for an intact one."""


class DatasetRecord(NamedTuple):
    """A dataset, from its metadata.json."""

    name: str
    digest: str | None
    """None if metadata.json is missing."""
    made_from: str
    raw: Sequence[dict[str, Any]] = ()
    shards: Sequence[Shard] = ()


def read_datasets(results: Results, stages: list[StageRecord]) -> list[DatasetRecord]:
    """Return the datasets that the stages train on or are scored on."""
    streams: dict[str, dict[str, Any] | None] = {}
    for stage in stages:
        streams |= dict.fromkeys(sources_of(stage.spec), stage.spec.get("stream"))
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
    made_from = f"{len(raw)} raw file{'s' * (len(raw) != 1)} ({origin}), encoded into {len(shards)} shards"
    made_from += f"; {metadata.without}" if metadata.without else ""
    return DatasetRecord(name, metadata.digest, made_from, raw, shards)


def chain(stages: list[StageRecord], datasets: list[DatasetRecord]) -> Iterator[Link]:
    """Yield the links of datasets, then of each trained stage, its last checkpoint and its evaluation."""
    digests = {data.name: data.digest for data in datasets}
    for data in datasets:
        problem = "" if data.digest else "its metadata.json is missing"
        yield Link("dataset", data.name, data.digest or "?", data.made_from, problem)
    before = None
    for stage in stages:
        yield from _links(stage, before, digests)
        before = stage


def _links(stage: StageRecord, before: StageRecord | None, digests: dict[str, str | None]) -> Iterator[Link]:
    """Yield the links of a stage, its checkpoint and its evaluation."""
    manifest = stage.manifest
    receipt = stage.receipt
    evaluation = stage.evaluation
    if manifest is None:
        return
    data = stage.spec["data"]
    parent = manifest.parent_weights
    problems = []
    own = {name: digests.get(name) for name in sources_of(stage.spec)}
    now = own[data] if not isinstance(stage.spec["settings"].get("data"), dict) else digest(own)
    if now != manifest.data_digest:
        of = " and ".join(own)
        problems.append(f"dataset {of} was {manifest.data_digest}, now it is {now or 'missing'}")
    if before and before.receipt and parent != before.receipt.weights:
        problems.append(f"stage {before.name} now ends with weights {before.receipt.weights}")
    made_from = f"dataset {' and '.join(own)}, " + (f"weights {parent}" if parent else "new weights")
    yield Link("stage", stage.name, manifest.identity, made_from, "; ".join(problems))

    size = sum(one.size for one in manifest.files.values())
    step = f"step {manifest.global_step:,}"
    problem = ""
    if receipt is None:
        problem = "not the stage's last one"
    elif receipt.weights != manifest.weights:
        problem = f"the receipt names weights {receipt.weights}"
    made_from = f"stage {stage.name} at {step}: weights {manifest.weights}, {size / 1e6:,.1f} MB"
    yield Link("checkpoint", f"{stage.name}, {step}", manifest.digest, made_from, problem)

    if receipt is None or evaluation is None:
        return
    problems = []
    if evaluation.weights != (receipt.averaged_weights or receipt.weights):
        problems.append("the stage has other weights now")
    if digests.get(evaluation.data) != evaluation.data_digest:
        problems.append(f"dataset {evaluation.data} was {evaluation.data_digest} then")
    averaged = "averaged " if evaluation.averaged else ""
    made_from = f"{averaged}weights {evaluation.weights} on {evaluation.bytes:,} bytes of {evaluation.data}"
    text = f"text sha256 {evaluation.text_sha256}"
    yield Link("evaluation", evaluation.stage, text, made_from, "; ".join(problems))
