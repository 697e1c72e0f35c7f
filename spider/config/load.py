"""From a file, or a parsed mapping, to a configuration that is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from spider.config.check import problems_of
from spider.config.explain import ConfigError, explain
from spider.config.grid import expand_grids
from spider.config.model import model_block
from spider.config.paths import siblings
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
    config.remember(written, sweeps)
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
