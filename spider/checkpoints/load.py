"""Find and verify the checkpoint that a path names, and load its tensors or its model: `Checkpoint.at`.

A path names a checkpoint, an exported folder, a compressed model, a stage's folder (its newest good
checkpoint), or a stage's receipt. A file is hashed before it is opened for the first time, and its numbers
must be finite. So reading weights does not cost reading the state of the optimizer, twice as large.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from spider.checkpoints.parts import keys_of, rows_of
from spider.checkpoints.records import (
    COMPRESSED,
    INDEX,
    MANIFEST,
    NGRAM,
    Exported,
    Manifest,
    Receipt,
    read_manifest,
    steps,
)
from spider.common import files
from spider.common.errors import CheckpointError, reported
from spider.common.record import key_path
from spider.common.results import Results, StageFolder, root_of
from spider.common.sealed import SealedFile, damage
from spider.config import ConfigError, ModelConfig
from spider.config.model import family_block
from spider.model import build_model
from spider.model.interface import Model, model_tensors
from spider.model.reading import Scoring
from spider.processes.parallel import local_slice
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import TOKENIZER, read_tokens

if TYPE_CHECKING:
    from spider.checkpoints.compress.format import CompressedModel
    from spider.data.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: The prefix of the names of averaged weights.
AVERAGE = "ema."
_DIVERGED = "the training diverged; use an earlier checkpoint, or train again with a lower lr"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint or an exported folder. Each of its files is checked once, before it is read."""

    path: Path
    manifest: Manifest | Exported
    _checked: set[str] = field(init=False, compare=False, repr=False, default_factory=set)

    @classmethod
    def at(cls, path: Path, *, whole: bool = False) -> Checkpoint:
        """Return the checkpoint that a path names, after comparing the sizes of its files.

        Args:
            whole: check the contents of all files now. Without it, the newest good checkpoint of a stage's
                folder is the newest with good weights.

        Raises:
            CheckpointError: a checkpoint is missing, or some of its files differ. The message names them.
        """
        if path.is_file() and path.suffix == COMPRESSED:
            return cls._open(path)
        stage = StageFolder(path)
        if not path.is_file() and stage.receipt.is_file() and not steps(stage.checkpoints):
            path = stage.receipt
        if path.is_file():
            plain = files.read_json(path, Receipt.remedy(path)) if path.suffix == ".json" else None
            if not isinstance(plain, dict) or "checkpoint" not in plain:
                raise CheckpointError(
                    f"{path}: not a training receipt; give a checkpoint, a stage folder, or its train.json"
                )
            named = path.parent / Receipt.parse(plain, path).checkpoint
            if not named.exists():
                raise CheckpointError(
                    f"{named}: this checkpoint is gone, and {path} names it. Put it back, or delete "
                    f"{path} and run {files.snakemake(path)}, which makes both again"
                )
            path = named
        elif (root := stage.checkpoints).is_dir():
            good, _ = cls.newest_good(root, whole=whole)
            if good is None:
                problem = f"{stage.receipt}: no usable checkpoint is left"
                raise CheckpointError(f"{problem}; {Receipt.remedy(stage.receipt)}")
            return good
        elif not Exported.lies_in(path) and not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path}: neither a checkpoint, nor a stage folder, nor an exported folder")
        return cls._open(path).check(None if whole else ())

    @classmethod
    def newest_good(cls, root: Path, *, whole: bool = True) -> tuple[Checkpoint | None, list[Path]]:
        """Return the newest checkpoint below ``root`` that verifies, and the newer ones that do not.

        Log a warning for each of those. Without ``whole`` only files of weights are checked.
        """
        bad: list[Path] = []
        for path in reversed(steps(root)):
            try:
                found = cls._open(path)
                weights = (file for name, file in found.file_of.items() if not name.startswith("optimizer."))
                return found.check(None if whole else weights), bad
            except CheckpointError as error:
                log.warning("damaged checkpoint, trying the one before it: %s", error)
                bad.append(path)
        return None, bad

    @classmethod
    def _open(cls, path: Path) -> Checkpoint:
        if path.suffix == COMPRESSED:
            return CompressedCheckpoint.open(path)
        found = cls(path, read_manifest(path))
        if damaged := found.problems(quick=True):
            raise CheckpointError("\n".join(damaged))
        return found

    def problems(self, names: Iterable[str] | None = None, *, quick: bool = False) -> list[str]:
        """Return what is wrong with its files of these names (default: all), one line each.

        A file may differ from the manifest or hold numbers that are not finite; ``quick`` compares only the
        sizes.
        """
        listed = self.manifest.files
        if names is not None:
            listed = {name: listed[name] for name in names}
        found = damage(self.path, listed, quick=quick)
        for name in () if quick or found else listed:
            if name.endswith(".safetensors"):
                with safe_open(self.path / name, "pt") as file:
                    if wrong := not_finite((one, file.get_tensor(one)) for one in file.keys()):  # noqa: SIM118
                        found.append(f"{self.path / name}: not finite: {first_three(wrong)}; {_DIVERGED}")
        return found

    def check(self, names: Iterable[str] | None = None) -> Self:
        """Check the contents of files (default: all) that were not checked yet.

        Raises:
            CheckpointError: has a line for each of the `problems`.
        """
        left = {*(self.manifest.files if names is None else names)} - self._checked
        if left and (problems := self.problems(sorted(left))):
            raise CheckpointError("\n".join(problems))
        self._checked.update(left)
        return self

    @cached_property
    def file_of(self) -> dict[str, str]:
        """Return the file of each tensor, or of each slice of one (`spider.checkpoints.parts`)."""
        listed = self.manifest.files
        if INDEX in listed:
            self.check([INDEX])
            named: dict[str, str] = files.read_json(self.path / INDEX)["weight_map"]
            if not listed.keys() >= {*named.values()}:
                raise CheckpointError(f"{self.path / INDEX}: names a file that the manifest does not list")
            return named
        file_of: dict[str, str] = {}
        for name in listed:
            if name.endswith(".safetensors"):
                with safe_open(self.check([name]).path / name, "pt") as file:
                    file_of |= dict.fromkeys(file.keys(), name)
        return file_of

    @cached_property
    def keys_of(self) -> dict[str, list[str]]:
        """Return the keys of each tensor in `file_of`."""
        return keys_of(self.file_of)

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
    def reading(self) -> Scoring:
        """Return how the evaluation of its stage reads a text, in windows that overlap by half."""
        if not isinstance(self.manifest, Manifest):
            autocast = self.manifest.precision == "bf16"
            return Scoring(self.manifest.window, n_loops=self.manifest.n_loops, autocast=autocast)
        stage = self.manifest.spec["settings"]
        evaluation = self.manifest.spec["evaluation"]
        return Scoring(
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
        self.check([TOKENIZER])
        try:
            return read_tokens(self.path / TOKENIZER)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    @property
    def tokenizer(self) -> bytes | None:
        """Return the content of its ``tokenizer.json``, or None if the vocabulary is bytes."""
        if TOKENIZER not in self.manifest.files:
            return None
        return (self.check([TOKENIZER]).path / TOKENIZER).read_bytes()

    def model(self, device: str | torch.device = "cpu") -> Model:
        """Return the model in evaluation mode, with averaged weights if there are any.

        Raises:
            CheckpointError: as `load_into`, or the n-gram index that the model reads is missing or another.
        """
        config, tokens = self.config, self.tokens
        with reported(f"{self.path}: the model that it describes cannot be made", CheckpointError):
            model = build_model(config, tokens).to(device)
        self.load_into(model_tensors(model))
        if isinstance(self.manifest, Manifest) and self.manifest.averaged_weights:
            averaged = {AVERAGE + name: p.detach() for name, p in model.named_parameters()}
            self._copy_into(averaged)
        model.lookup = self._lookup(model)
        model.window = self.manifest.window
        return model.eval()

    def _lookup(self, model: Model) -> NgramLookup | None:
        """Return the lookup in the n-gram index of the model, or None for a model that reads no index."""
        if (config := self.config.ngram) is None:
            return None
        from spider.data.ngram.lookup import NgramLookup
        from spider.data.ngram.store import COPY_AGAIN

        try:
            if self.exported:
                folder = self.path / NGRAM
                remedy = COPY_AGAIN
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
        saved = self.keys_of
        wrong = [f"it has no {name}" for name in tensors if name not in saved]
        wrong += [f"this model has no {n}" for n in saved if n.startswith(prefix) and n not in tensors]
        for file, keys in self._opened(tensors.keys() & saved.keys()):
            for key in keys:
                name, _ = rows_of(key)
                _, rows = rows_of(saved[name][-1])
                shape, expected = file.get_slice(key).get_shape(), list(tensors[name].shape)
                if rows:
                    shape[0] = rows[1]
                if shape != expected and key == saved[name][0]:
                    wrong.append(f"{name} has shape {shape}, and {expected} in this model")
        if wrong:
            raise CheckpointError(
                f"{self.path}: a checkpoint of another architecture: {first_three(sorted(wrong))}"
            )
        self._copy_into(tensors)

    def holds_optimizer(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether it has the state of the same optimizer, by the names of its tensors."""
        wanted = {name for name in tensors if name.startswith("optimizer.")}
        return wanted == {name for name in self.keys_of if name.startswith("optimizer.")}

    def _opened(self, names: Collection[str]) -> Iterator[tuple[Any, list[str]]]:
        """Check and open each file that holds some of these tensors; yield it with their keys in it."""
        held: dict[str, list[str]] = {}
        for key in (key for name in names for key in self.keys_of[name]):
            held.setdefault(self.file_of[key], []).append(key)
        for name, keys in sorted(held.items()):
            with safe_open(self.check([name]).path / name, "pt") as file:
                yield file, keys

    def _copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names; of a sharded tensor, the part that this process holds."""
        for file, keys in self._opened(tensors.keys()):
            for key in keys:
                name, rows = rows_of(key)
                part, where = local_slice(tensors[name])
                if not part.numel():  # a tensor of few rows leaves some processes empty
                    continue
                if rows is None:
                    part.copy_(file.get_slice(key)[where] if where else file.get_tensor(key))
                    continue
                first = where[0].start if where else 0
                begin, end = max(rows[0], first), min(rows[1], first + len(part))
                if begin < end:
                    part[begin - first : end - first] = file.get_slice(key)[begin - rows[0] : end - rows[0]]


@dataclass(frozen=True)
class CompressedCheckpoint(Checkpoint):
    """A compressed model, with the interface of a checkpoint."""

    compressed: CompressedModel

    @classmethod
    def open(cls, path: Path) -> CompressedCheckpoint:
        """Read the file; raise `CheckpointError` as `spider.checkpoints.compress.format.read` does."""
        from spider.checkpoints.compress.format import read

        compressed = read(path)
        fields = {name: compressed.header.get(name) for name in Exported.model_fields}
        fields["format"] = Exported.FORMAT
        fields["step"] = fields["global_step"]
        fields["best_loss"] = None
        fields["files"] = {path.name: SealedFile.of(path)}
        opened = cls(path, Exported.model_validate(fields), compressed)
        opened._checked.add(path.name)
        return opened

    @property
    def tokens(self) -> Tokens:
        return self.compressed.tokens

    @property
    def tokenizer(self) -> bytes | None:
        return self.compressed.tokenizer

    def model(self, device: str | torch.device = "cpu") -> Model:
        return self.compressed.model(device)

    @property
    def file_of(self) -> dict[str, str]:  # type: ignore[override]
        raise CheckpointError(f"{self.path}: a compressed model, from which training cannot continue")


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity."""
    floating = ((name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel())
    # `aminmax` propagates NaN, and is many times as fast as `torch.isfinite`.
    return [name for name, tensor in floating if not all(map(math.isfinite, tensor.aminmax()))]


def first_three(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if names[3:] else "")
