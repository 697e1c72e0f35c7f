"""Import families of models, sources of text and measurements by the name that a configuration gives them.

Those that come with Spider have short names. Any other has the name that Python imports it by. Importing runs
code, and a checkpoint or a compressed file may come from anywhere, so a name in it is not enough. Besides its
own modules Spider imports two kinds. An installed package registers a module (entry points of the group
`ENTRY_POINTS`). The user names one (`allow_import`): in the configuration, with ``--family-module`` or by
``trust_remote_code=True``.

A measurement of the user, which ``evaluation.measurements`` names, has ``Config``, a `Block` with its
settings, and ``measure(subject, settings) -> Result`` (or None). It imports torch, pyarrow and numba inside
its functions, because the configuration imports it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from spider.config.block import Block, ConfigError, explain, nearest

#: An installed package lists its families here, each as ``name = "my_package.my_family"``.
ENTRY_POINTS = "spider.families"
#: Names that the user of this process gave.
_allowed: set[str] = set()


def allow_import(name: str) -> None:
    """Let this process import a module because its user named it. This imports nothing."""
    _allowed.add(name)


def allowed_imports() -> list[str]:
    """Return the names that the user of this process gave."""
    return sorted(_allowed)


def may_import(name: str) -> bool:
    """Return whether an installed package registers this name or the user gave it."""
    return name in _allowed or any(name == point.value for point in entry_points(group=ENTRY_POINTS))


def import_named(what: str, name: str, package: str, own: Collection[str], part: str = "") -> ModuleType:
    """Import a family, a source or a measurement, or the module ``part`` of its package.

    Args:
        what: ``family``, ``source`` or ``measurement``, for messages.
        own: names that come with Spider.

    Raises:
        ConfigError: the package does not exist or cannot be imported.
    """
    try:
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    except (ModuleNotFoundError, ValueError):
        hint = f"one of your own is named as it is imported{nearest(name, own)}"
        raise ConfigError(f"no {what} {name!r}; {hint}") from None
    module = f"{package}.{part}" if part else package
    try:
        return import_module(module)
    except Exception as error:
        reason = f"{module} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(f"{what} {name!r}: {reason}") from error


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
