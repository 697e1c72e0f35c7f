"""A setting by its path, the one way in which anything but the file itself sets one.

A path is what one would write to find the setting in a run's block, ``model.recurrence.loops`` or
``stages.main.lr``. A setting of a stage may stand alone, ``lr``: it then means the stage that is spoken of
or, where none is, all stages (``defaults``). Grids, command line and environment all come through here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from spider.config.block import Block
from spider.config.explain import ConfigError, nearest
from spider.config.model import ModelConfig, family_config, model_block
from spider.config.run import Run, StageSettings
from spider.config.schema import Config

Path = tuple[str, ...]


def resolve(where: str, key: str, run: dict[str, Any], stage: str | None = None) -> Path:
    """The setting that ``key`` means, as steps into the run's block as it is in the file.

    Args:
        where: what to begin an error with.
        stage: of which a setting that stands alone is meant; None: of all stages.

    Raises:
        ConfigError: there is no such setting, or a stage's own would hide it.
    """
    config = _family_of(run)
    if config.LOOPS and key == "model.n_loops":
        key = f"model.{config.LOOPS}"
    parts: Path = tuple(key.split("."))
    stages = [s for s in run.get("stages") or [] if isinstance(s, dict)]
    if len(parts) == 1 and parts[0] in StageSettings.model_fields and parts[0] not in Run.model_fields:
        parts = ("stages", stage, *parts) if stage else ("defaults", *parts)
    if parts[0] == "defaults" and len(parts) > 1:
        for one in stages:
            if parts[1] in one:
                name = one.get("name")
                raise ConfigError(
                    f"{where}: stage {name!r} sets {parts[1]} itself, so the grid would not reach it; leave "
                    f"it out there, or write stages.{name}.{parts[1]}"
                )
    if config.LOOPS and parts == ("model", *config.LOOPS.split(".")):
        blocks = [run.get("defaults") or {}, *stages]
        if any(isinstance(block, dict) and block.get("n_loops") for block in blocks):
            raise ConfigError(
                f"{where}: this run trains with n_loops, whatever the model's loops; write n_loops"
            )
    if parts[0] == "stages":
        _check_stage(where, parts, [str(one.get("name")) for one in stages])
        return parts
    block: Any = Run
    for part in parts:
        fields = [f for f in block.model_fields if f not in ("grid", "stages")] if block else []
        if part not in fields:
            bare = list(StageSettings.model_fields) if block is Run else []
            hint = nearest(part, list(dict.fromkeys([*fields, *bare]))) if fields else ""
            raise ConfigError(f"{where}: unknown key{hint}")
        block = _block(config if part == "model" and block is Run else child(block, part))
    return parts


def _check_stage(where: str, parts: Path, names: list[str]) -> None:
    if len(parts) != 3 or parts[1] not in names:
        known = nearest(parts[1] if len(parts) > 1 else "", names)
        raise ConfigError(f"{where}: write stages.NAME.SETTING, NAME being one of this run's stages{known}")
    if parts[2] not in (keys := list(StageSettings.model_fields)):
        raise ConfigError(f"{where}: unknown key{nearest(parts[2], keys)}")


def put(run: dict[str, Any], path: Path, value: Any) -> None:
    """Set what `resolve` found, making the blocks on the way; a model given by its preset's name becomes
    one."""
    *parents, last = path
    here: Any = run
    for i, part in enumerate(parents):
        if i and parents[i - 1] == "stages":
            here = next(stage for stage in here if stage["name"] == part)
            continue
        inner = here.get(part)
        if part == "model" and isinstance(inner, str):
            inner = {"preset": inner}
        here[part] = {} if inner is None else inner
        here = here[part]
    here[last] = value


def _family_of(run: dict[str, Any]) -> type[ModelConfig]:
    """The schema of a run's model; of one that is wrong itself, what all families share."""
    try:
        return family_config(model_block(run.get("model"))["family"])
    except (ConfigError, TypeError):
        return ModelConfig


# ------------------------------------------------------------------------------------- the schema, by steps


def siblings(raw: dict[str, Any]) -> Callable[[tuple[Any, ...]], list[str]]:
    """What `spider.config.explain.explain` asks: the keys of the block that a place in ``raw`` lies in."""

    def known(loc: tuple[Any, ...]) -> list[str]:
        block: Any = Config
        value: Any = raw
        for part in loc[:-1]:
            block = child(block, part)
            value = value.get(part) if isinstance(value, dict) else None
            if block is ModelConfig and isinstance(value, dict):
                block = family_config(value.get("family", "spider"))
        return list(block.model_fields) if _block(block) else []

    return known


def child(annotation: Any, part: Any) -> Any:
    """The type found under one step of a path."""
    if isinstance(annotation, type) and issubclass(annotation, Block) and part in annotation.model_fields:
        annotation = annotation.model_fields[part].annotation
    else:  # an item of a list, a value of a mapping, or the member of a union that ``kind`` names
        blocks = [a for a in get_args(annotation) if _block(a)]
        named = [
            b
            for b in blocks
            if "kind" in b.model_fields and part in get_args(b.model_fields["kind"].annotation)
        ]
        annotation = next(iter(named or blocks), None)
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    present = [a for a in get_args(annotation) if a is not type(None)]
    optional = len(present) == 1 and len(get_args(annotation)) == 2
    return present[0] if optional else annotation


def _block(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Block) else None
