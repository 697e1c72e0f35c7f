"""Ladders: runs of one family at several budgets of FLOPs. Larger runs are forecast from them.

A ladder is the block of a run, with the sizes and the seeds of each budget. Each combination becomes an
ordinary run, such as ``gpt-c1e11-hidden16-seed1``. What follows from the size and the budget, such as the
learning rate, is linked (`spider.config.formulas`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from spider.config.block import Block, ConfigError, Name, Positive, none_such
from spider.config.run import Run
from spider.config.settings import expand, written_value

#: Forecasts reach at most so many times above the largest budget of a ladder.
FARTHEST = 100.0


class RungConfig(Block):
    """The runs of one budget."""

    flops: Annotated[float, Field(gt=0)]
    """FLOPs of each training."""
    sizes: list[Positive] = []
    """Values of the setting ``size``. A budget of the fit needs three."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [1]
    """Seeds that each size is trained with."""


class LadderConfig(Run):
    """The block of a run without its length, and the sizes and budgets that it is trained with."""

    like: Name | None = None
    """Ladder whose run this one has. Runs of the same size, budget and seed are trained once."""
    size: str
    """Setting that says how large the model is, such as ``model.hidden``; others follow by ``links``."""
    rungs: Annotated[list[RungConfig], Field(min_length=1)]
    """Budgets whose runs the forecast is fitted to (at least two)."""
    target: RungConfig | None = None
    """Larger runs, which start after the forecast is written. Without sizes there is only a forecast."""


@dataclass(frozen=True)
class Ladder:
    """The runs of a ladder."""

    name: str
    size: str
    rungs: dict[str, float] = field(default_factory=dict)
    """Budget of each run that the forecast is fitted to."""
    targets: dict[str, float] = field(default_factory=dict)
    """Budget of each run that waits for the forecast."""
    at: float | None = None
    """FLOPs that are forecast beside those of the runs that wait."""

    @property
    def runs(self) -> list[str]:
        return [*self.rungs, *self.targets]


#: Keys of a ladder that its runs do not have.
_OWN = ("like", "size", "rungs", "target")


def inherited(blocks: Any) -> Any:
    """Return the blocks of ladders, each with the keys that it has from its ``like``.

    Raises:
        ConfigError: a ladder is like one that does not exist, or that is like another; or it changes the run.
    """
    if not isinstance(blocks, dict):
        return blocks
    whole = dict(blocks)
    for name, block in blocks.items():
        if not isinstance(block, dict) or not (like := block.get("like")):
            continue
        base = blocks.get(like)
        if not isinstance(base, dict) or base.get("like"):
            raise ConfigError(f"ladders.{name}.like: {none_such('ladder', like, blocks)}")
        if others := sorted(block.keys() - {"like", "rungs", "target"}):
            raise ConfigError(f"ladders.{name}.{others[0]}: is that of {like}; leave it out")
        whole[name] = {key: value for key, value in base.items() if key != "target"} | block
    return whole


def expand_ladders(blocks: Any) -> tuple[dict[str, Any], dict[str, Ladder]]:
    """Return the runs of all ladders of a configuration, and the ladders. What is malformed is left out.

    Raises:
        ConfigError: a size or a link is wrong, a ladder has too few sizes or budgets, or the budget of its
            target is not above the others.
    """
    runs: dict[str, Any] = {}
    ladders = {}
    for name, block in blocks.items() if isinstance(blocks, dict) else ():
        try:
            LadderConfig.model_validate(block)
        except ValueError:
            continue  # the schema names what is wrong
        found, ladders[str(name)] = _expanded(str(name), block)
        runs |= found  # runs that two ladders share are equal
    return runs, ladders


def _expanded(name: str, block: dict[str, Any]) -> tuple[dict[str, Any], Ladder]:
    where = f"ladders.{name}"
    run = {key: value for key, value in block.items() if key not in _OWN}
    rungs = [RungConfig.model_validate(one) for one in block["rungs"]]
    target = RungConfig.model_validate(block["target"]) if block.get("target") else None
    if "grid" in run or "forecast" in run:
        raise ConfigError(f"{where}: has no grid or forecast of its own; write rungs and target")
    budgets = {one.flops for one in rungs}
    if len(budgets) < 2 or len(budgets) < len(rungs):
        raise ConfigError(f"{where}.rungs: a forecast needs at least two budgets, each once")
    for i, one in enumerate(rungs):
        if len({*one.sizes}) < 3:
            raise ConfigError(f"{where}.rungs[{i}].sizes: a budget needs 3 sizes (got {len({*one.sizes})})")
    if target and not max(budgets) < target.flops <= FARTHEST * max(budgets):
        raise ConfigError(
            f"{where}.target.flops: must be above the largest budget of the rungs, and at most "
            f"{FARTHEST:.0f} times as large, {FARTHEST * max(budgets):.3g} (got {target.flops:.3g})"
        )
    runs: dict[str, Any] = {}
    shared = block.get("like") or name
    fitted = {key: one.flops for one in rungs for key in _add(runs, where, shared, run, block["size"], one)}
    waiting = []
    if target and target.sizes:
        waiting = _add(runs, where, name, {**run, "forecast": name}, block["size"], target)
    at = target.flops if target else None
    return runs, Ladder(name, block["size"], fitted, dict.fromkeys(waiting, at or 0.0), at)


def _add(
    runs: dict[str, Any], where: str, name: str, run: dict[str, Any], size: str, rung: RungConfig
) -> list[str]:
    """Add the runs of a budget, and return their names."""
    budget = {f"c{written_value(rung.flops)}": rung.flops}
    axes = {"target_flops": budget, size: rung.sizes, "seed": rung.seeds}
    found = expand(name, run, axes, where=where)
    if twice := runs.keys() & found.keys():
        raise ConfigError(f"{where}.rungs: {min(twice)} stands there twice")
    runs |= found
    return list(found)
