"""Compare the records of a score with each other: receipts, manifests, evaluation, and an exported copy.

`spider.verify.digests` compares files with the records of jobs. Somebody who edits both leaves two records
that name different digests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, CompressedReceipt, Manifest, Origin, Receipt
from spider.data.shards import load_metadata
from spider.model.interface import model_tensors, weights_digest
from spider.provenance.made import relative
from spider.training.stage import data_digest
from spider.verify import digests
from spider.verify.claim import Claim, Finding

#: A file, what a record in it says, the value there, the value expected, and what that is of.
_Pair = tuple[Path, str, object, object, str]


def check(claim: Claim, quick: bool, exported: Path | None = None) -> Finding:
    """Return the finding of `spider.verify.digests`, with records that contradict each other.

    ``exported`` is a copy of the model outside of its stage: an exported folder, or a compressed model.
    """
    found, wrong = digests.check(claim, quick), []
    try:
        for path, what, value, expected, of in (*_stages(claim), *_score(claim, exported)):
            if value != expected:
                name = relative(claim.results.root, path)
                wrong.append(f"{name}: {what} is {value}, that of {of} is {expected}")
    except ValueError as error:  # a record that is missing, edited, or of another version
        wrong += str(error).splitlines()
    if not wrong:
        return found
    reason = found.reason if found.status == "failed" else wrong[0]
    return Finding("failed", reason, [*wrong, *found.details])


def _stages(claim: Claim) -> Iterator[_Pair]:
    """Yield what the receipts of stages and other records name alike."""
    before = None
    for spec in claim.specs:
        folder, data = claim.results.stage(spec.run, spec.stage), claim.results.shards(spec.data)
        receipt = Receipt.of_stage(folder.receipt, spec)
        if folder.origin.is_file():
            named = Origin.read(folder.origin).identity
            yield folder.receipt, "its identity", receipt.identity, named, "origin.json"
        if spec.stream or all((one / "metadata.json").is_file() for one in spec.folders(data).values()):
            now = data_digest(spec, data)
            yield folder.receipt, "the digest of its data", receipt.data_digest, now, "metadata.json"
        path = folder.path / receipt.checkpoint
        if path.is_dir():
            manifest = Manifest.read(path / MANIFEST)
            for name, value in Receipt.of(manifest, receipt.checkpoint):
                yield folder.receipt, name, getattr(receipt, name), value, f"the manifest in {path.name}"
            if before and manifest.parent_weights:
                of = f"the receipt of {before.stage}"
                yield path, "the digest of its first weights", manifest.parent_weights, before.weights, of
        before = receipt


def _score(claim: Claim, exported: Path | None) -> Iterator[_Pair]:
    """Yield what an evaluation, its model and its text name alike."""
    path, scored, receipt = claim.folder.evaluation, claim.evaluation, Receipt.read(claim.folder.receipt)
    weights = receipt.averaged_weights or receipt.weights
    yield path, "the digest of its weights", scored.weights, weights, "the receipt"
    yield path, "averaged", scored.averaged, bool(receipt.averaged_weights), "the receipt"
    yield path, "its checkpoint", scored.checkpoint, receipt.checkpoint, "the receipt"
    yield path, "its dataset", scored.data, claim.held_out, "the configuration"
    if (data := claim.results.shards(claim.held_out) / "metadata.json").is_file():
        digest = load_metadata(data.parent).digest
        yield path, "the digest of its data", scored.data_digest, digest, "metadata.json"
    if claim.compressed:
        named = CompressedReceipt.read(claim.folder.receipt)
        for name in ("run", "stage", "identity", "global_step", "data_digest"):
            yield claim.folder.receipt, name, getattr(named, name), getattr(claim.receipt, name), "train.json"
    if exported:
        found = weights_digest(model_tensors(Checkpoint.at(exported).model()))
        yield exported, "the digest of its weights", found, weights, "the scored model"
