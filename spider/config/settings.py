"""A setting by its path, the one way in which anything but the file itself sets one, and grids of settings.

A path is what one would write to find the setting in a run's block, ``model.recurrence.loops`` or
``stages.main.lr``. A setting of a stage may stand alone, ``lr``: it then means the stage that is spoken of
or, where none is, all stages (``defaults``). Only whether there is such a setting is checked here. What it
may be is the schema's to say, of the configuration that comes of it.

A block of ``runs:`` with a ``grid`` from paths to values stands for a run for each combination of these: of
``demo``, ``grid: {lr: [4.0e-3, 8.0e-3]}`` makes ``demo-lr4e-3`` and ``demo-lr8e-3``. Each is an ordinary run,
so that rules, tracking, comparison and report need to know nothing of sweeps.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from decimal import Decimal
from typing import Any, get_args

from spider.config.block import Block, ConfigError, check_name, nearest
from spider.config.model import ModelConfig, family_config, model_block
from spider.config.run import Run, StageSettings

Path = tuple[str, ...]

#: Settings that each family keeps at a path of its own: what says which, and what is said where none does.
_OF_FAMILY = {
    "model.n_loops": ("LOOPS", "has no loops"),
    "model.gradient_checkpointing": ("RECOMPUTE", "recomputes no activations"),
}


def resolve(where: str, key: str, run: dict[str, Any], stage: str | None = None) -> Path:
    """The setting that ``key`` means, as steps into the run's block as it is in the file. Errors begin with
    ``where``; with ``stage``, what names no stage means that one alone.

    Raises:
        ConfigError: there is no such setting, or a stage's own would hide it.
    """
    family, stages = _family(run), _stages(run)
    if key in _OF_FAMILY:
        attribute, lacks = _OF_FAMILY[key]
        if (place := getattr(family, attribute)) is None:
            raise ConfigError(f"{where}: this run's model {lacks}")
        key = f"model.{place}"
    path = tuple(key.split("."))
    if path[0] in StageSettings.model_fields and (stage or path[0] not in Run.model_fields):
        path = ("defaults", *path)
    if stage and path[0] == "defaults":
        path = ("stages", stage, *path[1:])
    block: Any = Run
    steps = path
    if path[0] == "stages":
        if len(path) < 3 or path[1] not in stages:
            known = f"one of this run's stages{nearest(''.join(path[1:2]), stages)}"
            raise ConfigError(f"{where}: write stages.NAME.SETTING, NAME being {known}")
        if stage and path[1] != stage:
            raise ConfigError(f"{where}: is a setting of stage {path[1]}, and this is about stage {stage}")
        block, steps = StageSettings, path[2:]
    for step in steps:
        fields = [f for f in block.model_fields if f not in ("grid", "stages")] if block else []
        if step not in fields:
            bare = list(StageSettings.model_fields) if block is Run else []
            hint = nearest(step, {*fields, *bare}) if fields else ""
            raise ConfigError(f"{where}: unknown key{hint}")
        block = family if step == "model" and block is Run else _inner(block, step)
    # What would change nothing, because a stage goes by a setting of its own.
    for name, own in stages.items():
        if path[0] == "defaults" and own.keys() & {*path[1:2]}:
            remedy = f"leave it out there, or write stages.{name}.{path[1]}"
            reason = f"stage {name!r} sets {path[1]} itself, so the grid would not reach it"
            raise ConfigError(f"{where}: {reason}; {remedy}")
    meant = [run.get("defaults"), *(own for name, own in stages.items() if stage in (None, name))]
    if key == f"model.{family.LOOPS}" and any(isinstance(b, dict) and b.get("n_loops") for b in meant):
        raise ConfigError(f"{where}: this run trains with n_loops, whatever the model's loops; write n_loops")
    return path


def put(run: dict[str, Any], path: Path, value: Any) -> None:
    """Set what `resolve` returned. Blocks on the way are copied, since YAML lets several share one, or made:
    of a model's preset, and of what a stage has from the run's defaults. What is no block at all is left for
    the schema to refuse."""
    here: Any = run
    inherited: Any = None
    if path[0] == "stages":
        run["stages"] = [dict(one) if isinstance(one, dict) else one for one in run["stages"]]
        here, inherited, path = _stages(run)[path[1]], run.get("defaults"), path[2:]
    *blocks, last = path
    for step in blocks:
        inner = here.get(step, inherited.get(step) if isinstance(inherited, dict) else None)
        if step == "model" and isinstance(inner, str):
            inner = {"preset": inner}
        if not isinstance(inner, dict | None):
            return
        here[step] = dict(inner or {})
        here, inherited = here[step], None
    here[last] = copy.deepcopy(value)


def _stages(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name."""
    return {str(one.get("name")): one for one in run.get("stages") or [] if isinstance(one, dict)}


