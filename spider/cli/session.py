"""Shared by all commands: the configuration, its results folder, the record of a job, the set-up of torch."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import yaml

from spider import tracking
from spider.config import Config, load_config
from spider.config.imports import allow_import
from spider.config.schema import named_imports
from spider.results import NEWEST, CompressedFolder, Results

log = logging.getLogger("spider")

#: A file or a folder, there or not.
FILE = click.Path(path_type=Path)
THERE = click.Path(exists=True, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
THREADS = click.option("--threads", type=COUNT, help="CPU threads of this machine (default: all).")
JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


def command(*names: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command of these arguments, optional ones in brackets, that is given the `Session`."""

    def command(function: Callable[..., None]) -> click.Command:
        function = click.pass_obj(function)
        for name in reversed(names):
            function = click.argument(name.strip("[]"), required=name[0] != "[")(function)
        return click.command(function)

    return command


class Group(click.Group):
    """A group of commands that keeps the words of the command line from the name of the command on."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta["spider.words"] = list(args)
        return super().resolve_command(ctx, args)


def command_line() -> str | None:
    """Return the running command and its words as a shell reads them; None outside of a command."""
    context = click.get_current_context(silent=True)
    words = context.meta.get("spider.words") if context else None
    return shlex.join(words) if words else None


@dataclass
class Session:
    """The options before the command."""

    config_path: Path

    @cached_property
    def config(self) -> Config:
        return load_config(self.config_path)

    @cached_property
    def results(self) -> Results:
        return Results(Path(self.config.results))

    def tokenizer_of(self, dataset: str) -> Path | None:
        """Return the file of the tokenizer that encodes a dataset; None for bytes."""
        spec = self.config.dataset(dataset)
        if spec.source.own_tokenizer:
            return Path(spec.source.own_tokenizer)
        return self.results.tokenizer(spec.tokenizer) if spec.tokenizer else None

    def tracked(
        self,
        rule: str,
        name: str,
        params: dict[str, Any],
        inputs: list[Path],
        outputs: list[Path],
        hashed_later: Sequence[Path] = (),
    ) -> AbstractContextManager[tracking.Job]:
        """Record a job of this configuration; the arguments are those of `spider.tracking.job`."""
        tracking.configure(self.config)
        return tracking.job(
            rule,
            name,
            results=self.results.root,
            params=params,
            inputs=inputs,
            outputs=outputs,
            hashed_later=hashed_later,
            command=command_line(),
        )

    def evaluations(self, runs: Iterable[str]) -> list[Path]:
        """Of all stages of these runs, there or not."""
        stages = [(run, stage.name) for run in runs for stage in self.config.runs[run].stages]
        return [self.results.stage(*names).evaluation for names in stages]

    def compressed(self) -> list[Path]:
        """The scores of what the last stages are compressed into, where the configuration asks for that."""
        last = {run: block.stages[-1].name for run, block in self.config.runs.items() if block.compress}
        folders = [self.results.stage(run, stage).compressed for run, stage in last.items()]
        return [CompressedFolder(folder).evaluation for folder in folders]

    def dataset_card(self, name: str, data_digest: str) -> tuple[str, str, str]:
        """Return the name, digest and source of a dataset, as tracking shows it."""
        return name, data_digest, self.config.dataset(name).source.address


def allow_imports_of(config: Path) -> None:
    """Allow the families and sources that the user's configuration names, for commands that read no more.

    A file that is missing or cannot be read names none. A command that needs it reports what is wrong.
    """
    try:
        written = yaml.safe_load(config.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name in named_imports(written):
        allow_import(name)


def configure_tracking_of(root: Path) -> None:
    """Configure tracking for a results folder.

    The configuration of this command has the settings if it lies in that folder, as in a job of the workflow.
    Otherwise the newest configuration in the folder has them.
    """
    session = click.get_current_context().find_object(Session)
    own = session is not None and session.config_path.resolve().is_relative_to(root.resolve())
    path = session.config_path if session and own else root / NEWEST
    tracking.configure(yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {})


def prepare_torch(threads: int | None, processes: int = 1) -> None:
    """Let each of so many processes use its share of the threads (default: of those that torch would use)."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(max(1, (threads or torch.get_num_threads()) // processes))


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)
#: Variables that torch's allocator reads once, when it first allocates.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments() -> None:
    """Let segments of GPU memory grow, in this process and in those it starts.

    By default torch keeps freed memory in segments of a fixed size, and a tensor that is larger than every
    free segment needs a new one. Segments that can grow leave fewer such gaps. Call it before torch
    allocates. It does nothing where the user's environment sets torch's allocator.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Let this process reuse the CPU memory that it freed; does nothing where the C library is not glibc.

    A training step allocates and frees the same gradients and activations every time. By default glibc
    returns large blocks to the kernel at once, and the kernel clears every page again when it is touched.
    With the demo's model that takes a sixth of the step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # never
        mallopt(_MMAP_MAX, 0)
