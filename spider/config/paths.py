"""A setting by its path, the one way in which anything but the file itself sets one.

A path is what one would write to find the setting in a run's block, ``model.recurrence.loops`` or
``stages.main.lr``. A setting of a stage may stand alone, ``lr``: it then means the stage that is spoken of
or, where none is, all stages (``defaults``). Grids, command line and environment all come through here.

Only whether there is such a setting is checked here. What it may be is the schema's to say, of the
configuration that comes of it.
"""

from __future__ import annotations

import copy
from typing import Any, get_args

from spider.config.block import Block
from spider.config.explain import ConfigError, nearest
from spider.config.model import ModelConfig, family_config, model_block
from spider.config.run import Run, StageSettings

Path = tuple[str, ...]

#: Settings that each family keeps at a path of its own: what says which, and what is said where none does.
_OF_FAMILY = {
    "model.n_loops": ("LOOPS", "has no loops"),
    "model.gradient_checkpointing": ("RECOMPUTE", "recomputes no activations"),
}


def resolve(where: str, key: str, run: dict[str, Any], stage: str | None = None) -> Path:
    """The setting that ``key`` means, as steps into the run's block as it is in the file.

    Args:
        where: what to begin an error with.
        stage: the only one that is meant, by whatever names no stage; None: all of them.

    Raises:
        ConfigError: there is no such setting, or a stage's own would hide it.
    """
    family = _family(run)
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
        names = [str(one.get("name")) for one in _stages(run)]
        if len(path) < 3 or path[1] not in names:
            known = nearest("".join(path[1:2]), names)
            raise ConfigError(
                f"{where}: write stages.NAME.SETTING, NAME being one of this run's stages{known}"
            )
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
    _check_reach(where, path, run, family.LOOPS, stage)
    return path


def _check_reach(where: str, path: Path, run: dict[str, Any], loops: str | None, stage: str | None) -> None:
    """Refuse what would change nothing, because a stage goes by a setting of its own."""
    stages = {str(one.get("name")): one for one in _stages(run)}
    hiding = [name for name, one in stages.items() if path[0] == "defaults" and one.keys() & {*path[1:2]}]
    if hiding:
        raise ConfigError(
            f"{where}: stage {hiding[0]!r} sets {path[1]} itself, so the grid would not reach it; leave "
            f"it out there, or write stages.{hiding[0]}.{path[1]}"
        )
    meant = [run.get("defaults"), *(one for name, one in stages.items() if stage in (None, name))]
    if ".".join(path) == f"model.{loops}" and any(isinstance(b, dict) and b.get("n_loops") for b in meant):
        raise ConfigError(f"{where}: this run trains with n_loops, whatever the model's loops; write n_loops")


def put(run: dict[str, Any], path: Path, value: Any) -> None:
    """Set what `resolve` returned. Blocks on the way are copied, since YAML lets several share one, or made:
    of a model's preset, and of what a stage has from the run's defaults. What is no block at all is left for
    the schema to refuse."""
    here: Any = run
    inherited: Any = None
    if path[0] == "stages":
        run["stages"] = [dict(one) if isinstance(one, dict) else one for one in run["stages"]]
        here = next(one for one in _stages(run) if str(one.get("name")) == path[1])
        inherited, path = run.get("defaults"), path[2:]
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


def _stages(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in run.get("stages") or [] if isinstance(one, dict)]


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
