"""From a path to a verified checkpoint, and from that to tensors and a model: `Checkpoint.at`.

A path names a checkpoint, an exported folder, a stage's folder (its newest good checkpoint), or a stage's
receipt. Every file is hashed before anything of it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    TensorFile,
    read_manifest,
    steps,
)
from spider.config import ConfigError, ModelConfig
from spider.config.block import key_path
from spider.config.model import family_block
from spider.errors import CheckpointError
from spider.model import build_model
from spider.model.interface import Model, model_tensors
from spider.processes.parallel import own_part
from spider.results import Results, StageFolder, root_of
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import TOKENIZER, read_tokens

if TYPE_CHECKING:
    from spider.compress.format import CompressedModel
    from spider.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: Before the names of averaged weights.
AVERAGE = "ema."


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose contents were checked against its manifest."""

    path: Path
    manifest: Manifest | Exported

    @classmethod
    def at(cls, path: Path, *, quick: bool = False) -> Checkpoint:
        """Return the checkpoint that a path names, after checking each of its files once.

        Args:
            quick: check files by size only. In a stage's folder, the newest good checkpoint is found by the
                contents of its files in any case.

        Raises:
            CheckpointError: there is none, or some of its files differ; names them.
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
        """The newest checkpoint below ``root`` that verifies, and the newer ones that did not (warned of)."""
        bad: list[Path] = []
        for path in reversed(steps(root)):
            try:
                return cls._verified(path), bad
            except CheckpointError as error:
                log.warning("damaged checkpoint, looking for the one before: %s", error)
                bad.append(path)
        return None, bad

    @classmethod
    def _verified(cls, path: Path, quick: bool = False) -> Checkpoint:
        if path.suffix == COMPRESSED:
            return CompressedCheckpoint.open(path)
        manifest = read_manifest(path)
        if damaged := damage(path, manifest, quick=quick):
            raise CheckpointError("\n".join(damaged))
        return cls(path, manifest)

    @property
    def exported(self) -> bool:
        return isinstance(self.manifest, Exported)

    @property
    def training(self) -> Manifest:
        """What it says of the training that it was saved in, which an exported folder does not."""
        assert isinstance(self.manifest, Manifest), f"{self.path} holds weights only"
        return self.manifest

    @property
    def label(self) -> str:
        """Where it comes from, in a few words."""
        return f"{self.manifest.run}, stage {self.manifest.stage}"

    @property
    def window(self) -> int:
        """Ids to give the model at a time: the number it is evaluated with."""
        return self.manifest.window

    @property
    def weights(self) -> str:
        """Digest of what `model` gives."""
        averaged = self.manifest.averaged_weights if isinstance(self.manifest, Manifest) else None
        return averaged or self.manifest.weights

    @property
    def reading(self) -> dict[str, Any]:
        """With how many loops, and whether under bf16 autocast, its stage evaluates it; of an exported folder
        nobody knows: with the model's own, in fp32."""
        if not isinstance(self.manifest, Manifest):
            return {"n_loops": None, "autocast": False}
        stage, evaluation = self.manifest.spec["settings"], self.manifest.spec["evaluation"]
        n_loops = evaluation.get("n_loops") or stage.get("n_loops")
        return {"n_loops": n_loops, "autocast": self.manifest.precision.kind in ("bf16", "fp8")}

    @property
    def config(self) -> ModelConfig:
        """The architecture of the model in it; `CheckpointError` where this Spider does not know it."""
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
        """What the ids of its model stand for; `CheckpointError` where its tokenizer is damaged."""
        if TOKENIZER not in self.manifest.files:
            return BYTES
        try:
            return read_tokens(self.path / TOKENIZER)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def tokenizer(self) -> bytes | None:
        """Its ``tokenizer.json``, where it has one."""
        return (self.path / TOKENIZER).read_bytes() if TOKENIZER in self.manifest.files else None

    def model(self, device: str | torch.device = "cpu") -> Model:
        """The model in evaluation mode; of averaged weights, if there are any. Raises as `load_into`."""
        model = build_model(self.config, self.tokens).to(device)
        self.load_into(model_tensors(model))
        if isinstance(self.manifest, Manifest) and self.manifest.averaged_weights:
            averaged = {AVERAGE + name: p.detach() for name, p in model.named_parameters()}
            self._copy_into(averaged)
        model.lookup = self._lookup(model)
        return model.eval()

    def _lookup(self, model: Model) -> NgramLookup | None:
        """What the index of a model proposes; `CheckpointError` where that is not there, or another."""
        if (config := self.config.ngram) is None:
            return None
        from spider.ngram.lookup import NgramLookup

        again = "copy the exported folder whole, or export again"
        remedy = again if self.exported else "run the workflow again, or name its own results"
        try:
            folder = self._index(config.counted)
            return NgramLookup.of(folder, self.manifest.full_index, config, model.tokens, remedy)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the model reads an n-gram index. {error}") from None

    def _index(self, counted: str) -> Path:
        """Where the n-gram index of an exported folder lies, or of a checkpoint's results."""
        if isinstance(self.manifest, Exported):
            if not (folder := self.path / NGRAM).is_dir():
                raise ValueError(f"It is missing, {folder}: copy the exported folder whole, or export again")
            return folder
        if (root := root_of(self.path)) is None:
            raise ValueError(
                "It lies in no results folder, where that would be: export it there, and take the export"
            )
        return Results(root).ngram(self.manifest.spec["data"], counted)

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the saved tensors of these names into these tensors, in place; `CheckpointError` names those
        that differ, where it is of another architecture."""
        prefix = "" if self.exported else "model."
        if self.exported:
            tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
        saved = self.saved()
        wrong = [f"it has no {name}" for name in tensors if name not in saved]
        wrong += [f"this model has no {n}" for n in saved if n.startswith(prefix) and n not in tensors]
        for name in tensors.keys() & saved.keys():
            if (there := saved[name]) != (here := list(tensors[name].shape)):
                wrong.append(f"{name} is {there} there and {here} in this model")
        if wrong:
            raise CheckpointError(f"{self.path}: a checkpoint of another architecture: {some(sorted(wrong))}")
        self._copy_into(tensors)

    def holds_optimizer(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it has exactly this optimizer state (names; another optimizer has others)."""
        here, there = ({n for n in names if n.startswith("optimizer.")} for names in (tensors, self.saved()))
        return here == there

    def saved(self) -> dict[str, list[int]]:
        """The shapes of all tensors in it, by their names."""
        shapes: dict[str, list[int]] = {}
        for path in sorted(self.path.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return shapes

    def _copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """What is saved under these names, of tensors that are cut the part that this process holds."""
        for path in sorted(self.path.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in tensors.keys() & file.keys():
                    part, where = own_part(tensors[name])
                    if part.numel():  # of few rows, some processes have none
                        part.copy_(file.get_slice(name)[where] if where else file.get_tensor(name))


@dataclass(frozen=True)
class CompressedCheckpoint(Checkpoint):
    """A compressed model: what loads, evaluates, generates and verifies need not know which it is. Raises as
    `spider.compress.format.read` does."""

    compressed: CompressedModel

    @classmethod
    def open(cls, path: Path) -> CompressedCheckpoint:
        from spider.compress.format import read

        compressed = read(path)
        told = {name: compressed.header.get(name) for name in Exported.model_fields}
        told |= {"format": Exported.FORMAT, "step": told["global_step"], "best_loss": None}
        told["files"] = {path.name: TensorFile(size=path.stat().st_size, sha256=files.sha256(path))}
        return cls(path, Exported.model_validate(told), compressed)

    @property
    def tokens(self) -> Tokens:
        return self.compressed.tokens

    @property
    def tokenizer(self) -> bytes | None:
        return self.compressed.tokenizer

    def model(self, device: str | torch.device = "cpu") -> Model:
        return self.compressed.model(device)

    def saved(self) -> dict[str, list[int]]:
        raise CheckpointError(f"{self.path}: a compressed model, not one to go on training from")


def damage(path: Path, manifest: Manifest | Exported, *, quick: bool = False) -> list[str]:
    """Each file that is not as the manifest says, and how; ``quick`` compares sizes, not contents."""
    damaged = []
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            damaged.append(f"{file}: missing")
        elif (size := file.stat().st_size) != expected.size:
            damaged.append(f"{file}: {size:,} bytes, the manifest says {expected.size:,}")
        elif not quick and files.sha256(file) != expected.sha256:
            damaged.append(f"{file}: its contents do not match the manifest's SHA-256")
    return damaged


def some(names: list[str]) -> str:
    """The first three of many."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if names[3:] else "")
