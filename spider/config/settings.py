"""Settings by their path, and grids of settings.

A path leads to a setting in a run's block: ``model.recurrence.loops``. A setting of stages stands alone:
``lr`` is that of the stage in question, or of all stages (``defaults``). Where no stage is in question,
``stages.main.lr`` is that of one. This module checks that the setting exists. The schema validates its value
later, as a part of the whole configuration.

A run with a ``grid`` becomes one run for each combination of the grid's values. For example, ``grid: {lr:
[4.0e-3, 8.0e-3]}`` in ``demo`` gives ``demo-lr4e-3`` and ``demo-lr8e-3``. Each is an ordinary run, so no rule
and no report handles sweeps.
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

#: Keys of a run that are not settings of its training.
_NOT_SWEPT = ("grid", "stages", "defaults")
#: Name for the setting of recomputed activations, whose path differs between families.
_CHECKPOINTING = "model.gradient_checkpointing"


def resolve(where: str, key: str, run: dict[str, Any], stage: str | None = None) -> Path:
    """Return the path of the setting ``key`` in the block of a run as the file has it.

    Args:
        where: what error messages call the setting.
        stage: the stage of a ``key`` that names none (None: all stages).

    Raises:
        ConfigError: the setting does not exist, or a stage overrides it.
    """
    family = _family(run)
    stages = _stages(run)
    if key == _CHECKPOINTING:
        if family.RECOMPUTE is None:
            raise ConfigError(f"{where}: this run's model recomputes no activations")
        key = f"model.{family.RECOMPUTE}"
    steps = key.split(".")
    of: Path = ()  # of the stage, or of all stages
    if steps[0] in StageSettings.model_fields and (stage or steps[0] not in Run.model_fields):
        of = ("stages", stage) if stage else ("defaults",)
    elif steps[0] == "stages" and stage is None:
        of, steps = ("stages", *steps[1:2]), steps[2:]
        if not steps or of[-1] not in stages:
            known = f"one of this run's stages{nearest(''.join(of[1:]), stages)}"
            raise ConfigError(f"{where}: write stages.NAME.SETTING, NAME being {known}")
    block: Any = StageSettings if of else Run
    for step in steps:
        fields = [f for f in block.model_fields if f not in _NOT_SWEPT] if block else []
        if step not in fields:
            alone = list(StageSettings.model_fields) if block is Run else []
            hint = nearest(step, {*fields, *alone}) if fields else ""
            raise ConfigError(f"{where}: unknown key{hint}")
        block = family if step == "model" and block is Run else _inner(block, step)
    # A setting of all stages must not be overridden by one of them.
    for name, own in stages.items():
        if of == ("defaults",) and own.keys() & {*steps[:1]}:
            remedy = f"leave it out there, or write stages.{name}.{steps[0]}"
            reason = f"stage {name!r} sets {steps[0]} itself, so this would not reach it"
            raise ConfigError(f"{where}: {reason}; {remedy}")
    affected = [run.get("defaults"), *(own for name, own in stages.items() if stage in (None, name))]
    if key == f"model.{family.LOOPS}" and any(isinstance(b, dict) and b.get("n_loops") for b in affected):
        raise ConfigError(f"{where}: n_loops of this run overrides the model's loops; write n_loops")
    return (*of, *steps)


def put(run: dict[str, Any], path: Path, value: Any) -> None:
    """Set the setting at a path that `resolve` returned.

    Blocks on the path are copied, because YAML lets several keys share one. A block that is not there is
    made from the model's preset or from what the stage inherits from the run's defaults. A value that should
    be a block and is not stays as it is, and the schema refuses it.
    """
    here: Any = run
    inherited: Any = None
    if path[0] == "stages":
        run["stages"] = [dict(one) if isinstance(one, dict) else one for one in run["stages"]]
        here = _stages(run)[path[1]]
        inherited = run.get("defaults")
        path = path[2:]
    *blocks, last = path
    for step in blocks:
        inner = here.get(step, inherited.get(step) if isinstance(inherited, dict) else None)
        if step in ("model", "optimizer") and isinstance(inner, str):
            inner = {"preset": inner}
        if not isinstance(inner, dict | None):
            return
        here[step] = dict(inner or {})
        here = here[step]
        inherited = None
    here[last] = copy.deepcopy(value)


def _stages(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stages of a run by name."""
    return {str(one.get("name")): one for one in run.get("stages") or [] if isinstance(one, dict)}


