"""Parts that commands share: arguments, configuration, results folder, job records, set-up of torch."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider.common import extras
from spider.common.results import Results
from spider.config import Config, load_config
from spider.config.imports import allow_import
from spider.config.schema import named_imports, read_yaml

if TYPE_CHECKING:
    from spider.checkpoints.load import Checkpoint
    from spider.model.interface import Model

log = logging.getLogger("spider")

#: A file or a folder, which may not exist.
FILE = click.Path(path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
THREADS = click.option("--threads", type=COUNT, help="CPU threads of this machine (default: all).")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class ModelPath(click.ParamType):
    """A path of a model, or RUN/STAGE in the results folder of the configuration. It becomes a path."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        session = ctx.find_object(Session) if ctx else None
        if session is None or path.exists() or not re.fullmatch(r"[\w-]+/[\w-]+", str(value)):
            return path
        run, stage = str(value).split("/")
        folder = session.results.stage(run, stage).path
        return folder if folder.exists() else path


class StageName(click.ParamType):
    """A stage as RUN/STAGE, or the path of its folder. It becomes the names of the run and the stage."""

    name = "stage"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        session = ctx.find_object(Session) if ctx else None
        assert session is not None
        run, stage = session.names(str(value))
        if stage is None:
            self.fail(f"{value!r} names no stage; write RUN/STAGE", param, ctx)
        return run, stage


MODEL = click.argument("path", metavar="MODEL", type=ModelPath())
STAGE = click.argument("stage", metavar="RUN/STAGE", type=StageName())


def command(*names: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command with a `Session` and these arguments. Names of optional ones are in brackets."""

    def command(function: Callable[..., None]) -> click.Command:
        function = click.pass_obj(function)
        for name in reversed(names):
            function = click.argument(name.strip("[]"), required=name[0] != "[")(function)
        return click.command(function)

    return command


class Group(click.Group):
    """A group of commands, with those of extras. The outermost one stores the words of the command line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta.setdefault("spider.words", list(args))
        words = " ".join([*_group_words(ctx), args[0]])
        if self.get_command(ctx, args[0]) is None and (reason := extras.lacking(words)):
            ctx.fail(f"{words} {reason}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        return own or extras.command(" ".join([*_group_words(ctx), cmd_name]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_commands(ctx, formatter)
        if rows := [*extras.commands(" ".join(_group_words(ctx))).items()]:
            with formatter.section("Commands of extras, and their packages"):
                formatter.write_dl(rows)


def _group_words(ctx: click.Context) -> list[str]:
    """Return the words of a group, without the name of the program."""
    return [*_group_words(ctx.parent), ctx.info_name or ""] if ctx.parent else []


@dataclass
class Session:
    """The configuration of a command."""

    config_path: Path

    @cached_property
    def written(self) -> Any:
        """The configuration as it is written."""
        return read_yaml(self.config_path)

    @cached_property
    def config(self) -> Config:
        return load_config(self.written)

    def allow_imports(self) -> None:
        """Allow the families and sources that the configuration names, for commands that read a model.

        A file that cannot be read is skipped here. A command that needs it reports the error.
        """
        with suppress(Exception):
            for name in named_imports(self.written):
                allow_import(name)

    @cached_property
    def results(self) -> Results:
        return Results(Path(self.config.results))

    def names(self, text: str) -> tuple[str, str | None]:
        """Return the run and the stage that ``RUN``, ``RUN/STAGE`` or the path of a stage's folder names."""
        runs = self.results.root.resolve() / "runs"
        inside = Path(text).resolve()
        run, _, stage = text.partition("/")
        if run not in self.config.runs and inside.is_relative_to(runs) and inside != runs:
            run, *rest = inside.relative_to(runs).parts
            return run, rest[0] if rest else None
        return run, stage or None

    def stage_of(self, text: str) -> tuple[str, str]:
        """Return the run and the stage that a text names as in `names`, by default the last stage."""
        run, stage = self.names(text)
        return run, stage or self.config.run(run).stages[-1].name

    def tokenizer_of(self, dataset: str) -> Path | None:
        """Return the file of the tokenizer of a dataset, or None for a dataset of bytes."""
        spec = self.config.dataset(dataset)
        if spec.source.own_tokenizer:
            return Path(spec.source.own_tokenizer)
        return self.results.tokenizer(spec.tokenizer) if spec.tokenizer else None


def take_gpu(config: Config | None, run: str, local_rank: int | None = None) -> None:
    """Take one GPU of this machine until the end of the command, if a run has any, and hide all others.

    A run of another configuration has one if there is one.

    Args:
        local_rank: as for `spider.processes.gpus.claimed`.

    Raises:
        TrainingError: some are requested, and torch can use none here.
    """
    from spider.processes.device import require_gpus
    from spider.processes.gpus import claimed, visible

    runs = config.runs if config else {}
    # A training with other settings has the name of its run and a digest.
    block = runs.get(run) or runs.get(run.rpartition("-")[0])
    gpus = block.resources.gpus if block else len(visible())
    click.get_current_context().with_resource(claimed(min(1, gpus), local_rank))
    require_gpus(gpus)


def on_gpu(checkpoint: Checkpoint) -> Model:
    """Return the model of a checkpoint, on a GPU if its run has any (`take_gpu`)."""
    from spider.processes.device import available

    session, config = click.get_current_context().find_object(Session), None
    with suppress(ValueError):  # A model needs no configuration.
        config = session.config if session else None
    take_gpu(config, checkpoint.manifest.run)
    return checkpoint.model(available())


def prepare_torch(threads: int | None, processes: int = 1) -> None:
    """Give each of the processes an equal share of the threads (default: of those that torch would use)."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(max(1, (threads or torch.get_num_threads()) // processes))


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)
#: Variables that torch's allocator reads once, when it first allocates.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments() -> None:
    """Set torch's allocator to expandable segments of GPU memory, in this process and in those it starts.

    By default torch keeps freed memory in segments of a fixed size, and a tensor that is larger than every
    free segment needs a new one. Expandable segments leave fewer such gaps. The function must be called
    before torch allocates. It changes nothing if the user's environment sets torch's allocator.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Set glibc to reuse freed CPU memory in this process, and torch to ask Linux for large pages of it.

    A training step allocates and frees the same gradients and activations every time. By default glibc
    returns large blocks to the kernel at once, and the kernel clears every page again at its first access.
    With a model of some megabytes that takes a sixth of the step. A page of 2 MB takes one entry of the
    processor's table of pages in place of 512. Other C libraries and systems stay as they are.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read when torch first allocates on the CPU
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # never
        mallopt(_MMAP_MAX, 0)


def leave_out_pandas() -> None:
    """Let pyarrow find no pandas, which it would import for the first conversion: a fifth of a small job.

    For processes that use no pandas, because pyarrow does not look again.
    """

    class Absent:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    finder: Any = Absent
    sys.meta_path.insert(0, finder)
    import pyarrow

    pyarrow.array([0])
    sys.meta_path.remove(finder)
