"""Show what was removed from a dataset, for people: counts and examples, or two texts side by side."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np

from spider.common.results import Results
from spider.config import Config
from spider.data import chat
from spider.data.documents import as_bytes, read_documents, row_counts

#: Characters of a text that are shown.
SHOWN = 4000
#: A row of evidence.
Row = dict[str, Any]


def counted(rows: list[Row], examples: int) -> Iterator[str]:
    """Yield lines with the number of documents by reason, and the first ones."""
    for reason, count in sorted(Counter(row["reason"] for row in rows).items()):
        yield f"{reason}: {count:,} removed"
    if not rows:
        yield "no document was removed"
    yield from islice(map(_described, rows), examples)


def side_by_side(rows: list[Row], id: str, dataset: str, config: Config, results: Results) -> Iterator[str]:
    """Yield lines with the text of a removed document beside what it repeats.

    Args:
        id: id of the document, or ``PART/ROW``.

    Raises:
        ValueError: no such document was removed, or its raw text is deleted.
    """
    row = next((row for row in rows if id in (row["id"], f"{row['part']}/{row['row']}")), None)
    if row is None:
        listed = f"`spider data removed {dataset}` lists some"
        raise ValueError(f"datasets.{dataset}: no document {id!r} was removed; {listed}")
    yield f"{_described(row)} (rule {row['rule']})"
    left = _text(config, results, config.raw(dataset), row["part"], row["row"])
    right = row["words"] or _text(config, results, row["kept_dataset"], row["kept_part"], row["kept_row"])
    width = max(20, (shutil.get_terminal_size().columns - 3) // 2)
    lines = zip_longest(_wrapped(left, width), _wrapped(right, width), fillvalue="")
    for pair in chain([("removed", "what it repeats")], lines):
        yield f"{pair[0]:<{width}} | {pair[1]}".rstrip()


def _described(row: Row) -> str:
    """Return a document, why it was removed, and what it repeats."""
    place, kept = f"{row['part']}/{row['row']}", f"{row['kept_part']}/{row['kept_row']}"
    name = f"{row['id']} ({place})" if row["id"] else place
    share = "" if row["containment"] is None else f", {row['containment']:.0%}"
    of = f" of {row['kept_dataset']}" if row["kept_dataset"] else ""
    words = f": {row['words']!r}" if row["words"] else ""
    return f"{name}: {row['reason']}{share}, repeats {row['kept_id'] or kept}{of}{words}"


def _text(config: Config, results: Results, dataset: str, part: str, row: int) -> str:
    """Return the text of a row of a raw file; a question and its answer are two lines."""
    spec, rows = config.dataset(dataset), np.array([row])
    batches = read_documents(results.raw(dataset, part), spec, row_counts(), rows)
    (text,) = (text for batch in batches for text in as_bytes(batch.texts))
    return (chat.plain(text) if spec.format == "chat" else text).decode(errors="replace")


def _wrapped(text: str, width: int) -> list[str]:
    lines = text[:SHOWN].splitlines()
    return list(chain.from_iterable(textwrap.wrap(line, width) or [""] for line in lines))
