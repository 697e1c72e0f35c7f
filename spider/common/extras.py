"""Extras: installed packages that add commands, rules and blocks of the configuration.

Those of this repository are in ``extras/``, and the core imports nothing of them. Entry points name what an
extra adds. Each is imported only where it is used:

    spider.commands   name: words of a command (``verdicts``, ``data index-text``); value: its click command
    spider.rules      name: of the extra; value: path of a file of rules, included after those of the core
    spider.config     name: a key at the top of the configuration; value: a pydantic type of what stands there

A type of the configuration may have a function ``expand(value, runs)``. It gets the block, and the runs of
the configuration as they are written, and returns runs to add to them. The attribute ``hidden`` of a block
names runs without a page and a row of the comparison. Figures need no entry point, because all views show
the results in the folder of a stage (`spider.evaluation.result`).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

#: What the extras of this repository add, by command or by key, to say which one is not installed.
KNOWN = dict.fromkeys(("forecast", "ladders", "try", "verdicts"), "lab")
KNOWN |= dict.fromkeys(("audit", "batch", "data index-text", "seen", "trace"), "trust")


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    return {
        point.name: point for point in sorted(entry_points(group=f"spider.{group}"), key=lambda p: p.name)
    }


def commands(group: str) -> dict[str, str]:
    """Return the commands in a group, such as ``data`` ("": the outermost), each with its distribution."""
    found = {}
    for words, point in _points("commands").items():
        before, _, name = words.rpartition(" ")
        if before == group:
            found[name] = point.dist.name if point.dist else point.module
    return found


def command(words: str) -> Any:
    """Import the command of these words, or return None if there is none."""
    point = _points("commands").get(words)
    return point and point.load()


def rules() -> list[Path]:
    """Return the files of rules."""
    return [point.load() for point in _points("rules").values()]


def config_keys() -> list[str]:
    """Return the keys of the configuration that extras have."""
    return [*_points("config")]


def config_type(key: str) -> Any:
    """Import the type of a key of the configuration, or return None if no extra has that key."""
    point = _points("config").get(key)
    return point and point.load()


def lacking(what: str) -> str | None:
    """Return what to do about a command or a key of an extra that is not installed, or None for any other."""
    if (extra := KNOWN.get(what)) is None:
        return None
    remedy = f"run `pip install ./extras/{extra}` in Spider's folder"
    return f"is of the extra {extra}, which is not installed; {remedy}"
