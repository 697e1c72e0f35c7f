"""The block ``ladders:``: runs of one family at several budgets of FLOPs. Larger runs are forecast from them.

A ladder is the block of a run, with the sizes and the seeds of each budget. Each combination becomes an
ordinary run, such as ``gpt-c1e11-hidden16-seed1``. What follows from the size and the budget, such as the
learning rate, is a formula (``links``).
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, RootModel, model_validator

from spider.config import Config, ConfigError, Run, nearest
from spider.config.block import Block, Name, Positive, none_such
from spider.config.settings import put, resolve, written_value
from spider.evaluation.calculator import BINARY

#: Forecasts reach at most so many times above the largest budget of a ladder.
FARTHEST = 100.0
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
}


class RungConfig(Block):
    """The runs of one budget."""

    flops: Annotated[float, Field(gt=0)]
    """FLOPs of each training."""
    sizes: list[Positive] = []
    """Values of the setting ``size``. A budget of the fit needs three."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [1]
    """Seeds that each size is trained with."""


class LadderConfig(Block):
    """The block of a run without its length, and the sizes and budgets that it is trained with."""

    model_config = ConfigDict(extra="allow")

    size: str
    """Setting that says how large the model is, such as ``model.hidden``; others follow by ``links``."""
    links: dict[str, str | float] = {}
    """Formulas of settings that follow from the size and the budget: ``{lr: 0.032 * sqrt(64 / hidden)}``."""
    rungs: Annotated[list[RungConfig], Field(min_length=1)]
    """Budgets whose runs the forecast is fitted to (at least two)."""
    target: RungConfig | None = None
    """Larger runs, which start after the forecast is written. Without sizes there is only a forecast."""
    waiting: list[Name] = []
    """Runs of ``runs:`` that start after the forecast as well."""

    @model_validator(mode="after")
    def _of_runs(self) -> LadderConfig:
        Run.model_validate(self.model_extra)
        return self

    def linked(self, where: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return the settings that follow from others. A formula may use these, and the links before it."""
        names = {key.rpartition(".")[2]: value for key, value in values.items()}
        found = {}
        for key, formula in self.links.items():
            try:
                found[key] = evaluate(str(formula), names)
            except ConfigError as error:
                raise ConfigError(f"{where}.links.{key}: {error}") from None
            names.setdefault(key.rpartition(".")[2], found[key])
        return found

    def runs(self, name: str, rung: RungConfig) -> dict[str, Any]:
        """Return the blocks of the runs of a budget, by name."""
        where, made = f"ladders.{name}", {}
        for size, seed in itertools.product(rung.sizes, rung.seeds):
            block = copy.deepcopy(self.model_extra or {})
            values = {"target_flops": rung.flops, self.size: size, "seed": seed}
            for key, value in values.items():
                put(block, resolve(f"{where}.size: {key}", key, block), value)
            for key, value in self.linked(where, values).items():
                put(block, resolve(f"{where}.links.{key}", key, block), value)
            last = self.size.rpartition(".")[2].removeprefix("n_")
            made[f"{name}-c{written_value(rung.flops)}-{last}{size}-seed{seed}"] = block
        return made


class Ladders(RootModel[dict[Name, LadderConfig]]):
    """All ladders, by name."""

    _rungs: dict[str, list[str]] = {}
    _waiting: dict[str, list[str]] = {}

    def expand(self, runs: dict[str, Any]) -> dict[str, Any]:
        """Return the blocks of the runs of all ladders.

        Raises:
            ConfigError: a size or a link is wrong, a ladder has too few sizes or budgets, the budget of its
                target is not above the others, or no run has the name of one that waits.
        """
        made: dict[str, Any] = {}
        for name, ladder in self.root.items():
            where, target = f"ladders.{name}", ladder.target
            if "grid" in (ladder.model_extra or {}):
                raise ConfigError(f"{where}: has no grid of its own; write rungs and target")
            budgets = {one.flops for one in ladder.rungs}
            if len(budgets) < 2 or len(budgets) < len(ladder.rungs):
                raise ConfigError(f"{where}.rungs: a forecast needs at least two budgets, each once")
            for i, one in enumerate(ladder.rungs):
                if (sizes := len({*one.sizes})) < 3:
                    raise ConfigError(f"{where}.rungs[{i}].sizes: a budget needs 3 sizes (got {sizes})")
            if target and not max(budgets) < target.flops <= FARTHEST * max(budgets):
                raise ConfigError(
                    f"{where}.target.flops: must be above the largest budget of the rungs, and at most "
                    f"{FARTHEST:.0f} times as large, {FARTHEST * max(budgets):.3g} (got {target.flops:.3g})"
                )
            for run in ladder.waiting:
                if run not in runs:
                    raise ConfigError(f"{where}.waiting: {none_such('run', run, runs)}")
            fitted = {key: block for one in ladder.rungs for key, block in ladder.runs(name, one).items()}
            targets = ladder.runs(name, target) if target else {}
            made |= fitted | targets
            self._rungs[name] = [*fitted]
            self._waiting[name] = [*targets, *ladder.waiting]
        return made

    @property
    def hidden(self) -> list[str]:
        """Names of the runs that forecasts are fitted to."""
        return [run for runs in self._rungs.values() for run in runs]


def ladders_of(config: Config) -> dict[str, LadderConfig]:
    """Return the ladders of a configuration, by name."""
    block = config.extras.get("ladders")
    return block.root if block else {}


def rungs_of(config: Config, name: str) -> list[str]:
    """Return the runs that the forecast of a ladder is fitted to."""
    runs: list[str] = config.extras["ladders"]._rungs[name]
    return runs


def waiting_of(config: Config, name: str) -> list[str]:
    """Return the runs that wait for the forecast of a ladder.

    Raises:
        ConfigError: one of them has several stages, or none that ends by ``target_flops``.
    """
    runs: list[str] = config.extras["ladders"]._waiting[name]
    for run in runs:
        stage, *others = config.runs[run].stages
        if others or not config.runs[run].settings_of(stage).target_flops:
            raise ConfigError(
                f"runs.{run}: waits for a forecast, so it needs target_flops, and a single stage"
            )
    return runs


def budgets_of(config: Config, name: str) -> list[float]:
    """Return the FLOPs that a ladder is to forecast, in rising order."""
    target = ladders_of(config)[name].target
    waiting = [config.stage(run, config.runs[run].stages[0].name) for run in waiting_of(config, name)]
    found = {spec.settings.target_flops or 0.0 for spec in waiting}
    return sorted(found | ({target.flops} if target else set()))


def evaluate(formula: str, names: Mapping[str, float]) -> float:
    """Return the value of a formula such as ``max(2, round(hidden / 32))``.

    Args:
        names: the values that the formula may use, by name.

    Raises:
        ConfigError: the formula has another form, uses an unknown name, or has no value.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=float() | int() as number):
                return number
            case ast.Name(id=name):
                if name not in names:
                    raise ConfigError(f"uses {name!r}{nearest(name, names)}; it may use {', '.join(names)}")
                return names[name]
            case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
                result: float = BINARY[type(op)](value(left), value(right))
                return result
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, node.args))
        known = "numbers, names, + - * / // % **, and " + ", ".join(_FUNCTIONS)
        raise ConfigError(f"{ast.unparse(node)!r} is not a part of a formula; write {known}")

    try:
        return value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{formula!r} has no value ({error})") from None
