"""Compare the settings of two runs, and make runs between both.

A *hybrid* is the first run with some settings of the second one. Settings that the configuration accepts
only together are one *suspect*. The block of a run has all settings with their defaults, and its stages by
name. So a setting has the same path in both runs, whether a preset, the run's defaults or a stage sets it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from spider.config import Config, EvaluationConfig, StageSettings
from spider.config.run import RunSettings

Path = tuple[str, ...]

ABSENT = "not set"
#: Keys below ``evaluation`` that decide no score.
_UNSCORED = {*EvaluationConfig.SAMPLE, "checkpoints"}


@dataclass(frozen=True)
class Setting:
    """A setting with other values in two runs. It has several paths if all stages share it."""

    name: str
    paths: tuple[Path, ...]
    one: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.one} / {self.other}"


#: Settings that a hybrid takes from the second run together.
Suspect = tuple[Setting, ...]


def named(suspects: Sequence[Suspect]) -> str:
    """Return the names of the settings of suspects: ``lr, seed``."""
    return ", ".join(setting.name for setting in chain(*suspects))


def block_of(config: Config, run: str, last: str) -> dict[str, Any]:
    """Return the settings of a run up to a stage, as plain JSON with all defaults and with stages by name."""
    block = config.run(run)
    count = [stage.name for stage in block.stages].index(last) + 1
    plain = block.model_dump(mode="json", include={*RunSettings.model_fields, "data", "resources"})
    del plain["model"]["vocab_size"]  # the tokenizer of the dataset decides it
    stages = {stage.name: block.settings_of(stage) for stage in block.stages[:count]}
    plain["stages"] = {name: settings.model_dump(mode="json") for name, settings in stages.items()}
    return plain


def run_of(block: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return a block as the configuration has it: with a list of the stages, in the order of their names."""
    stages = block["stages"]
    return {**block, "stages": [{"name": name, **stages[name]} for name in order if name in stages]}


def order_of(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return the names of the stages of both runs, each run's in its order.

    Raises:
        ValueError: the runs have the same stages in another order.
    """
    if [name for name in one if name in other] != [name for name in other if name in one]:
        orders = f"{', '.join(one)} and {', '.join(other)}"
        raise ValueError(
            f"the runs have the same stages in another order ({orders}), so no run is between them"
        )
    names = list(one)
    for before, name in zip(["", *other], other, strict=False):
        if name not in names:
            names.insert(names.index(before) + 1 if before else 0, name)
    return names


def settings_between(one: dict[str, Any], other: dict[str, Any]) -> list[Setting]:
    """Return the settings that differ between two blocks and decide weights or scores."""
    found = {path: values for path, values in _differing(one, other, ()) if _decides(path)}
    shared = [name for name in one["stages"] if name in other["stages"]]
    settings = []
    for path, values in found.items():
        of_stages = [("stages", name, *path[2:]) for name in shared] if len(path) > 2 else []
        if path not in of_stages or any(found.get(each) != values for each in of_stages):
            settings.append(Setting(".".join(path), (path,), *values))
        elif path == of_stages[0]:
            settings.append(Setting(".".join(path[2:]), tuple(of_stages), *values))
    return settings


def hybrid(one: dict[str, Any], suspects: Sequence[Suspect]) -> dict[str, Any]:
    """Return a block with the settings of these suspects as in the other run."""
    block = copy.deepcopy(one)
    for setting in chain(*suspects):
        for *blocks, last in setting.paths:
            inner = block
            for key in blocks:
                inner = inner[key]
            if setting.other == ABSENT:
                del inner[last]
            else:
                inner[last] = copy.deepcopy(setting.other)
    return block


def suspects_of(settings: Sequence[Setting], problem: Callable[[Sequence[Suspect]], str]) -> list[Suspect]:
    """Return the suspects. A setting that is not valid alone is joined with the fewest others that it needs.

    The two settings that cut a step are joined, because one alone changes the windows of a step.

    Args:
        problem: returns what is wrong with the hybrid of some suspects, or nothing if it is valid.

    Raises:
        ValueError: the hybrid of all settings is not valid.
    """
    groups = groupby(settings, lambda one: one.name.replace("grad_accum", "micro_batch"))
    found: list[Suspect] = [tuple(group) for _, group in groups]
    if found and (wrong := problem(found)):
        raise ValueError(f"a run with all settings of the other one is not valid: {wrong}")
    while invalid := next((one for one in found if problem([one])), None):
        needed = found
        for other in found:
            rest = [one for one in needed if one is not other]
            if other is not invalid and not problem(rest):
                needed = rest
        found = [tuple(chain(*needed)), *(one for one in found if one not in needed)]
    return found


def _differing(one: Any, other: Any, path: Path) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    """Yield the path and both values of each difference. Blocks of different families differ as a whole."""
    blocks = isinstance(one, dict) and isinstance(other, dict)
    if blocks and one.get("family") == other.get("family"):
        for key in {**one, **other}:
            yield from _differing(one.get(key, ABSENT), other.get(key, ABSENT), (*path, key))
    elif one != other:
        yield path, (one, other)


def _decides(path: Path) -> bool:
    """Return whether a setting decides weights or scores. A block has all settings of its preset."""
    match path:
        case ("resources" | "parallel", *_) | ("model" | "optimizer", "preset"):
            return False
        case ("stages", _, key, *_):
            return key not in StageSettings.BOOKKEEPING
        case ("evaluation", key, *_):
            return key not in _UNSCORED
    return True
