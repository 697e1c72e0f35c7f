"""One stage, resolved: the small file a training job reads, and the digests that it is known by."""

from __future__ import annotations

from typing import Any, Literal

from spider.config.block import ConfigError, identity
from spider.config.data import Dataset
from spider.config.run import RunSettings, StageSettings


class StageSpec(RunSettings):
    """One stage, resolved: all that a training job needs to know."""

    format: Literal[1] = 1
    run: str
    stage: str
    index: int
    data: str
    stream: Dataset | None = None
    """The dataset itself where it is a stream: it has no shards to be known by."""
    processes: int = 1
    """That the workflow starts; by hand there may be more or fewer."""
    settings: StageSettings = StageSettings()

    def deciding(self) -> dict[str, Any]:
        """What decides the weights and differs from the defaults, as plain JSON."""
        plain = self.changed(exclude={"evaluation", "format", "parallel", "processes"})
        settings = self.settings.changed(exclude=set(StageSettings.BOOKKEEPING))
        return plain | {"settings": settings, "model": self.model.changed()}

    @classmethod
    def with_defaults(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return fields as `deciding` makes them, with the defaults that it leaves out.

        Fields of other names stay as they are. Raises `ValidationError` or `ConfigError` where this version
        does not know all keys.
        """
        own = {name: value for name, value in fields.items() if name in cls.model_fields}
        others = {name: value for name, value in fields.items() if name not in own}
        return others | cls.model_validate(own).model_dump(mode="json")

    @property
    def identity(self) -> str:
        """Digest of what decides the weights; equal identities may resume each other's checkpoints."""
        return identity(self.deciding())

    def shape_fields(self) -> dict[str, Any]:
        """What decides what the warm-up measures: which matrices, in which arithmetic."""
        chosen = self.changed(include={"precision", "fp8_recipe", "compile", "kernels"})
        chosen["optimizer"] = self.optimizer.changed(include={"kind", "master_weights"})
        batch = {"seq_len": self.settings.seq_len, "n_loops": self.settings.n_loops}
        batch["micro_batch"] = self.micro_batch(self.processes)
        return {"model": self.model.changed(), **chosen, **batch}

    @property
    def shape(self) -> str:
        """Digest of `shape_fields`: stages of one shape share one warm-up."""
        return identity(self.shape_fields())

    def compiled_on(self, device_type: str, kind: str) -> bool:
        """Whether the model is compiled there in that arithmetic (fp32, bf16, fp8): as asked, else on a GPU
        only, where it can be."""
        if self.compile is not None:
            return self.compile
        return device_type == "cuda" and not self.model.problems(kind, True)

    @property
    def loops(self) -> int:
        return self.settings.n_loops or self.model.loops

    @property
    def depths(self) -> int:
        """How many different numbers of loops a step may draw."""
        return 2 * self.loops - 1 if self.model.samples_loops else 1

    @property
    def window(self) -> int:
        """Ids that a trained model is given at a time: those it is evaluated with."""
        return self.evaluation.seq_len or self.settings.seq_len

    @property
    def windows_per_step(self) -> int:
        """Windows of an optimizer step, however many processes share them."""
        return self.settings.micro_batch * self.settings.grad_accum

    @property
    def tokens_per_step(self) -> int:
        return self.settings.seq_len * self.windows_per_step

    def micro_batch(self, processes: int) -> int:
        """Return the windows of one forward pass where so many processes share a step.

        It is the largest number up to ``micro_batch`` that makes all passes equal. With ``grad_accum`` a
        multiple of ``processes``, the passes are exactly those of one process. Where the processes cannot
        share the batch evenly, a `ConfigError` names the nearest one that they can.
        """
        mine, rest = divmod(self.windows_per_step, processes)
        if rest:
            windows = max(1, mine + (2 * rest >= processes)) * processes
            micro_batch = _largest_divisor(windows, self.settings.micro_batch)
            raise ConfigError(
                f"a step has micro_batch x grad_accum = {self.windows_per_step} windows, which {processes} "
                "processes cannot share evenly; the nearest batch that they can share is micro_batch: "
                f"{micro_batch}, grad_accum: {windows // micro_batch} ({windows} windows)"
            )
        return _largest_divisor(mine, self.settings.micro_batch)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most ``limit``."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)
