"""From a file, and settings that are given beside it, to a configuration that is checked.

Settings of the command line or the environment go where the file has its own (`spider.config.paths`), and the
whole is checked as a file is: so nothing can be asked for that a file could not, in the same messages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from spider.config.check import problems_of
from spider.config.explain import ConfigError, explain, key_path
from spider.config.grid import expand_grids
from spider.config.model import model_block
from spider.config.paths import put, resolve, siblings
from spider.config.schema import Config


def load_config(source: Path | dict[str, Any]) -> Config:
    """Validate a YAML file or a parsed mapping.

    Raises:
        ConfigError: names the key of every problem, such as
            ``runs.demo.stages[1].tokens: must be positive (got -5)``.
    """
    written = _read(source) if isinstance(source, Path) else source
    if not isinstance(written, dict):
        raise ConfigError("the configuration must be a mapping with the keys datasets and runs")
    sweeps: dict[str, list[str]] = {}
    if isinstance(runs := written.get("runs"), dict):
        runs, sweeps = expand_grids(runs)
        written = {**written, "runs": runs}
    raw = {**written, "runs": _expand_models(runs)}
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(e, siblings(raw)) for e in error.errors())) from None
    config.written.update(written)
    config.sweeps.update(sweeps)
    if problems := problems_of(config):
        raise ConfigError("\n".join(problems))
    return config


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _expand_models(runs: Any) -> Any:
    """Replace ``model: tiny`` and ``model: {preset: tiny, ...}`` by the preset's full mapping."""
    if not isinstance(runs, dict):
        return runs
    expanded = {}
    for name, run in runs.items():
        if isinstance(run, dict) and "model" in run:
            try:
                run = {**run, "model": model_block(run["model"])}
            except ConfigError as error:
                raise ConfigError(f"runs.{name}.model.{error}") from None
        expanded[name] = run
    return expanded


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
    plain = copy.deepcopy({**config.written, "scaling": None})  # there are no grids left to fit a law to
    block = plain["runs"][run]
    used: dict[tuple[str, ...], Given] = {}
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
        text = str(error)
        for path, one in used.items():  # in the words in which it was given
            inside = ("stages", index, *path[2:]) if path[0] == "stages" else path
            place = re.escape(key_path(("runs", run, *inside)))
            text = re.sub(rf"^{place}(?=[:.\[])", one.origin.replace("\\", r"\\"), text, flags=re.MULTILINE)
        raise ConfigError(text) from None
