"""Read the rows that are measured on a GPU (`rows.toml`), and tell which goals they reach."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TABLE = tomllib.loads(Path(__file__).with_name("rows.toml").read_text())
WINDOWS = {"headline": 448, "gpt-d12": 256}
"""Windows of a step."""
OTHER = ", other"
"""Ends the name of a row that another checkout ran."""


class Row(NamedTuple):
    """A row; `rows.toml` says what its parts are."""

    arguments: dict[str, Any]
    module: str = "train_throughput"
    seconds: float = 150
    gigabytes: float = 40
    beside: bool = False
    carried: bool = False
    real: bool = False
    same: str | None = None


def row_of(name: str, micro: int | None = None, **parts: Any) -> Row:
    """Return a row of the table."""
    known = {part: parts.pop(part) for part in Row._fields if part in parts}
    if micro:
        shape = {"micro_batch": WINDOWS[parts["what"]] // micro, "grad_accum": micro}
        parts.setdefault("changes", {}).setdefault("defaults", {}).update(shape)
    return Row(parts, **known)


ROWS = {row["name"]: row_of(**row) for row in TABLE["rows"]}


def goals_of(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each goal whose figures are there."""
    speed = {name: row["tokens_per_second"] for name, row in rows.items() if "tokens_per_second" in row}
    own = {name: of for name, of in speed.items() if not name.endswith(OTHER)}
    for goal in TABLE["goals"]:
        best = max((of for name, of in own.items() if name.startswith(goal["best"])), default=0)
        over = speed.get(goal["over"]) if "over" in goal else 1
        if best and over:
            yield f"{goal['aim']}: {told(best / over >= goal['least'])} ({best / over:,.4g})"
    for name, row in rows.items():
        if row.get("peak_memory"):
            share = row["peak_memory"] / row["described_memory"]
            yield f"{name}: peak within 5% of described: {told(0.95 <= share <= 1.05)} ({share:.3f})"
        twin = ROWS[name].same if name in ROWS else None
        if twin and "weights" in row and "weights" in rows.get(twin, {}):
            yield f"{name}: the same weights as {twin}: {told(row['weights'] == rows[twin]['weights'])}"


def told(met: bool) -> str:
    return "met" if met else "missed"
