"""From the digest of a raw file to that of a checkpoint: the links of the chain, and whether each holds.

    raw file (sha256) -> shard (sha256) -> dataset (digest) -> stage spec (digest) -> checkpoint (digest)

Each job has written down the digest of what it read. A link holds where that is the digest of what lies there
now: the receipt's dataset against metadata.json, a stage's parent weights against the stage before, an
evaluation's weights against the receipt. Contents are not hashed again; ``spider verify`` and ``spider
checkpoint verify`` do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spider.checkpoints.records import Manifest, Receipt
from spider.data.metadata import Metadata, Shard
from spider.evaluation.artifact import Evaluation
from spider.files import digest
from spider.report.stages import StageRecord
from spider.results import Results

#: Files of a dataset that a page lists; the rest are in its metadata.json.
LISTED = 24


@dataclass(frozen=True)
class Link:
    """One thing that was made from others, by digest."""

    kind: str
    """``dataset``, ``stage``, ``checkpoint`` or ``evaluation``."""
    name: str
    digest: str
    made_from: str
    """What it was made from, in words."""
    problem: str | None = None
    """Why the link does not hold; None: it does."""


@dataclass(frozen=True)
class DatasetRecord:
    """A dataset as its metadata.json has it."""

    name: str
    digest: str | None
    """None where it is not there."""
    made_from: str
    raw: Sequence[dict[str, Any]] = ()
    shards: Sequence[Shard] = ()
    left_out: int = 0
    """Files beyond the first `LISTED` of each kind."""


def read_datasets(results: Results, stages: list[StageRecord]) -> list[DatasetRecord]:
    """The datasets that the stages train on or are scored on."""
    specs: dict[str, dict[str, Any] | None] = {}
    for stage in stages:
        specs[stage.spec["data"]] = stage.spec.get("stream")
        if scored := stage.evaluation and stage.evaluation.data:
            specs.setdefault(scored, None)
    return [_dataset(results, name, stream) for name, stream in specs.items()]


def _dataset(results: Results, name: str, stream: dict[str, Any] | None) -> DatasetRecord:
    if stream is not None:
        source = stream["source"]
        origin = f"a stream of {source['repo']} at {source['revision']}, nothing of it is kept"
        return DatasetRecord(name, digest(stream), origin)
    path = results.shards(name) / "metadata.json"
    if not path.exists():
        return DatasetRecord(name, None, f"not in this folder ({path} is missing)")
    metadata = Metadata.read(path)
    source = metadata.source
    kinds = {
        "pydocs": "documentation of Python and of the installed packages",
        "local": "local files",
        "hub": f"{source.get('repo')} at {source.get('revision')}",
    }
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    raw = source.get("files", [])
    left_out = max(0, len(raw) - LISTED) + max(0, len(shards) - LISTED)
    origin = kinds.get(source["kind"], source["kind"])
    said = f"{len(raw)} raw file{'s' * (len(raw) != 1)} ({origin}), encoded into {len(shards)} shards"
    return DatasetRecord(name, metadata.digest, said, raw[:LISTED], shards[:LISTED], left_out)


def chain(stages: list[StageRecord], datasets: list[DatasetRecord]) -> list[Link]:
    """Datasets, then each stage that was trained with its final checkpoint and its evaluation."""
    digests = {data.name: data.digest for data in datasets}
    links = [
        Link("dataset", one.name, one.digest or "?", one.made_from,
             None if one.digest else "its metadata.json is not there")
        for one in datasets
    ]  # fmt: skip
    for before, stage in zip([None, *stages], stages, strict=False):
        if stage.manifest:
            links += [_stage_link(stage, stage.manifest, before, digests)]
            links += [_checkpoint_link(stage, stage.manifest)]
        if stage.manifest and stage.receipt and stage.evaluation:
            links.append(_evaluation_link(stage.receipt, stage.evaluation, digests))
    return links


def _stage_link(
    stage: StageRecord, manifest: Manifest, before: StageRecord | None, digests: dict[str, str | None]
) -> Link:
    data, parent = stage.spec["data"], manifest.parent_weights
    said = f"dataset {data}, " + (f"weights {parent}" if parent else "new weights")
    problems = []
    if digests.get(data) != manifest.data_digest:
        now = digests.get(data) or "not there"
        problems.append(f"dataset {data} was {manifest.data_digest}, now it is {now}")
    if before and before.receipt and parent != before.receipt.weights:
        problems.append(f"stage {before.name} now ends with weights {before.receipt.weights}")
    return Link("stage", stage.name, manifest.identity, said, "; ".join(problems) or None)


def _checkpoint_link(stage: StageRecord, manifest: Manifest) -> Link:
    size = sum(one.size for one in manifest.files.values())
    step = f"step {manifest.global_step:,}"
    said = f"stage {stage.name} at {step}: weights {manifest.weights}, {size / 1e6:,.1f} MB"
    problem = None
    if stage.receipt and stage.receipt.weights != manifest.weights:
        problem = f"the receipt names weights {stage.receipt.weights}"
    elif not stage.receipt:
        problem = "not the stage's last one"
    return Link("checkpoint", f"{stage.name}, {step}", manifest.digest, said, problem)


def _evaluation_link(receipt: Receipt, one: Evaluation, digests: dict[str, str | None]) -> Link:
    averaged = "averaged " if one.averaged else ""
    said = f"{averaged}weights {one.weights} on {one.bytes:,} bytes of {one.data}"
    problems = []
    if one.weights != (receipt.averaged_weights or receipt.weights):
        problems.append("the stage has other weights now")
    if digests.get(one.data) != one.data_digest:
        problems.append(f"dataset {one.data} was {one.data_digest} then")
    return Link("evaluation", one.stage, f"text sha256 {one.text_sha256}", said, "; ".join(problems) or None)
