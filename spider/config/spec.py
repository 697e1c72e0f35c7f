"""The resolved specification of one stage, which a training job reads, and the digests that identify it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from spider.config.block import ConfigError, identity, none_such
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
        chosen["optimizer"] = self.optimizer.changed(include={"kind"})
        if self.optimizer.narrow:
            chosen["optimizer"]["narrow"] = self.optimizer.narrow
        batch: dict[str, Any] = {"seq_len": self.settings.seq_len, "n_loops": self.settings.n_loops}
        batch["micro_batch"] = self.micro_batch(self.processes)
        if self.settings.micro_batch == "auto":
            batch["fits"] = True  # the device decides
        batch |= self.settings.changed(include={"attend"})
        if self.settings.rollouts:
            batch["objective"] = "reinforce"
        if self.settings.attend == "document":  # the data decides how many documents a row has
            batch["data"] = sorted(self.weights)
        return {"model": self.model.changed(), **chosen, **batch}

    @property
    def shape(self) -> str:
        """Digest of `shape_fields`. Stages of equal shape share a warm-up."""
        return identity(self.shape_fields())

    def problems(self, datasets: Mapping[str, Dataset]) -> Iterator[str]:
        """Yield the problems of the settings, without the path of the stage."""
        s = self.settings
        if not any((s.tokens, s.max_steps, s.target_flops, s.tokens_per_parameter, s.max_hours)):
            yield ": needs tokens, max_steps, target_flops, tokens_per_parameter or max_hours"
        if s.max_hours and s.schedule not in ("wsd", "constant"):
            remedy = "set schedule: wsd, which decays at the end of the time, or constant"
            yield f".max_hours: schedule: {s.schedule} needs the number of steps in advance; {remedy}"
        if s.max_hours and s.schedule == "constant" and self.optimizer.weight_decay_end is not None:
            reason = "optimizer.weight_decay_end follows the falling rate of a stage with max_hours"
            yield f".schedule: constant: {reason}; set schedule: wsd, or leave weight_decay_end out"
        used = {name: datasets.get(name) for name in self.weights}
        yield from dict.fromkeys(one for name in used for one in self._row_problems(name, used[name]))
        yield from self._rollout_problems(used[self.data])
        if s.micro_batch == "auto" and not s.windows_per_step:
            yield ".micro_batch: auto cuts the windows of a step, so say how many those are: windows_per_step"
            return
        if s.windows_per_step and s.grad_accum != 1:
            yield f".grad_accum: a step has {s.windows_per_step} windows_per_step; leave one of them out"
        try:
            self.micro_batch(self.processes)
        except ConfigError as error:
            yield f": {error}"
        yield from dict.fromkeys(one for name in used for one in self._validation_problems(name, used[name]))
        if self.stream and self.evaluation.train_bytes:
            yield f": evaluation.train_bytes: {self.data} is a stream, without a train split; leave it out"
        if s.tasks_every and not self.evaluation.tasks:
            yield ".tasks_every: evaluation.tasks lists no task; add one, or leave it out"
        if self.parallel == "fsdp" and (s.samples_every or s.tasks_every):
            key = "samples_every" if s.samples_every else "tasks_every"
            reason = "parallel: fsdp shares the weights, and one process writes"
            yield f".{key}: {reason}; set ddp, or leave it out"
        if not self.model.looped and self.loops != 1:
            yield f".n_loops: this model of family {self.model.family} has no loops; leave it out"
        for name, dataset in used.items():
            if dataset is None:
                yield f".data: {none_such('dataset', name, datasets)}"
            elif dataset.source.STREAMED and name != self.settings.data:
                remedy = "use an encoded dataset, such as hub"
                yield f".data: {name} is a stream, which has no order to mix; {remedy}"

    def _validation_problems(self, data: str, dataset: Dataset | None) -> Iterator[str]:
        """Yield the problems of ``val_every`` on a dataset. Its default adapts to the dataset."""
        s = self.settings
        if not s.val_every or dataset is None:
            return
        if s.ckpt_minutes is None and s.val_every % s.ckpt_every and s.ckpt_every % s.val_every:
            got = f"(got {s.val_every}, ckpt_every is {s.ckpt_every})"
            reason = "because only a saved step can be the best checkpoint"
            yield f".val_every: must be a multiple or a divisor of ckpt_every, {reason} {got}"
        if self.stream is not None:
            yield f".val_every: {data} is a stream and has no validation split; leave it out"
        elif dataset.validation == 0:
            yield f".val_every: datasets.{data}.validation is 0; raise it, or leave val_every out"

    def _row_problems(self, data: str, dataset: Dataset | None) -> Iterator[str]:
        """Yield the problems of packing, and of attention and loss in packed rows of a dataset."""
        s = self.settings
        packed = s.packing == "best_fit"
        if packed and self.stream is not None:
            yield f".packing: best_fit needs all documents in advance, but {data} is a stream; leave it out"
        if packed and self.model.ngram is not None:
            reason = "the n-gram lookup needs each row's position in the text, which best_fit does not have"
            yield f".packing: {reason}; leave it out"
        if s.order == "text" and self.stream is not None:
            yield f".order: text: {self.data} is a stream, which reads its files in turn anyway; leave it out"
        if s.attend == "document" and not packed:
            yield ".attend: document: needs packed rows; set packing: best_fit"
        elif s.attend == "document" and not self.model.DOCUMENTS:
            yield f".attend: document: the family {self.model.family} attends to the whole row; leave it out"
        if s.learn == "assistant" and not packed:
            reason = "a window may begin inside a turn, whose role is then unknown"
            yield f".learn: assistant: {reason}; set packing: best_fit"
        taken = dataset.source.text_bytes if dataset is not None else None
        if taken is not None and taken <= s.seq_len:
            yield f".seq_len: datasets.{data}.source.take is less text than a window of {s.seq_len:,} tokens"
        if s.learn == "assistant" and dataset is not None and dataset.format != "chat":
            yield f".learn: assistant: {data} has no conversations (format: {dataset.format})"

    def _rollout_problems(self, dataset: Dataset | None) -> Iterator[str]:
        """Yield the problems of reinforcement learning."""
        s = self.settings
        if s.rollouts is None:
            return
        if self.stream is not None or (dataset is not None and dataset.format != "chat"):
            yield f".rollouts: {self.data} has no conversations, whose answers are rewarded"
        if self.mixed:
            yield ".data: a stage with `rollouts` has one dataset of conversations; name one"
        if (s.packing, s.learn, s.order) != ("ring", "all", "shuffled"):
            yield ".rollouts: learns from its own answers; leave packing, learn and order out"
        if self.parallel == "fsdp":
            yield ".rollouts: sampling needs the whole model in each process; set parallel: ddp"
        if (answers := self.windows_per_step // self.processes) % s.rollouts.samples:
            multiple = f"a multiple of rollouts.samples ({s.rollouts.samples})"
            yield f".micro_batch: a process has {answers} answers of a step, which is not {multiple}"

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
        (`spider.training.memory` decides). With ``grad_accum`` a multiple of ``processes``, the passes are
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
