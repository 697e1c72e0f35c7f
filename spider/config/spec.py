"""The resolved specification of one stage, which a training job reads, and the digests that identify it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from spider.config.block import ConfigError, identity
from spider.config.data import Dataset
from spider.config.run import Mixture, RunSettings, StageSettings, weights_of

#: Settings that cut a step into micro-batches, with their defaults.
CUT = {
    name: StageSettings.model_fields[name].default
    for name in ("micro_batch", "grad_accum", "windows_per_step")
}


class StageSpec(RunSettings):
    """All settings of one stage that a training job needs."""

    format: Literal[1] = 1
    run: str
    stage: str
    index: int
    data: str
    """Dataset, or the first one of a mixture."""
    stream: Dataset | None = None
    """The dataset itself if it is a stream. A stream does not have shards whose digest could identify it."""
    processes: int = 1
    """Processes that the workflow starts. A training by hand may start another number."""
    settings: StageSettings = StageSettings()

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide the weights and differ from the defaults, as plain JSON.

        The windows of a step decide, however it is cut into micro-batches, so it is whole here (`recut`).
        """
        return recut(self.recorded())

    def recorded(self) -> dict[str, Any]:
        """Return what `deciding` does, with the micro-batches of a step as the settings have them."""
        plain = self.changed(exclude={"evaluation", "format", "parallel", "processes", "graphs"})
        settings = self.settings.changed(exclude=set(StageSettings.BOOKKEEPING))
        return plain | {"settings": settings, "model": self.model.changed()}

    @classmethod
    def with_defaults(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Add to the fields that `deciding` returns the defaults that it leaves out.

        Fields that are not of this class stay as they are.

        Raises:
            ValidationError: a key is not of this version.
            ConfigError: the family of the model cannot be imported.
        """
        own = {name: value for name, value in fields.items() if name in cls.model_fields}
        others = {name: value for name, value in fields.items() if name not in own}
        return others | cls.model_validate(own).model_dump(mode="json")

    @property
    def identity(self) -> str:
        """Digest of `deciding`. Stages of equal identity may resume each other's checkpoints."""
        return identity(self.deciding())

    @property
    def identities(self) -> list[str]:
        """The `identity`, and then those that earlier versions gave to the other cuts of a step."""
        plain, windows = self.deciding(), self.windows_per_step
        return [identity(recut(plain, size)) for size in range(windows, 0, -1) if windows % size == 0]

    def shape_fields(self) -> dict[str, Any]:
        """Return the settings that decide the warm-up's measurements: matrix shapes and precisions."""
        chosen = self.changed(include={"precision", "tf32", "compile", "deterministic", "graphs", "kernels"})
        chosen["optimizer"] = self.optimizer.changed(include={"kind", "master_weights"})
        if narrow := sorted(name for name, one in self.optimizer.groups.items() if one.weights == "bf16"):
            chosen["optimizer"]["narrow"] = narrow
        batch: dict[str, Any] = {"seq_len": self.settings.seq_len, "n_loops": self.settings.n_loops}
        batch["micro_batch"] = self.micro_batch(self.processes)
        if self.settings.micro_batch == "auto":
            batch["fits"] = True  # the device decides
        batch |= self.settings.changed(include={"attend", "objective"})
        if self.settings.attend == "document":  # the data decides how many documents a row has
            batch["data"] = sorted(self.weights)
        return {"model": self.model.changed(), **chosen, **batch}

    @property
    def shape(self) -> str:
        """Digest of `shape_fields`. Stages of equal shape share a warm-up."""
        return identity(self.shape_fields())

    def compiled_on(self, device_type: str, kind: str) -> bool:
        """Return whether the model is compiled on a device in a precision (fp32, bf16, fp8).

        Without the setting ``compile`` this is so on a GPU, if the model can be compiled.
        """
        if self.compile is not None:
            return self.compile
        return device_type == "cuda" and not self.model.problems(kind, True)

    @property
    def weights(self) -> dict[str, float]:
        """Share of each dataset that this stage reads. A single dataset has the share 1."""
        return weights_of(self.settings.data or self.data)

    @property
    def mixed(self) -> bool:
        return isinstance(self.settings.data, Mixture)

    @property
    def mixture(self) -> Mixture:
        """Datasets of a stage that is `mixed`."""
        assert isinstance(self.settings.data, Mixture), "the stage is mixed"
        return self.settings.data

    def folders(self, data: Path) -> dict[str, Path]:
        """Return the folder of each dataset that this stage reads; ``data`` is that of the first one."""
        return {name: data.with_name(name) for name in self.weights} if self.mixed else {self.data: data}

    @property
    def loops(self) -> int:
        return self.settings.n_loops or self.model.loops

    @property
    def window(self) -> int:
        """Tokens in a window of evaluation and generation."""
        return self.evaluation.seq_len or self.settings.seq_len

    @property
    def windows_per_step(self) -> int:
        """Windows of an optimizer step, over all processes."""
        return windows_of(vars(self.settings))

    @property
    def tokens_per_step(self) -> int:
        return self.settings.seq_len * self.windows_per_step

    def micro_batch(self, processes: int) -> int:
        """Return the windows of one forward pass where this number of processes share a step.

        It is the largest number up to ``micro_batch`` that makes all passes equal, for ``auto`` all of them
        (`spider.training.fit` decides). With ``grad_accum`` a multiple of ``processes``, the passes are
        exactly those of one process.

        Raises:
            ConfigError: the processes cannot share the batch evenly. It names the nearest possible batch.
        """
        share, rest = divmod(self.windows_per_step, processes)
        if rest:
            windows = max(1, share + (2 * rest >= processes)) * processes
            micro_batch = largest_divisor(windows, self._most)
            counted = f"micro_batch x grad_accum = {self.windows_per_step} windows"
            nearest = f"micro_batch: {micro_batch}, grad_accum: {windows // micro_batch} ({windows} windows)"
            if self.settings.windows_per_step:
                counted, nearest = (
                    f"windows_per_step: {self.windows_per_step}",
                    f"windows_per_step: {windows}",
                )
            raise ConfigError(
                f"a step has {counted}, which {processes} processes cannot share evenly; the nearest batch "
                f"that they can share is {nearest}"
            )
        return largest_divisor(share, self._most)

    def cut(self, micro_batch: int) -> dict[str, int]:
        """Return the settings that cut a step into micro-batches of this many windows, which divides it."""
        passes = (
            {} if self.settings.windows_per_step else {"grad_accum": self.windows_per_step // micro_batch}
        )
        return {"micro_batch": micro_batch, **passes}

    @property
    def _most(self) -> int:
        """Windows of a forward pass at most."""
        micro_batch = self.settings.micro_batch
        return self.windows_per_step if micro_batch == "auto" else micro_batch


def windows_of(settings: Mapping[str, Any]) -> int:
    """Return the windows of an optimizer step from the settings of `CUT`."""
    windows: int | None = settings.get("windows_per_step")
    return windows or settings["micro_batch"] * settings["grad_accum"]


def recut(fields: Mapping[str, Any], micro_batch: int | None = None) -> dict[str, Any]:
    """Return fields of `StageSpec.deciding` with a step in micro-batches of a given size (None: in one)."""
    settings = {**CUT, **fields["settings"]}
    windows = windows_of(settings)
    settings["windows_per_step"] = None
    settings["micro_batch"] = micro_batch or windows
    settings["grad_accum"] = windows // settings["micro_batch"]
    kept = {name: value for name, value in settings.items() if name not in CUT or value != CUT[name]}
    return {**fields, "settings": kept}


def sources_of(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return `StageSpec.weights` of a spec that was read from JSON, also one of another version."""
    data = spec.get("settings", {}).get("data")
    return weights_of(Mixture.model_validate(data) if isinstance(data, dict) else spec["data"])


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most ``limit``."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)
