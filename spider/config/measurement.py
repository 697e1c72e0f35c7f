"""Measurements of your own: modules that ``evaluation.measurements`` names as they are imported.

Such a module has ``Config``, a `Block` with its settings, and ``measure(subject, settings) -> Result`` (or
None). It imports torch, pyarrow and numba inside its functions, because the configuration imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from spider.config.block import Block, ConfigError, explain
from spider.config.imports import import_named


def measurement(name: str) -> ModuleType:
    """Import a measurement by name.

    Raises:
        ConfigError: the module cannot be imported, or lacks ``Config`` or ``measure``.
    """
    module = import_named("measurement", name, name, own=())
    block = getattr(module, "Config", None)
    if not (
        isinstance(block, type) and issubclass(block, Block) and callable(getattr(module, "measure", None))
    ):
        raise ConfigError(f"the module {name} needs `Config`, a spider.config.block.Block, and `measure`")
    return module


def measurement_problems(measurements: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the measurements of a run, each with its key."""
    for name, settings in measurements.items():
        key = f"evaluation.measurements.{name}"
        try:
            measurement(name).Config(**settings)
        except ConfigError as error:
            yield f"{key}: {error}"
        except ValidationError as error:
            yield from (f"{key}.{explain(one)}" for one in error.errors())
