"""Keys of earlier versions, and what to do instead."""

from __future__ import annotations

_ALWAYS = "leave it out; this part is always on"
_ONE = "leave it out; it is {} now"

#: The remedy for each removed key, by the end of its path.
REMOVED = {
    "store": "link `raw` of the one results folder into the other",
    "recurrence.injection": _ALWAYS,
    "recurrence.loop_embedding": _ALWAYS,
    "recurrence.halting": _ALWAYS,
    "recurrence.ponder_weight": _ONE.format("0.001"),
    "boundary.stride": "leave it out; patches are learned, or close at white space",
    "moe.implementation": "leave it out; experts are one product wherever their widths allow it",
    "moe.aux_weight": _ONE.format("0.01"),
    "engram.orders": _ONE.format("[3, 4, 5, 6]"),
    "engram.heads": _ONE.format("4"),
    "attention.rope_base": _ONE.format("10,000"),
}


def remedy_for(path: str) -> str | None:
    """Return what to do about a key that earlier versions had, or None."""
    return next((REMOVED[end] for end in REMOVED if f".{path}".endswith(f".{end}")), None)
