"""Settings that come from the command line or the environment, laid on the configuration.

They go where the file has its own (`spider.config.paths`), and the whole is checked as a file is. So nothing
can be asked for that a file could not, and the messages are the same, but begin with what was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from spider.config.explain import ConfigError, key_path
from spider.config.load import load_config
from spider.config.paths import Path, put, resolve
from spider.config.schema import Config


@dataclass(frozen=True)
class Given:
    """A setting that is not from the file."""

    origin: str
    """What messages call it: ``--lr``, ``LR``, ``lr=4e-3``."""
    key: str
    value: Any
    yields: bool = False
    """To another of the same setting, as a variable does to the command line."""

    @classmethod
    def parse(cls, origin: str, key: str, value: Any, yields: bool = False) -> Given:
        """Of a value in YAML, where ``4e-3`` is a number too (YAML 1.1 wants ``4.0e-3``); or of a flag's.

        Raises:
            ConfigError: it is not YAML.
        """
        try:
            plain = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            raise ConfigError(f"{origin}: {value!r} is not a value as YAML has them") from None
        if isinstance(plain, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", plain):
            plain = float(plain)
        return cls(origin, key, plain, yields)


def with_settings(config: Config, run: str, stage: str, given: Sequence[Given]) -> tuple[Config, list[Given]]:
    """The configuration with these settings of one stage, and those that were not yielded.

    Raises:
        ConfigError: no such setting, one that is given twice, or what comes of it is refused.
    """
    index = config.stage(run, stage).index
    plain = {**config.written(), "scaling": None}  # there are no grids left to fit a law to
    block = plain["runs"][run]
    used: dict[Path, Given] = {}
    for one in sorted(given, key=lambda one: (one.yields, one.key.count("."))):  # a model before its parts
        path = resolve(one.origin, one.key, block, stage)
        if path not in used:
            used[path] = one
            put(block, path, one.value)
        elif not one.yields:
            raise ConfigError(f"{used[path].origin} and {one.origin} are the same setting; give one of them")
    for one in used.values():  # once more, since one may hide another
        resolve(one.origin, one.key, block, stage)
    try:
        return load_config(plain), [one for one in given if one in used.values()]
    except ConfigError as error:
        places = {_place(run, index, path): one.origin for path, one in used.items()}
        raise ConfigError("\n".join(_renamed(line, places) for line in str(error).splitlines())) from None


def _place(run: str, index: int, path: Path) -> str:
    """How a message about the file calls a setting."""
    inside = ("stages", index, *path[2:]) if path[0] == "stages" else path
    return key_path(("runs", run, *inside))


def _renamed(line: str, places: dict[str, str]) -> str:
    for place, origin in places.items():
        if line.startswith((f"{place}:", f"{place}.", f"{place}[")):
            return origin + line.removeprefix(place)
    return line
