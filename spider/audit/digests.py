"""Hash every link from the raw files to a score again, and compare it with what the jobs recorded.

A link is broken if a file is not the one that a job read or made, or if two records name different digests.
The details say which link is broken, and which files depend on it. A file that is gone breaks nothing: raw
text may be deleted (``temp: true``), and so may checkpoints (``keep_last``).

Cost: reading all files twice. A quick check reads at most `QUICK_BYTES`, and leaves out larger files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from spider.audit.claim import Claim
from spider.audit.record import Finding
from spider.checkpoints.load import AVERAGE, Checkpoint
from spider.checkpoints.records import MANIFEST, CompressedReceipt, Manifest, Origin, Receipt
from spider.config import StageSpec
from spider.data.packing import Packing
from spider.data.shards import load_metadata, verify
from spider.evaluation.text import Text, validation_stream
from spider.files import sha256
from spider.model.interface import weights_digest
from spider.results import CompressedFolder
from spider.sealed import damage
from spider.tracking.records import File, file_digest, relative
from spider.training.stage import data_digest

#: Bytes that a quick check reads.
QUICK_BYTES = 500_000_000


def check(claim: Claim, quick: bool) -> Finding:
    """Hash every link from the raw files to the score of a claim."""
    links = _Links(claim, quick)
    for part in (links.jobs, links.datasets, links.stages, links.indexes, links.evaluation, links.exported):
        try:
            part()
        except ValueError as error:  # a record that is missing, edited, or of another version
            links.broken += str(error).splitlines()
    broken = list(dict.fromkeys(links.broken))
    notes = list(links.notes)
    if links.gone:
        notes.append(f"not here any more, so not hashed: {_some(links.gone)}")
    if links.left_out:
        notes.append(f"left out by the quick check: {_some(links.left_out)}")
    if broken:
        what = "a broken link" if len(broken) == 1 else f"{len(broken)} broken links, the first"
        reason = f"{what}: {broken[0].partition('; it decides')[0]}"
        return Finding(check="digests", status="failed", reason=reason, details=[*broken, *notes])
    missing = links.missing
    if not links.recorded:
        missing = f"no job recorded {claim.folder.evaluation}, so an edit of it cannot be found"
    if missing:
        return Finding(check="digests", status="skipped", reason=missing, details=notes)
    reason = f"{len(links.hashed):,} files are those that the jobs read and made"
    return Finding(check="digests", status="passed", reason=reason, details=notes)


def _some(names: dict[str, None]) -> str:
    first = list(names)[:5]
    return ", ".join(first) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


def _short(recorded: str | None) -> str:
    return recorded.rpartition(":")[2][:16] if recorded else "missing"


def saved_weights(folder: Path) -> tuple[str, str]:
    """Return the digests of the weights and of the averaged weights in a checkpoint or an exported folder."""
    tensors: dict[str, Tensor] = {}
    averaged: dict[str, Tensor] = {}
    exported = not (folder / MANIFEST).is_file()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if exported or name.startswith("model."):
                    tensors[f"model.{name}" if exported else name] = file.get_tensor(name)
                elif name.startswith(AVERAGE):
                    averaged[name.replace(AVERAGE, "model.", 1)] = file.get_tensor(name)
    return weights_digest(tensors), weights_digest({**tensors, **averaged})


class _Links:
    """The links of a claim, and what is wrong with them."""

    def __init__(self, claim: Claim, quick: bool) -> None:
        self.claim = claim
        self.root = claim.results.root
        self.left = QUICK_BYTES if quick else None
        self.recorded = False
        self.missing = ""
        self.broken: list[str] = []
        self.notes: list[str] = []
        self.gone: dict[str, None] = {}
        self.left_out: dict[str, None] = {}
        self.hashed: set[str] = set()
        self._users: dict[str, set[str]] = defaultdict(set)

    # ---------------------------------------------------------------------------------------- what jobs read

    def jobs(self) -> None:
        """Compare the inputs and outputs of all jobs that led to the score with what they recorded."""
        lineage = self.claim.lineage
        ends = [self.claim.folder.evaluation, self.claim.folder.receipt, *self._read()]
        self.recorded = lineage.of(ends[0]).job is not None
        seen: dict[tuple[str, str | None], str] = {}
        for path in dict.fromkeys(ends):
            end = lineage.of(path)
            if end.job is None and self._was_made(end.path):
                self._break(end.path, "no job wrote this file as it is now; it was edited or replaced")
            for one in [end, *lineage.ancestry(end)]:
                if one.job is None:
                    continue
                for file in one.job.inputs:
                    self._users[file.path].add(one.path)
                    seen.setdefault((file.path, file.digest), f"the one that `{one.job.name}` read")
                for file in one.job.outputs:
                    self._users[file.path] |= {one.path} - {file.path}
                    seen.setdefault((file.path, file.digest), f"the one that `{one.job.name}` wrote")
        for (name, recorded), what in seen.items():
            now = self._digest(self.root / name, recorded)
            if now not in (recorded, None):
                made = lineage.made(File(path=name, digest=now)).job
                later = f"; `{made.name}` has made it again since" if made else ""
                self._break(name, f"is not {what} ({_short(recorded)}, now {_short(now)}){later}")

    def _read(self) -> Iterator[Path]:
        """Yield what the stages read and wrote, also what the jobs of trainings do not record."""
        results = self.claim.results
        for name in dict.fromkeys([*self.claim.datasets, self.claim.held_out]):
            plans = {f"packed-{spec.settings.seq_len}.json" for spec in self.claim.specs}
            for path in (results.shards(name) / file for file in ("metadata.json", *sorted(plans))):
                if path.is_file():
                    yield path
        settings = self.claim.config.run(self.claim.run)
        if settings.model.ngram:
            counted = settings.model.ngram.counted
            folders = (results.ngram(settings.dataset, counted, text) for text in ("split", "full"))
            yield from (path for folder in folders if (path := folder / "index.json").is_file())
        yield from (results.stage(spec.run, spec.stage).receipt for spec in self.claim.specs)

    def _was_made(self, path: str) -> bool:
        return any(file.path == path for job in self.claim.lineage.jobs for file in job.outputs)

    def _digest(self, path: Path, recorded: str | None) -> str | None:
        """Return the digest of a file now; None if it is gone, and the recorded one if it is not hashed."""
        name = relative(self.root, path)
        if not path.exists():
            if recorded is not None:
                self.gone[name] = None
            return None
        if not self._affordable(path):
            return recorded
        self.hashed.add(name)
        return file_digest(path)

    def _affordable(self, *paths: Path) -> bool:
        """Return whether a quick check may read these files too."""
        size = sum(path.stat().st_size for path in paths if path.is_file())
        if self.left is not None and size > self.left:
            self.left_out |= dict.fromkeys(relative(self.root, path) for path in paths)
            return False
        self.left = None if self.left is None else self.left - size
        return True

    def _break(self, path: str, problem: str) -> None:
        """Add a broken link, with the files that depend on it."""
        found, waiting = dict[str, None](), [path]
        while waiting:
            for user in sorted(self._users[waiting.pop()] - found.keys()):
                found[user] = None
                waiting.append(user)
        self.broken.append(f"{path}: {problem}" + (f"; it decides {', '.join(found)}" if found else ""))

    def _equal(self, path: Path, what: str, value: object, expected: object, of: str) -> None:
        if value != expected:
            self._break(relative(self.root, path), f"{what} is {value}, that of {of} is {expected}")

    # ------------------------------------------------------------------------------------- what records name

    def datasets(self) -> None:
        """Compare shards with the descriptions of their datasets, and these with the raw files."""
        config, results = self.claim.config, self.claim.results
        for name in dict.fromkeys([*self.claim.datasets, self.claim.held_out]):
            folder = results.shards(name)
            if not (folder / "metadata.json").is_file():
                self.gone[relative(self.root, folder)] = None
                continue
            metadata = load_metadata(folder)
            shards = [folder / one.file for split in metadata.splits.values() for one in split.shards]
            try:
                verify(folder, full=self._affordable(*shards))
            except ValueError as error:
                for line in str(error).splitlines()[:-1]:
                    path, _, problem = line.partition(": ")
                    self._break(relative(self.root, Path(path)), problem)
            imported = config.dataset(name).source.TOKENS
            for one in metadata.source.get("files", []):
                raw = Path(one["name"]) if imported else results.raw(config.raw(name), one["part"])
                now = self._digest(raw, f"sha256:{one['sha256']}")
                if now not in (f"sha256:{one['sha256']}", None):
                    self._break(relative(self.root, raw), f"is not the raw file that {name} was made from")

    def stages(self) -> None:
        """Compare receipts with the checkpoints that they name, each with the stage before and its data."""
        receipts = [self._stage(spec) for spec in self.claim.specs]
        for (before, _), (after, manifest) in pairwise(receipts):
            if manifest and manifest.parent_weights is not None:
                path = self.claim.results.stage(after.run, after.stage).receipt
                of = f"the receipt of {before.stage}"
                self._equal(
                    path, "the digest of its first weights", manifest.parent_weights, before.weights, of
                )

    def _stage(self, spec: StageSpec) -> tuple[Receipt, Manifest | None]:
        folder = self.claim.results.stage(spec.run, spec.stage)
        receipt = Receipt.of_stage(folder.receipt, spec)
        if folder.origin.is_file():
            origin = Origin.read(folder.origin)
            self._equal(folder.receipt, "its identity", receipt.identity, origin.identity, "origin.json")
        if receipt.identity not in spec.identities:
            self.notes.append(f"{spec.run}/{spec.stage}: the configuration has changed since it was trained")
        data = self.claim.results.shards(spec.data)
        if spec.stream or all((one / "metadata.json").is_file() for one in spec.folders(data).values()):
            now = data_digest(spec, data)
            self._equal(folder.receipt, "the digest of its data", receipt.data_digest, now, "metadata.json")
        packing = (receipt.position or {}).get("packing")
        plan = data / f"packed-{spec.settings.seq_len}.json"
        if isinstance(packing, str) and not spec.mixed and plan.is_file():
            self._equal(folder.receipt, "its plan of rows", packing, Packing.read(plan).digest, plan.name)
        path = folder.path / receipt.checkpoint
        if not path.is_dir():
            self.gone[relative(self.root, path)] = None
            return receipt, None
        manifest = Manifest.read(path / MANIFEST)
        for name, value in Receipt.of(manifest, receipt.checkpoint):
            self._equal(folder.receipt, name, getattr(receipt, name), value, f"the manifest in {path.name}")
        self._weights(path, manifest)
        return receipt, manifest

    def _weights(self, path: Path, manifest: Manifest) -> None:
        """Compare the files of a checkpoint with its manifest, and digests of weights with its tensors."""
        name = relative(self.root, path)
        self._users[name].add(relative(self.root, path.parents[1] / "train.json"))
        hashed = self._affordable(*(path / file for file in manifest.files))
        damaged = damage(path, manifest.files, quick=not hashed)
        for line in damaged:
            self._break(name, line)
        if not damaged and hashed:
            weights, averaged = saved_weights(path)
            self._equal(path, "the digest of its weights", manifest.weights, weights, "its tensors")
            if manifest.averaged_weights:
                named = manifest.averaged_weights
                self._equal(path, "the digest of its average", named, averaged, "its tensors")

    def indexes(self) -> None:
        """Compare the n-gram indexes of the run with their descriptions, and with what the model names."""
        settings = self.claim.config.run(self.claim.run)
        if settings.model.ngram is None:
            return
        from spider.ngram.store import open_index
        from spider.ngram.store import verify as verify_index

        _, manifest = self._stage(self.claim.spec)
        for text, named in (("split", "ngram"), ("full", "full_index")):
            folder = self.claim.results.ngram(settings.dataset, settings.model.ngram.counted, text)
            if not folder.is_dir():
                self.gone[relative(self.root, folder)] = None
                continue
            hashed = self._affordable(*folder.glob("*"))
            described = verify_index(folder) if hashed else open_index(folder).description
            if manifest:
                self._equal(
                    folder, "its digest", described.digest, getattr(manifest, named), "the checkpoint"
                )

    def evaluation(self) -> None:
        """Compare the evaluation with the receipt, with the data, and with the text scored now."""
        claim, path, scored = self.claim, self.claim.folder.evaluation, self.claim.evaluation
        receipt = Receipt.read(claim.folder.receipt)
        if isinstance(claim.folder, CompressedFolder):
            self._compressed(claim.folder, CompressedReceipt.read(claim.folder.receipt))
        weights = receipt.averaged_weights or receipt.weights
        self._equal(path, "the digest of its weights", scored.weights, weights, "the receipt")
        self._equal(path, "averaged", scored.averaged, bool(receipt.averaged_weights), "the receipt")
        self._equal(path, "its checkpoint", scored.checkpoint, receipt.checkpoint, "the receipt")
        if scored.averaged:
            self.notes.append("the score is that of averaged weights, as the evaluation says")
        data = claim.results.shards(claim.held_out)
        if not (data / "metadata.json").is_file() or not (claim.folder.path / receipt.checkpoint).exists():
            self.missing = "the checkpoint or the data of the score is not here any more"
            return
        self._equal(path, "its dataset", scored.data, claim.held_out, "the configuration")
        digest = load_metadata(data).digest
        self._equal(path, "the digest of its data", scored.data_digest, digest, "metadata.json")
        settings = claim.spec.evaluation
        tokens = Checkpoint.at(claim.folder.receipt).tokens
        stream, _ = validation_stream(data, settings.max_bytes, tokens, settings.largest_group)
        text = Text.of(stream, tokens)
        held_out = f"the first {settings.max_bytes:,} bytes of {claim.held_out}"
        self._equal(path, "its number of bytes", scored.bytes, len(text), held_out)
        sha = hashlib.sha256(text.bytes_N.tobytes()).hexdigest()
        self._equal(path, "the SHA-256 of its text", scored.text_sha256, sha, held_out)

    def _compressed(self, folder: CompressedFolder, receipt: CompressedReceipt) -> None:
        """Compare a compressed model with its receipt and with the stage that it was made from."""
        for name in ("run", "stage", "identity", "global_step", "data_digest"):
            expected = getattr(self.claim.receipt, name)
            self._equal(folder.receipt, name, getattr(receipt, name), expected, "the stage's train.json")
        self._equal(
            folder.model, "its SHA-256", sha256(folder.model), receipt.compressed.sha256, "its receipt"
        )
        model = Checkpoint.at(folder.model)
        for name in ("run", "stage", "identity", "weights"):
            value = getattr(model.manifest, name)
            self._equal(folder.model, name, value, getattr(receipt, name), "compress.json")
        model.model()  # decodes the weights and compares them with their digest

    def exported(self) -> None:
        """Compare the weights of an exported folder, or of a copy of a compressed model, with the receipt."""
        if self.claim.exported is None:
            return
        copy = Checkpoint.at(self.claim.exported)
        receipt = Receipt.read(self.claim.folder.receipt)
        named = receipt.averaged_weights or receipt.weights
        found = copy.manifest.weights
        if self.claim.exported.is_dir():
            found, _ = saved_weights(self.claim.exported)
            if found != copy.manifest.weights:
                self.broken.append(f"{copy.path}: config.json names other weights than its tensors have")
        if found != named:
            other = f"has weights {found}, and the score is of {named}"
            self.broken.append(
                f"{copy.path}: was not exported from {receipt.run}/{receipt.stage}: it {other}"
            )
