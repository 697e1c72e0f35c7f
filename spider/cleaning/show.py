"""Show what was removed from a dataset, for people: counts and examples, or two texts side by side."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.cleaning.evidence import read
from spider.config import Config
from spider.results import Results

#: Characters of a text that are shown.
SHOWN = 4000


def counted(files: Sequence[Path], examples: int) -> Iterator[str]:
    """Yield lines with the number of documents by reason, and the first ones."""
    rows = list(chain.from_iterable(read(path).to_pylist() for path in files))
    for (reason, removed), count in sorted(Counter((r["reason"], r["removed"]) for r in rows).items()):
        yield f"{reason}: {count:,} documents {'removed' if removed else 'reported, and kept'}"
    if not rows:
        yield "no document was removed"
    for row in rows[:examples]:
        yield f"{_name(row)}: {_because(row)}"


def side_by_side(
    files: Sequence[Path], id: str, dataset: str, config: Config, results: Results
) -> Iterator[str]:
    """Yield lines with the text of a removed document beside the text that it repeats.

    Args:
        id: id of the document, or ``PART/ROW``.

    Raises:
        ValueError: no such document was removed, or its raw text is not there any more.
    """
    rows = list(chain.from_iterable(read(path).to_pylist() for path in files))
    row = next((row for row in rows if id in (row["id"], f"{row['part']}/{row['row']}")), None)
    if row is None:
        listed = f"`spider data removed {dataset}` lists some"
        raise ValueError(f"datasets.{dataset}: no document {id!r} was removed; {listed}")
    yield f"{_name(row)}: {_because(row)} (rule {row['rule']})"
    left = _text(config, results, config.raw(dataset), row["part"], row["row"])
    right = row["words"]
    if row["kept_row"] is not None:
        right = _text(config, results, row["kept_dataset"], row["kept_part"], row["kept_row"])
    width = max(20, (shutil.get_terminal_size().columns - 3) // 2)
    yield f"{'removed' if row['removed'] else 'reported':<{width}} | what it repeats"
    for pair in zip_longest(_wrapped(left, width), _wrapped(right or "", width), fillvalue=""):
        yield f"{pair[0]:<{width}} | {pair[1]}".rstrip()


def _name(row: dict[str, Any]) -> str:
    place = f"{row['part']}/{row['row']}"
    return f"{row['id']} ({place})" if row["id"] else place


def _because(row: dict[str, Any]) -> str:
    """Return what a document repeats, and how much."""
    share = "" if row["containment"] is None else f", {row['containment']:.0%}"
    if row["kept_row"] is None:
        return f"{row['reason']}{share}, contains text of {row['kept_id']}"
    kept = f"{row['kept_dataset']}/{row['kept_part']}/{row['kept_row']}"
    return f"{row['reason']}{share}, repeats {row['kept_id'] or kept} of {row['kept_dataset']}"


def _text(config: Config, results: Results, dataset: str, part: str, row: int) -> str:
    """Return the text of a row of a raw file; a question and its answer are two lines."""
    path = results.raw(dataset, part)
    if not path.exists():
        raise ValueError(f"{path}: this raw text is deleted, so it cannot be shown; download it again")
    spec = config.dataset(dataset)
    names = [spec.text_column, *([spec.answer_column] if spec.answer_column else [])]
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row < count:
                columns = file.read_row_group(group, columns=names)
                values = [columns[name].cast(pa.large_binary())[row].as_py() for name in names]
                return "\n".join((value or b"").decode(errors="replace") for value in values)
            row -= count
    raise ValueError(f"{path}: has fewer rows than its evidence names; make the evidence again")


def _wrapped(text: str, width: int) -> list[str]:
    lines = text[:SHOWN].splitlines()
    return list(chain.from_iterable(textwrap.wrap(line, width) or [""] for line in lines))
