"""Settings on the command line: ``PATH=VALUE`` in general, and the flags and variables of the seeds.

The flags are a table of aliases of paths; what each is for, and what it may be, is the schema's to say. A
setting comes from the command line, else from the environment, else from the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import click
from click.core import ParameterSource

from spider.cli.session import log
from spider.config import Given, Run, StageSettings


class Alias(NamedTuple):
    """The flag ``--name``; one that begins with ``no_`` sets false."""

    name: str
    path: str
    variable: bool = False
    """Whether the variable ``NAME`` sets it where the command line does not."""
    help: str = ""
    """What the schema does not say."""


_SEEDS = ("seq_len", "micro_batch", "grad_accum", "n_loops", "lr", "ckpt_every")
ALIASES = (
    *(Alias(name, name, variable=True) for name in _SEEDS),
    Alias("target_tokens", "tokens", variable=True),
    Alias("max_steps", "max_steps", help="0: no such limit."),
    *(Alias(name, name) for name in ("precision", "fp8_recipe", "parallel", "compile", "kernels")),
    Alias("no_gradient_checkpointing", "model.gradient_checkpointing", help="Keep all activations."),
)
_FIELDS = {**Run.model_fields, **StageSettings.model_fields}


def spellings(name: str) -> tuple[str, ...]:
    """``--name``, its words joined by underscores as in the configuration, or by dashes."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


class _Option(click.Option):
    """One of the aliases; a workflow's jobs take none from the environment, only from the configuration."""

    def resolve_envvar_value(self, context: click.Context) -> str | None:
        return None if os.environ.get("SPIDER_WORKFLOW") else super().resolve_envvar_value(context)


def aliases(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of `ALIASES` as options."""
    for name, path, variable, more in reversed(ALIASES):
        field = _FIELDS.get(path)
        kinds = get_args(field.annotation) if field else ()
        said = f"{field.description if field else ''} {more}".replace("``", "").strip()
        form: dict[str, Any] = {"metavar": "|".join(k for k in kinds if isinstance(k, str)) or "NUMBER"}
        flags = spellings(name)
        if name.startswith("no_"):
            form = {"is_flag": True, "flag_value": False, "default": None}
        elif bool in kinds:
            flags, form = tuple(f"{flag}/--no-{flag[2:]}" for flag in flags), {"default": None}
        form |= {"envvar": name.upper() if variable else None, "show_envvar": True, "help": said}
        command = click.option(*flags, cls=_Option, **form)(command)
    return command


def read(context: click.Context, words: tuple[str, ...]) -> tuple[list[str], list[Given]]:
    """The names of a run and a stage, and the settings, of a command's words, its flags and the environment.

    Raises:
        ConfigError: a value is not YAML.
        UsageError: there are too many names.
    """
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise click.UsageError(f"unexpected {', '.join(names[2:])}; a setting is written PATH=VALUE", context)
    given = []
    for name, path, *_ in ALIASES:
        source, value = context.get_parameter_source(name), context.params[name]
        if source is not ParameterSource.DEFAULT:
            variable = source is ParameterSource.ENVIRONMENT
            value = "null" if (name, value) == ("max_steps", "0") else value
            given.append(Given(name.upper() if variable else f"--{name}", path, value, variable))
    pairs = ((word, word.partition("=")) for word in words if "=" in word)
    return names, [*given, *(Given(word, key, value) for word, (key, _, value) in pairs)]


def report(context: click.Context, used: list[Given]) -> None:
    """Log which settings are not the file's, and which variables a workflow's job has ignored."""
    if used:
        said = ", ".join(f"{one.key} {one.value} ({one.origin})" for one in used)
        log.info("settings: %s; all others from %s", said, context.obj.config_path)
    unused = [a for a in ALIASES if context.get_parameter_source(a.name) is ParameterSource.DEFAULT]
    if variables := [a.name.upper() for a in unused if a.variable and os.environ.get(a.name.upper())]:
        log.warning(
            "%s: set in the environment and ignored, the configuration alone decides what a workflow trains",
            ", ".join(variables),
        )
