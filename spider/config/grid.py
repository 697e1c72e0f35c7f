"""A sweep: one block of ``runs:`` that stands for a run for each combination of values.

    runs:
      demo:
        ...
        grid:
          lr: [4.0e-3, 8.0e-3]
          model: {small: {preset: tiny, hidden: 128}, large: tiny}

becomes the runs ``demo-lr4e-3-small``, ``demo-lr4e-3-large``, ``demo-lr8e-3-small``, ``demo-lr8e-3-large``.
Each is an ordinary run, so that rules, tracking, comparison and report need to know nothing of sweeps.

A key is the path of a setting inside the run's block (`spider.config.paths`). One of a stage that stands
alone goes to ``defaults``, and a stage that sets it itself is refused, since the grid would not reach it.
Values are a list, which names them, or a mapping from names to values.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from decimal import Decimal
from typing import Any

from spider.config.block import check_name
from spider.config.explain import ConfigError
from spider.config.paths import put, resolve

#: Runs that a grid may make.
LIMIT = 200


def expand_grids(runs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The block ``runs:`` of a file with each grid replaced by the runs it stands for, and of each grid their
    names. What is no mapping is left to the schema.

    Raises:
        ConfigError: an unknown key, no values, a value twice, one that cannot be named, too many runs, or a
            name that another run has.
    """
    expanded: dict[str, Any] = {}
    sweeps: dict[str, list[str]] = {}
    for name, run in runs.items():
        made = {name: run}
        if isinstance(run, dict) and "grid" in run:
            made = _expand(str(name), {k: v for k, v in run.items() if k != "grid"}, run["grid"])
            sweeps[name] = list(made)
        for one, block in made.items():
            if one in expanded or (one != name and one in runs):
                raise ConfigError(
                    f"runs.{name}: its grid makes a run {one!r}, and there is another of that name"
                )
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
    if (count := math.prod(len(axis) for axis in axes)) > LIMIT:
        sizes = " x ".join(str(len(axis)) for axis in axes)
        raise ConfigError(
            f"{where}: {sizes} values make {count:,} runs, and a grid may make {LIMIT}; leave values out, or "
            "make several sweeps"
        )
    made: dict[str, Any] = {}
    for combination in itertools.product(*axes):
        block = copy.deepcopy(run)
        chosen = zip(paths.values(), combination, strict=True)
        for path, (_, value) in sorted(chosen, key=lambda item: len(item[0])):  # a model before its parts
            put(block, path, value)
        full = "-".join([name, *(label for label, _ in combination)])
        if full in made:
            raise ConfigError(
                f"{where}: two combinations are both named {full!r}; name the values: {{name: value}}"
            )
        made[full] = block
    return made


def _values(label: str, given: Any) -> list[tuple[str, Any]]:
    """Name and value of each point of an axis."""
    if not isinstance(given, dict | list):
        raise ConfigError("must be a list of values, or a mapping from names to values")
    if not given:
        raise ConfigError("must not be empty")
    if isinstance(given, dict):
        named = [(str(name), value) for name, value in given.items()]
    else:
        named = [(label + _written(value), value) for value in given]
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