def _family(run: dict[str, Any]) -> type[ModelConfig]:
    """Return the schema of a run's model, or of the default family where the model is missing or wrong."""
    try:
        return family_config(model_block(run.get("model"))["family"])
    except (ValueError, TypeError):
        return family_config(ModelConfig.model_fields["family"].default)


def _inner(block: type[Block], key: str) -> type[Block] | None:
    """Return the class of the block at a key, which may also be null there. Return None for other keys."""
    annotation = block.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)), None)


# ------------------------------------------------------------------------------------------------------ grids

#: Largest number of runs of a grid.
LIMIT = 200


def expand_grids(runs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Replace each run that has a grid in the block ``runs:`` by the runs of its grid.

    Returns:
        The new block, and the names of the runs of each grid. A run that is not a mapping stays as it is, and
        the schema refuses it.

    Raises:
        ConfigError: a grid is wrong.
    """
    expanded: dict[str, Any] = {}
    sweeps: dict[str, list[str]] = {}
    for name, run in runs.items():
        blocks = {name: run}
        if isinstance(run, dict) and "grid" in run:
            block = {k: v for k, v in run.items() if k != "grid"}
            blocks = expand(str(name), block, run["grid"], where=f"runs.{name}")
            sweeps[name] = list(blocks)
        for one, block in blocks.items():
            if one in expanded or (one != name and one in runs):
                problem = f"its grid makes a run {one!r}, but another run has that name"
                raise ConfigError(f"runs.{name}: {problem}")
            expanded[one] = block
    return expanded, sweeps


def expand(name: str, run: dict[str, Any], grid: Any, *, where: str) -> dict[str, Any]:
    """Return a block for each combination of the values of a grid, by the name of its run.

    Raises:
        ConfigError: the grid is wrong; ``where`` is the path of the run's block.
    """
    where = f"{where}.grid"
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
    expanded: dict[str, Any] = {}
    for combination in itertools.product(*axes):
        block = copy.deepcopy(run)
        chosen = zip(paths.values(), combination, strict=True)
        for path, (_, value) in sorted(chosen, key=lambda item: len(item[0])):  # a model before its parts
            put(block, path, value)
        full = "-".join([name, *(label for label, _ in combination)])
        if full in expanded:
            problem = f"two combinations are both named {full!r}"
            raise ConfigError(f"{where}: {problem}; name the values: {{name: value}}")
        expanded[full] = block
    return expanded


def _values(label: str, axis: Any) -> list[tuple[str, Any]]:
    """Return the name and the value of each point of an axis of a grid."""
    if isinstance(axis, dict):
        named = [(str(name), value) for name, value in axis.items()]
    elif isinstance(axis, list):
        named = [(label + written_value(value), value) for value in axis]
    else:
        raise ConfigError("must be a list of values, or a mapping from names to values")
    if not named:
        raise ConfigError("must not be empty")
    for i, (name, value) in enumerate(named):
        check_name(name)
        if any(value == other and type(value) is type(other) for _, other in named[:i]):
            raise ConfigError(f"{value!r} occurs twice")
    return named


def written_value(value: Any) -> str:
    """Write a value as a part of a folder's name: ``4e-3``, ``15e-1``, ``true``, ``adamw8bit``."""
    if value is None or isinstance(value, int):  # bool is an int
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 10_000:
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        sign, digits, power = Decimal(f"{value:.12e}").normalize().as_tuple()
        return f"{'-' * sign}{''.join(map(str, digits))}e{power}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]+", value):
        return value
    raise ConfigError(f"{value!r} cannot be part of a name; name the values: {{name: value, ...}}")
