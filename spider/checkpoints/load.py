"""Find and verify the checkpoint that a path names, and load its tensors or its model: `Checkpoint.at`.

A path names a checkpoint, an exported folder, a compressed model, a stage's folder (its newest good
checkpoint), or a stage's receipt. Every file is hashed before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from spider import files
from spider.checkpoints.records import (
    COMPRESSED,
    MANIFEST,
    NGRAM,
    Exported,
    Manifest,
    Receipt,
    read_manifest,
    steps,
)
from spider.config import ConfigError, ModelConfig
from spider.config.model import family_block
from spider.errors import CheckpointError
from spider.model import build_model
from spider.model.interface import Model, model_tensors
from spider.model.reading import Reading
from spider.processes.parallel import local_slice
from spider.record import key_path
from spider.results import Results, StageFolder, root_of
from spider.sealed import SealedFile, damage
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import TOKENIZER, read_tokens

if TYPE_CHECKING:
    from spider.compress.format import CompressedModel
    from spider.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: The prefix of the names of averaged weights.
AVERAGE = "ema."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint or an exported folder, whose files were checked against its manifest."""

    path: Path
    manifest: Manifest | Exported

    @classmethod
    def at(cls, path: Path, *, quick: bool = False) -> Checkpoint:
        """Return the checkpoint that a path names, after checking each of its files once.

        Args:
            quick: check only the sizes of files. The newest good checkpoint of a stage's folder is always
                found by the contents of its files.

        Raises:
            CheckpointError: a checkpoint is missing, or some of its files differ. The message names them.
        """
        if path.is_file() and path.suffix == COMPRESSED:
            return cls._verified(path)
        stage = StageFolder(path)
        if not path.is_file() and stage.receipt.is_file() and not steps(stage.checkpoints):
            path = stage.receipt
        if path.is_file():
            plain = files.read_json(path) if path.suffix == ".json" else None
            if not isinstance(plain, dict) or "checkpoint" not in plain:
                raise CheckpointError(
                    f"{path}: not a training receipt; give a checkpoint, a stage folder, or its train.json"
                )
            named = path.parent / Receipt.parse(plain, path).checkpoint
            if not named.exists():
                raise CheckpointError(
                    f"{named}: this checkpoint is gone, and {path} names it. Put it back, or "
                    f"delete {path} and run the workflow again, which makes it again"
                )
            path = named
        elif (root := stage.checkpoints).is_dir():
            good, _ = cls.newest_good(root)
            if good is None:
                raise CheckpointError(f"{root}: no usable checkpoint; train the stage first")
            return good
        elif not Exported.lies_in(path) and not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path}: neither a checkpoint, nor a stage folder, nor an exported folder")
        return cls._verified(path, quick)

    @classmethod
    def newest_good(cls, root: Path) -> tuple[Checkpoint | None, list[Path]]:
        """Return the newest checkpoint below ``root`` that verifies, and the newer ones that do not.

        Log a warning for each of those.
        """
        bad: list[Path] = []
        for path in reversed(steps(root)):
            try:
                return cls._verified(path), bad
            except CheckpointError as error:
                log.warning("damaged checkpoint, trying the one before it: %s", error)
                bad.append(path)
        return None, bad

    @classmethod
    def _verified(cls, path: Path, quick: bool = False) -> Checkpoint:
        if path.suffix == COMPRESSED:
            return CompressedCheckpoint.open(path)
        manifest = read_manifest(path)
        if damaged := damage(path, manifest.files, quick=quick):
            raise CheckpointError("\n".join(damaged))
        return cls(path, manifest)

    @property
    def exported(self) -> bool:
        """Return whether this is an exported folder or a compressed model."""
        return isinstance(self.manifest, Exported)

    @property
    def training(self) -> Manifest:
        """Return the manifest of a checkpoint of a training; an exported folder has none."""
        assert isinstance(self.manifest, Manifest), f"{self.path} holds only weights"
        return self.manifest

    @property
    def label(self) -> str:
        """Return its run and stage for messages."""
        return f"{self.manifest.run}, stage {self.manifest.stage}"

    @property
    def weights(self) -> str:
        """Return the digest of the weights of `model`, which are the averaged ones if there are any."""
        averaged = self.manifest.averaged_weights if isinstance(self.manifest, Manifest) else None
        return averaged or self.manifest.weights

    @property
    def reading(self) -> Reading:
        """Return how the evaluation of its stage reads a text, in windows that overlap by half.

        An exported folder does not hold all of this: the model's own number of loops and fp32 apply.
        """
        if not isinstance(self.manifest, Manifest):
            return Reading(self.manifest.window)
        stage = self.manifest.spec["settings"]
        evaluation = self.manifest.spec["evaluation"]
        return Reading(
            self.manifest.window,
            n_loops=evaluation.get("n_loops") or stage.get("n_loops"),
            autocast=self.manifest.precision.kind in ("bf16", "fp8"),
        )

    @property
    def config(self) -> ModelConfig:
        """Return the architecture of its model.

        Raises:
            CheckpointError: this version of Spider lacks this architecture.
        """
        try:
            return family_block(self.manifest.model)
        except ConfigError as error:
            why = str(error)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{key_path(('model', *first['loc']))}: {first['msg']}"
            why = f"a checkpoint of another architecture or of another version of Spider ({what})"
        raise CheckpointError(f"{self.path}: {why}")

    @property
    def tokens(self) -> Tokens:
        """Return the vocabulary of its model.

        Raises:
            CheckpointError: its ``tokenizer.json`` is damaged.
        """
        if TOKENIZER not in self.manifest.files:
            return BYTES
        try:
            return read_tokens(self.path / TOKENIZER)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def tokenizer(self) -> bytes | None:
        """Return the content of its ``tokenizer.json``, or None if the vocabulary is bytes."""
        return (self.path / TOKENIZER).read_bytes() if TOKENIZER in self.manifest.files else None

    def model(self, device: str | torch.device = "cpu") -> Model:
        """Return the model in evaluation mode, with averaged weights if there are any.

        Raises:
            CheckpointError: as `load_into`, or the n-gram index that the model reads is missing or another.
        """
        model = build_model(self.config, self.tokens).to(device)
        self.load_into(model_tensors(model))
        if isinstance(self.manifest, Manifest) and self.manifest.averaged_weights:
            averaged = {AVERAGE + name: p.detach() for name, p in model.named_parameters()}
            self._copy_into(averaged)
        model.lookup = self._lookup(model)
        return model.eval()

    def _lookup(self, model: Model) -> NgramLookup | None:
        """Return the lookup in the n-gram index of the model, or None for a model that reads no index."""
        if (config := self.config.ngram) is None:
            return None
        from spider.ngram.lookup import NgramLookup

        try:
            if self.exported:
                folder = self.path / NGRAM
                remedy = "copy the exported folder whole, or export again"
                if not folder.is_dir():
                    raise ValueError(f"{folder}: missing; {remedy}")
            elif (root := root_of(self.path)) is not None:
                folder = Results(root).ngram(self.training.spec["data"], config.counted)
                remedy = "run the workflow again, or name its own results"
            else:
                raise ValueError(
                    "The checkpoint is not in a results folder, which holds the index: export it there, and "
                    "use the exported folder"
                )
            return NgramLookup.of(folder, self.manifest.full_index, config, model.tokens, remedy)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the model reads an n-gram index. {error}") from None

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the saved tensors into the given tensors of the same names, in place.

        Raises:
            CheckpointError: the checkpoint is of another architecture. The message names what differs.
        """
        prefix = "" if self.exported else "model."
        if self.exported:
            tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
        saved = self.saved()
        wrong = [f"it has no {name}" for name in tensors if name not in saved]
        wrong += [f"this model has no {n}" for n in saved if n.startswith(prefix) and n not in tensors]
        for name in tensors.keys() & saved.keys():
            expected = list(tensors[name].shape)
            if saved[name] != expected:
                wrong.append(f"{name} has shape {saved[name]}, and {expected} in this model")
        if wrong:
            raise CheckpointError(
                f"{self.path}: a checkpoint of another architecture: {first_three(sorted(wrong))}"
            )
        self._copy_into(tensors)

    def holds_optimizer(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether it has the state of the same optimizer, by the names of its tensors."""
        wanted = {name for name in tensors if name.startswith("optimizer.")}
        return wanted == {name for name in self.saved() if name.startswith("optimizer.")}

    def saved(self) -> dict[str, list[int]]:
        """Return the shapes of all its tensors, by their names."""
        shapes: dict[str, list[int]] = {}
        for path in sorted(self.path.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return shapes

    def _copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names; of a sharded tensor, the part that this process holds."""
        for path in sorted(self.path.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in tensors.keys() & file.keys():
                    part, where = local_slice(tensors[name])
                    if part.numel():  # a tensor of few rows leaves some processes empty
                        part.copy_(file.get_slice(name)[where] if where else file.get_tensor(name))


@dataclass(frozen=True)
class CompressedCheckpoint(Checkpoint):
    """A compressed model, with the interface of a checkpoint."""

    compressed: CompressedModel

    @classmethod
    def open(cls, path: Path) -> CompressedCheckpoint:
        """Read the file; raise `CheckpointError` as `spider.compress.format.read` does."""
        from spider.compress.format import read

        compressed = read(path)
        fields = {name: compressed.header.get(name) for name in Exported.model_fields}
        fields["format"] = Exported.FORMAT
        fields["step"] = fields["global_step"]
        fields["best_loss"] = None
        fields["files"] = {path.name: SealedFile.of(path)}
        return cls(path, Exported.model_validate(fields), compressed)

    @property
    def tokens(self) -> Tokens:
        return self.compressed.tokens

    @property
    def tokenizer(self) -> bytes | None:
        return self.compressed.tokenizer

    def model(self, device: str | torch.device = "cpu") -> Model:
        return self.compressed.model(device)

    def saved(self) -> dict[str, list[int]]:
        raise CheckpointError(f"{self.path}: a compressed model, from which training cannot continue")


def first_three(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if names[3:] else "")