def _family(run: dict[str, Any]) -> type[ModelConfig]:
    """The schema of a run's model; of one that is wrong itself or not there, that of the family implied."""
    try:
        return family_config(model_block(run.get("model"))["family"])
    except (ValueError, TypeError):
        return family_config(ModelConfig.model_fields["family"].default)


def _inner(block: type[Block], key: str) -> type[Block] | None:
    """The block that a key of another holds, be it that or null."""
    annotation = block.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)), None)


# ------------------------------------------------------------------------------------------------------ grids

#: Runs that a grid may make.
LIMIT = 200


def expand_grids(runs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The block ``runs:`` of a file with each grid replaced by the runs it stands for, and of each grid their
    names; `ConfigError` of a grid that makes none. What is no mapping is left to the schema."""
    expanded: dict[str, Any] = {}
    sweeps: dict[str, list[str]] = {}
    for name, run in runs.items():
        made = {name: run}
        if isinstance(run, dict) and "grid" in run:
            made = _expand(str(name), {k: v for k, v in run.items() if k != "grid"}, run["grid"])
            sweeps[name] = list(made)
        for one, block in made.items():
            if one in expanded or (one != name and one in runs):
                problem = f"its grid makes a run {one!r}, and there is another of that name"
                raise ConfigError(f"runs.{name}: {problem}")
            expanded[one] = block
    return expanded, sweeps


def _expand(name: str, run: dict[str, Any], grid: Any) -> dict[str, Any]:
    where = f"runs.{name}.grid"
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(f"{where}: must be a mapping from settings to their values, at least one")
    paths = {key: resolve(f"{where}.{key}", str(key), run) for key in grid}
    for one, other in itertools.combinations(paths, 2):
        if paths[one] == paths[other]:
            raise ConfigError(f"{where}: {one} and {other} are the same setting")
    lasts = [path[-1].removeprefix("n_") for path in paths.values()]
    axes = []
    for (key, path), last in zip(paths.items(), lasts, strict=True):
        label = last if lasts.count(last) == 1 else "_".join(path[-2:])
        try:
            axes.append(_values(label, grid[key]))
        except ConfigError as error:
            raise ConfigError(f"{where}.{key}: {error}") from None
    if (count := math.prod(map(len, axes))) > LIMIT:
        sizes = " x ".join(str(len(axis)) for axis in axes)
        remedy = "leave values out, or make several sweeps"
        raise ConfigError(
            f"{where}: {sizes} values make {count:,} runs, and a grid may make {LIMIT}; {remedy}"
        )
    made: dict[str, Any] = {}
    for combination in itertools.product(*axes):
        block = copy.deepcopy(run)
        chosen = zip(paths.values(), combination, strict=True)
        for path, (_, value) in sorted(chosen, key=lambda item: len(item[0])):  # a model before its parts
            put(block, path, value)
        full = "-".join([name, *(label for label, _ in combination)])
        if full in made:
            problem = f"two combinations are both named {full!r}"
            raise ConfigError(f"{where}: {problem}; name the values: {{name: value}}")
        made[full] = block
    return made


def _values(label: str, given: Any) -> list[tuple[str, Any]]:
    """Name and value of each point of an axis."""
    if isinstance(given, dict):
        named = [(str(name), value) for name, value in given.items()]
    elif isinstance(given, list):
        named = [(label + _written(value), value) for value in given]
    else:
        raise ConfigError("must be a list of values, or a mapping from names to values")
    if not named:
        raise ConfigError("must not be empty")
    for i, (name, value) in enumerate(named):
        check_name(name)
        if any(value == other and type(value) is type(other) for _, other in named[:i]):
            raise ConfigError(f"{value!r} is there twice")
    return named


def _written(value: Any) -> str:
    """A value as a part of a folder's name: ``4e-3``, ``15e-1``, ``true``, ``adamw8bit``."""
    if value is None or isinstance(value, int):  # or true or false
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 10_000:
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        sign, digits, power = Decimal(f"{value:.12e}").normalize().as_tuple()
        return f"{'-' * sign}{''.join(map(str, digits))}e{power}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]+", value):
        return value
    raise ConfigError(f"{value!r} makes no name; name the values: {{name: value, ...}}")
