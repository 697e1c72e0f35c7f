"""Files the user has, brought into the shape that encoding reads: a parquet with a text and an id column.

A parquet is linked, never copied; everything else is streamed into parquet a few megabytes at a time.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.files import replacing

log = logging.getLogger(__name__)

#: A row group is written once it holds this much.
FLUSH_BYTES, FLUSH_ROWS = 16 << 20, 100_000
#: What a JSON escape can make and UTF-8 cannot hold.
HALF_PAIR = re.compile("[\ud800-\udfff]")
Document = tuple[str | None, str | None, str]
"""Its text, its id, and where it stands if it held invalid UTF-8, else empty."""


def import_local(source: Path, output: Path, dataset: Dataset) -> dict[str, Any]:
    """Make a parquet of a user's file or folder, in constant memory (the largest document has to fit).

    A ``.parquet`` becomes a symbolic link with an absolute target. ``.jsonl`` and ``.jsonl.zst`` keep their
    text and id columns: a missing id is null, a null text stays null, an empty line is skipped. A folder
    gives one document a ``.txt`` file, in order of their paths, which are the ids. Bytes that are not UTF-8
    become U+FFFD; one warning says in how many documents and where first.

    Returns ``name``, ``documents`` and ``bytes`` (size of the parquet). Raises `ValueError`: no such file,
    unreadable, unknown extension, empty, malformed JSON or no text (file and line).
    """
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder; check datasets.*.source.files")
    if source == output or (output.exists() and source.samefile(output) and not output.is_symlink()):
        raise ValueError(f"{source}: is also the output; keep your data outside the results folder")
    columns = dataset.text_column, dataset.id_column
    try:
        if source.is_dir():
            count = _write(_txt_folder(source), source, output, columns)
        elif source.suffix == ".parquet":
            count = _link(source, output)
        elif source.name.endswith((".jsonl", ".jsonl.zst")):
            count = _write(_jsonl(source, *columns, dataset.format == "chat"), source, output, columns)
        else:
            raise ValueError(
                f"{source}: unknown kind of file; give .parquet, .jsonl, .jsonl.zst or a folder of .txt"
            )
    except PermissionError as error:
        raise ValueError(f"{error.filename}: cannot be read or written here; check its permissions") from None
    return {"name": output.name, "documents": count, "bytes": output.stat().st_size}


def _link(source: Path, output: Path) -> int:
    try:
        documents: int = pq.read_metadata(source).num_rows
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise ValueError(
            f"{source}: not a whole parquet file ({str(error).splitlines()[0]}); fetch it again"
        ) from None
    with replacing(output) as beside:
        beside.unlink(missing_ok=True)  # of a killed process that had our number
        beside.symlink_to(source.absolute())
    return documents


def _write(documents: Iterable[Document], source: Path, output: Path, columns: tuple[str, str]) -> int:
    """Write them as parquet, say what was malformed, and return their number."""
    schema = pa.schema([(name, pa.string()) for name in columns])
    count, malformed, first = 0, 0, ""
    with replacing(output) as beside, pq.ParquetWriter(beside, schema, compression="zstd") as writer:
        for group in _groups(documents):
            texts, ids, where = zip(*group, strict=True)
            writer.write_table(pa.table([texts, ids], schema=schema))
            count += len(group)
            malformed += sum(map(bool, where))
            first = first or next(filter(None, where), "")
        if count == 0:
            raise ValueError(f"{source}: holds no documents")
    if malformed:
        warning = "%s: %d documents held invalid UTF-8, now U+FFFD (first: %s)"
        log.warning(warning, source, malformed, first)
    return count


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents by row group, none of them empty."""
    group: list[Document] = []
    held = 0
    for document in documents:
        group.append(document)
        held += len(document[0] or "")
        if held >= FLUSH_BYTES or len(group) >= FLUSH_ROWS:
            yield group
            group, held = [], 0
    if group:
        yield group


def _decode(raw: bytes) -> tuple[str, bool]:
    """UTF-8 with replacement, and whether it was needed."""
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", errors="replace"), True


def _txt_folder(folder: Path) -> Iterator[Document]:
    for id, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.txt")):
        text, malformed = _decode(path.read_bytes())
        yield text, id, id if malformed else ""


def _jsonl(path: Path, text_column: str, id_column: str, chat: bool) -> Iterator[Document]:
    for number, raw in enumerate(_lines(path), 1):
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        line, malformed = _decode(raw)
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); mend or delete the line"
            ) from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(f"{where}: must be an object with a {text_column!r} key (got {kind})")
        if text_column not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise ValueError(
                f"{where}: has no {text_column!r} (keys: {keys}); set text_column to the one with the text"
            )
        text, id = row[text_column], row.get(id_column)
        if chat and isinstance(text, list):
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"{where}: {text_column!r} must be text or null (got {type(text).__name__})")
        if text is not None and HALF_PAIR.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            malformed = True
        yield text, None if id is None else str(id), f"line {number}" if malformed else ""


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, decompressed where its name ends in .zst: any number of frames, each to its end."""
    with path.open("rb") as f:
        if path.suffix != ".zst":
            yield from f
            return
        try:
            yield from io.BufferedReader(pa.CompressedInputStream(f, "zstd"))
        except OSError as error:
            if error.errno:
                raise
            truncated = "Truncated" in str(error)
            wrong = "the zstd file is truncated" if truncated else f"not a valid zstd file ({error})"
            raise ValueError(f"{path}: {wrong}; fetch it again") from None
