"""Keys of earlier versions, and what to do instead."""

from __future__ import annotations

#: The remedy for each removed key, by the end of its path.
REMOVED = {
    "store": "link `raw` of the one results folder into the other",
}


def remedy_for(path: str) -> str | None:
    """Return what to do about a key that earlier versions had, or None."""
    return next((REMOVED[end] for end in REMOVED if f".{path}".endswith(f".{end}")), None)
