"""Files the user has, brought into the shape that encoding reads: a parquet with a text and an id column.

A parquet is linked, never copied; everything else is streamed into parquet a few megabytes at a time.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.files import fsync_dir, replacing

log = logging.getLogger(__name__)

#: A row group is written once it holds this much.
FLUSH_BYTES, FLUSH_ROWS = 16 << 20, 100_000
#: What a JSON escape can make and UTF-8 cannot hold.
HALF_PAIR = re.compile("[\ud800-\udfff]")


def import_local(source: Path, output: Path, dataset: Dataset) -> dict[str, Any]:
    """Make a parquet of a user's file or folder, in constant memory (the largest document has to fit).

    A ``.parquet`` becomes a symbolic link with an absolute target. ``.jsonl`` and ``.jsonl.zst`` keep their
    text and id columns: a missing id is null, a null text stays null, an empty line is skipped. A folder
    gives one document a ``.txt`` file, in order of their paths, which are the ids. Bytes that are not UTF-8
    become U+FFFD; one warning says in how many documents and where first.

    Returns:
        ``name``, ``documents`` and ``bytes`` (size of the parquet).

    Raises:
        ValueError: no such file, unreadable, unknown extension, empty, malformed JSON or no
            text (file and line).
    """
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder; check datasets.*.source.files")
    if source == output or (output.exists() and source.samefile(output) and not output.is_symlink()):
        raise ValueError(f"{source}: is also the output; keep your data outside the results folder")
    try:
        if source.is_dir():
            documents = _txt_folder(source)
        elif source.suffix == ".parquet":
            return _link(source, output)
        elif source.name.endswith((".jsonl", ".jsonl.zst")):
            documents = _jsonl(source, dataset.text_column, dataset.id_column)
        else:
            raise ValueError(
                f"{source}: unknown kind of file; give .parquet, .jsonl, .jsonl.zst or a folder of .txt"
            )
        schema = pa.schema([(name, pa.string()) for name in (dataset.text_column, dataset.id_column)])
        count = _write_documents(documents, output, schema)
    except PermissionError as error:
        raise ValueError(f"{error.filename}: cannot be read or written here; check its permissions") from None
    if count == 0:
        output.unlink()
        raise ValueError(f"{source}: holds no documents")
    return {"name": output.name, "documents": count, "bytes": output.stat().st_size}


def _link(source: Path, output: Path) -> dict[str, Any]:
    try:
        documents = pq.read_metadata(source).num_rows
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise ValueError(
            f"{source}: not a whole parquet file ({str(error).splitlines()[0]}); fetch it again"
        ) from None
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    beside.symlink_to(source.absolute())
    os.replace(beside, output)
    fsync_dir(output.parent)
    return {"name": output.name, "documents": documents, "bytes": source.stat().st_size}


def _write_documents(
    documents: Iterable[tuple[str | None, str | None]], output: Path, schema: pa.Schema
) -> int:
    count = 0
    with replacing(output) as beside, pq.ParquetWriter(beside, schema, compression="zstd") as writer:
        rows: list[tuple[str | None, str | None]] = []
        held = 0

        def flush() -> None:
            columns = zip(*rows, strict=True) if rows else ([], [])
            writer.write_table(pa.table(list(columns), schema=schema))

        for row in documents:
            rows.append(row)
            held += len(row[0] or "")
            count += 1
            if held >= FLUSH_BYTES or len(rows) >= FLUSH_ROWS:
                flush()
                rows.clear()
                held = 0
        flush()
    return count


class _Decoder:
    """UTF-8 with replacement that remembers how many documents needed it and where the first stood."""

    def __init__(self, source: Path) -> None:
        self.source, self.count, self.first = source, 0, ""

    def __call__(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.note(where)
            return raw.decode("utf-8", errors="replace")

    def note(self, where: str) -> None:
        self.count += 1
        self.first = self.first or where

    def report(self) -> None:
        if self.count:
            counted = self.source, self.count, self.first
            log.warning("%s: %d documents held invalid UTF-8, now U+FFFD (first: %s)", *counted)


def _txt_folder(folder: Path) -> Iterator[tuple[str | None, str | None]]:
    decode = _Decoder(folder)
    for path in sorted(folder.rglob("*.txt"), key=lambda p: p.relative_to(folder).as_posix()):
        relative = path.relative_to(folder).as_posix()
        yield decode(path.read_bytes(), relative), relative
    decode.report()


def _jsonl(path: Path, text_column: str, id_column: str) -> Iterator[tuple[str | None, str | None]]:
    decode = _Decoder(path)
    for number, raw in enumerate(_lines(path), 1):
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        replaced = decode.count
        try:
            row = json.loads(decode(raw, f"line {number}"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); mend or delete the line"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: must be an object with a {text_column!r} key (got {type(row).__name__})"
            )
        if text_column not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise ValueError(
                f"{where}: has no {text_column!r} (keys: {keys}); set text_column to the one with the text"
            )
        text, id = row[text_column], row.get(id_column)
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"{where}: {text_column!r} must be text or null (got {type(text).__name__})")
        if text is not None and HALF_PAIR.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            if decode.count == replaced:
                decode.note(f"line {number}")
        yield text, None if id is None else str(id)
    decode.report()


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
            wrong = f"not a valid zstd file ({error})"
            if "Truncated" in str(error):
                wrong = "the zstd file is truncated"
            raise ValueError(f"{path}: {wrong}; fetch it again") from None
