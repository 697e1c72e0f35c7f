"""Import the user's own files: each becomes a parquet file with the configured columns.

A parquet file is linked. Every other file is read a few megabytes at a time and written as parquet, so memory
does not grow with the file; only the largest document, or an array of JSON, has to fit.

JSON and CSV are read by the standard library instead of pyarrow. The readers of pyarrow reject a document
larger than a block, ids of mixed types, and bytes that are not UTF-8, and their errors lack the line.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, NamedTuple

from pydantic import Field

from spider.common.files import replacing
from spider.config.block import ConfigError
from spider.config.data import Dataset, Files
from spider.data.listing import (
    ARROW,
    COMPRESSIBLE,
    KINDS,
    Listing,
    TakingSource,
    below,
    kind_of,
    list_files,
    texts_in,
)

log = logging.getLogger(__name__)

#: Size of a row group: bytes of text, and rows.
FLUSH_BYTES, FLUSH_ROWS = 16 << 20, 100_000
#: Bytes of a text that are read at a time.
CHUNK = 1 << 20
#: Bytes of the largest JSON array, which memory holds whole.
MOST_ARRAY = 200_000_000
#: Rows of a table that are decoded at a time.
TABLE_ROWS = 1000
#: Most keys of rows in a message.
MOST_KEYS = 50
#: Most files whose columns are looked at before a workflow starts.
MOST_PROBED = 100
WORD = re.compile(r"\w+")
#: JSON escapes and bytes that are not UTF-8 become lone surrogates, which UTF-8 cannot hold.
SURROGATE = re.compile("[\ud800-\udfff]")


class LocalSource(TakingSource):
    """Files you have: parquet, arrow, feather, jsonl, json, csv and txt (the last four also .gz or .zst), or
    folders of them. Globs are expanded, sorted."""

    LISTS: ClassVar = frozenset({"files"})

    files: Annotated[list[str], Field(min_length=1)]
    """Paths and globs; one part each. Each file of a folder is a part, but a folder of txt is one part."""

    @cached_property
    def listing(self) -> Listing:
        """The files of each part. A process lists them once."""
        return list_files(self.files)

    def files_of_parts(self) -> list[str]:
        return list(self.listing.files)

    def own_files(self, item: str) -> list[str]:
        if self.take is None:
            return self.listing.files.get(item, [item])
        return list(chain.from_iterable(self.listing.files.values()))

    def left_out(self) -> dict[str, list[str]]:
        return self.listing.left_out

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        if self.take is None:
            item = self.item(part)
            import_local(Path(item), output, dataset, self.own_files(item))
            return
        from spider.data.take import take_files

        folder = output.with_name(f".{output.name}.imported")
        files = {name: folder / f"{i}.parquet" for i, name in enumerate(self.files_of_parts())}
        try:
            for name, imported in files.items():
                import_local(Path(name), imported, dataset, self.listing.files[name])
            take_files(files, self.section(part), output, dataset)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def probe(self, items: list[str], dataset: Dataset) -> int:
        """Look at the columns, or at the first document, of at most `MOST_PROBED` files."""
        # With `take`, every part is taken from all files.
        size = super().probe(items if self.take is None else items[:1], dataset)
        for name in (items if self.take is None else self.files_of_parts())[:MOST_PROBED]:
            _look_at(Path(name), dataset)
        return self.taken(size)

    def identity(self, item: str, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that decide the content of an imported file.

        The configured columns are among them, because the file has these columns. Keys at their default are
        left out.
        """
        decides = super().identity(item, dataset)
        return decides if self.take is None and kind_of(item) == ".parquet" else decides | imported(dataset)

    def learned_files(self) -> Files:
        try:
            paths = self.files_of_parts()
        except ConfigError:  # a pattern without a match stands for itself; another check reports it
            paths = self.files
        return Files("local", frozenset(map(os.path.realpath, paths)), overlapping=True)

    @property
    def description(self) -> str:
        return "local files"


def imported(dataset: Dataset) -> dict[str, Any]:
    """Return the settings of a dataset that decide the content of an imported file."""
    decides: dict[str, Any] = {}
    defaults = tuple(Dataset.model_fields[name].default for name in ("text_column", "id_column"))
    if dataset.columns != defaults:
        decides["columns"] = list(dataset.columns)
    if dataset.format != "text":
        decides["format"] = dataset.format
    if dataset.separator is not None:
        decides["separator"] = dataset.separator
    return decides


# ------------------------------------------------------------------------------------------------- import


class Row(NamedTuple):
    """One document as the file has it."""

    where: str
    """Its place in the file, for messages: ``line 3``."""
    values: Any
    """Its columns by name; any JSON value until it is checked."""
    malformed: bool
    """Whether it held bytes that are not UTF-8."""


class Document(NamedTuple):
    """One document as it is written."""

    values: list[str | None]
    """One for each of `Dataset.columns`."""
    malformed: str
    """Its place in the file if it held invalid UTF-8, else empty."""


def import_local(source: Path, output: Path, dataset: Dataset, texts: Iterable[str] | None = None) -> None:
    """Make a parquet file of a user's file, or of a folder of texts.

    A ``.parquet`` becomes a symbolic link with an absolute target. All other kinds keep `Dataset.columns`.
    A ``.jsonl`` has one object a line. A ``.json`` has an array of objects, or one object a line. A ``.csv``
    names its columns in the first line. A ``.txt`` is one document, and its name is the id. Each of these may
    also end in ``.gz`` or ``.zst``. A ``.arrow`` or ``.feather`` is an Arrow file or stream. A folder gives
    one document for each text in it, or of ``texts``, in order of their paths, which are the ids.

    A missing value is null; an empty line is skipped. Bytes that are not UTF-8 become U+FFFD, with a warning.
    A ``.txt`` may be cut at `Dataset.separator`: then ids end in ``#1`` and so on.

    Raises:
        ValueError: the file is missing, unreadable, of an unknown kind or malformed, or it lacks a
            column that a setting names; the message has the file and the line.
    """
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder; check datasets.*.source.files")
    if source == output or (output.exists() and source.samefile(output) and not output.is_symlink()):
        raise ValueError(f"{source}: is also the output; keep your data outside the results folder")
    kind = _known_kind(source)
    try:
        if kind == ".parquet":
            _schema(source)
            with replacing(output) as temporary:
                temporary.symlink_to(source.absolute())
        elif kind == ".txt":
            _write(_texts(source, dataset, texts), source, output, dataset)
        else:
            _write(_documents(source, kind, dataset), source, output, dataset)
    except PermissionError as error:
        raise ValueError(f"{error.filename}: cannot be read or written; check its permissions") from None


def _known_kind(source: Path) -> str:
    """Return the kind of a file, or of the files in a folder. Raise `ValueError` for an unknown one."""
    kind = ".txt" if source.is_dir() else kind_of(source.name)
    if not kind:
        raise ValueError(f"{source}: unknown kind of file; give {KINDS}")
    return kind


def _look_at(source: Path, dataset: Dataset) -> None:
    """Raise `ValueError` if a file lacks a column, or its first document is malformed."""
    kind = _known_kind(source)
    if kind == ".parquet":
        from spider.data.documents import columns_in

        columns_in(_schema(source), source, dataset)
    elif kind != ".txt":
        next(_documents(source, kind, dataset), None)
    else:
        for path in texts_in(source)[:MOST_PROBED] if source.is_dir() else [source]:
            with _opened(path):  # which looks at the coding
                pass


def _schema(source: Path) -> Any:
    """Return the schema of a parquet file. Raise `ValueError` if the file is incomplete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(source)
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise ValueError(
            f"{source}: not a complete parquet file ({str(error).splitlines()[0]}); copy it again"
        ) from None


# ----------------------------------------------------------------------------------------------- documents


def _texts(source: Path, dataset: Dataset, texts: Iterable[str] | None) -> Iterator[Document]:
    """Yield a text, or each of these texts of a folder, as one document."""
    for setting, column in dataset.optional.items():
        if column not in (dataset.text_column, dataset.id_column):
            remedy = f"set {setting} to {dataset.id_column!r}, its path"
            raise ValueError(
                f"{source}: a text has no column {column!r}; {remedy}, or leave "
                f"{setting.removesuffix('.column')} out"
            )
    if texts is None:
        texts = map(str, texts_in(source)) if source.is_dir() else [str(source)]
    for path in map(Path, texts):
        id = path.relative_to(source).as_posix() if source.is_dir() else path.name
        with _opened(path) as f:
            for number, (text, malformed) in enumerate(_pieces(f, dataset.separator), 1):
                own_id = f"{id}#{number}" if dataset.separator else id
                values = {dataset.id_column: own_id, dataset.text_column: text}
                yield Document([values[name] for name in dataset.columns], own_id if malformed else "")


def _pieces(f: BinaryIO, separator: str | None) -> Iterator[tuple[str, bool]]:
    """Yield a text, or what is between separators and not blank, and whether bytes of it were not UTF-8."""
    if separator is None:
        yield _decode(f.read())
        return
    pattern = re.compile(re.escape(separator.encode()).replace(b"\\\n", b"\r?\n"))
    left = b""
    while new := f.read(max(CHUNK, len(left))):
        *pieces, left = pattern.split(left + new)
        yield from (_decode(piece) for piece in pieces if piece.strip())
    if left.strip():
        yield _decode(left)


def _documents(source: Path, kind: str, dataset: Dataset) -> Iterator[Document]:
    """Yield the documents of a JSON or CSV file; `ValueError` with the line for one that does not fit."""
    text_column, *others = dataset.columns
    missing = set(others)
    keys: set[str] = set()
    for row in _arrow_rows(source, dataset) if kind in ARROW else _rows(source, kind):
        place, values = f"{source}, {row.where}", row.values
        if not isinstance(values, dict):
            got = type(values).__name__
            raise ValueError(f"{place}: must be an object with a {text_column!r} key (got {got})")
        if text_column not in values:
            raise ValueError(
                f"{source}, {row.where}: has no {text_column!r} (keys: {_listed(values)}); set text_column "
                "to the one with the text"
            )
        if missing:
            missing -= values.keys()
            if len(keys) < MOST_KEYS:
                keys |= values.keys()
        text = values[text_column]
        if dataset.format == "chat" and isinstance(text, list):
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"{place}: {text_column!r} must be text or null (got {type(text).__name__})")
        plain = [text]
        for name in others:
            value = values.get(name)
            if name != dataset.id_column and isinstance(value, list | dict):
                got = type(value).__name__
                raise ValueError(f"{place}: {name!r} must be text, a number or null (got {got})")
            plain.append(None if value is None else str(value))
        valid = [_without_surrogates(value) for value in plain]
        yield Document(valid, row.where if row.malformed or valid != plain else "")
    for setting, column in dataset.optional.items() if keys else ():
        if column in missing:
            raise ValueError(
                f"{source}: no line has {column!r} (keys: {_listed(sorted(keys))}); set {setting} to one of "
                f"them, or leave {setting.removesuffix('.column')} out"
            )
    if keys and dataset.id_column in missing:
        instead = "" if dataset.split_by else ", the text itself decides the split"
        log.warning("%s: no line has %r%s", source, dataset.id_column, instead)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys)) or "none"


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of known kinds in a folder and below it; `ValueError` if there is none."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    found = below(path, {}) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"{path}: holds no file of a known kind; give {KINDS}")
    for file in found:
        _known_kind(file)
    return found


def _strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(inner)


def all_texts(file: Path, fewest: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each document in a file of any kind, and its texts, whatever their columns.

    A text is a string of ``fewest`` words or more.

    Raises:
        ValueError: the file is malformed or holds no text.
    """
    found = False
    for where, values, _ in values_of(file):
        strings = (_without_surrogates(text) or "" for text in _strings_in(values))
        texts = [text for text in strings if len(WORD.findall(text)) >= fewest]
        found |= bool(texts)
        yield where, texts
    if not found:
        raise ValueError(f"{file}: holds no text of {fewest} words or more; correct it, or leave it out")


def values_of(file: Path) -> Iterator[Row]:
    """Yield each document of a file, which may lie in a zip if it is text."""
    kind = _known_kind(file)
    if kind == ".txt":
        with _opened(file) as f:
            yield Row("text", *_decode(f.read()))
    elif kind in COMPRESSIBLE:
        yield from _rows(file, kind)
    else:
        import pyarrow as pa
        from pyarrow.dataset import dataset

        try:
            batches = dataset(file, format=kind[1:]).to_batches(batch_size=TABLE_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from (Row(f"row {number}", values, False) for number, values in enumerate(rows))
        except pa.ArrowException as error:
            problem = f"not a complete {kind[1:]} file ({str(error).splitlines()[0]})"
            raise ValueError(f"{file}: {problem}; copy it again") from None


def _without_surrogates(text: str | None) -> str | None:
    """Replace lone surrogates by U+FFFD."""
    if text is None or not SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# -------------------------------------------------------------------------------------------------- rows


def _rows(source: Path, kind: str) -> Iterator[Row]:
    """Yield the rows of a JSON or CSV file; errors begin with the file and the line."""
    with _opened(source) as f:
        array = kind == ".json" and f.peek(1).lstrip().startswith(b"[")
        rows = _table(f) if kind == ".csv" else _elements(f, source) if array else _lines(f)
        try:
            yield from rows
        except _Malformed as error:
            other = " (a .json file holds an array of objects, or one object a line)"
            hint = other if kind == ".json" and not array else ""
            raise ValueError(f"{source}, {error}; correct the file{hint}") from None


def _decoded(text: str) -> Any:
    """Decode JSON. Python reads no integer of more than 4,300 digits, so beside one all become text."""
    try:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return json.loads(text, parse_int=str)
    except RecursionError:
        raise json.JSONDecodeError("too many brackets in each other", text, 0) from None


class _Malformed(Exception):
    """A problem in a file; the message begins with the line."""


def _lines(f: BinaryIO) -> Iterator[Row]:
    """Yield the objects of a file that has one per line."""
    for number, raw in enumerate(f, 1):
        if not raw.strip():
            continue
        line, malformed = _decode(raw)
        try:
            value = _decoded(line)
        except json.JSONDecodeError as error:
            column = min(error.pos, len(line.rstrip())) + 1  # not beyond the end of the line
            raise _Malformed(f"line {number}: not valid JSON ({error.msg} at column {column})") from None
        yield Row(f"line {number}", value, malformed)


def _elements(f: BinaryIO, source: Path) -> Iterator[Row]:
    """Yield the elements of a JSON array, which is read whole."""
    raw = f.read(MOST_ARRAY + 1)
    if len(raw) > MOST_ARRAY:
        remedy = "write one object a line, as `jq -c '.[]'` does"
        raise ValueError(f"{source}: an array of more than {MOST_ARRAY // 10**6} MB; {remedy}")
    try:
        elements = _decoded(raw.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise _Malformed(f"line {error.lineno}: not valid JSON ({problem})") from None
    yield from (Row(f"element {number}", value, False) for number, value in enumerate(elements, 1))


def _table(f: BinaryIO) -> Iterator[Row]:
    """Yield the rows of a CSV file as mappings from the names in its first line."""
    csv.field_size_limit((1 << 31) - 1)
    reader = csv.reader(io.TextIOWrapper(f, "utf-8", errors="surrogateescape", newline=""), strict=True)
    before = 0
    try:
        names = next(reader, [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise _Malformed(f"line 1: names {twice[0]!r} twice")
        before = reader.line_num
        for values in reader:
            if values and len(values) != len(names):
                fields = f"{len(values)} field{'s' if len(values) > 1 else ''}"
                raise _Malformed(f"line {before + 1}: has {fields}, the first line has {len(names)}")
            if values:
                yield Row(f"line {before + 1}", dict(zip(names, values, strict=True)), False)
            before = reader.line_num
    except csv.Error as error:
        raise _Malformed(f"line {before + 1}: not valid CSV ({error})") from None


def _arrow_rows(source: Path, dataset: Dataset) -> Iterator[Row]:
    """Yield the rows of an arrow file or stream, with the configured columns."""
    import pyarrow as pa

    from spider.data.documents import as_text, columns_in

    with pa.memory_map(str(source)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        number = 0
        try:
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            columns_in(reader.schema, source, dataset)
            columns = [name for name in reader.schema.names if name in dataset.columns]
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                chosen = batch.select(columns)
                for name in {dataset.text_column, dataset.id_column}.intersection(columns):
                    column = as_text(chosen[name], is_id=name == dataset.id_column)
                    chosen = chosen.set_column(columns.index(name), name, column)
                for begin in range(0, len(batch), TABLE_ROWS):
                    for values in chosen.slice(begin, TABLE_ROWS).to_pylist():
                        number += 1
                        yield Row(f"row {number}", values, False)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            problem = f"not a complete arrow or feather file, or not UTF-8 ({str(error).splitlines()[0]})"
            raise ValueError(f"{source}: {problem} after row {number}; copy it again") from None


# ------------------------------------------------------------------------------------------------- bytes


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed if its name ends in .gz or .zst, after its byte order mark of UTF-8.

    Raises `ValueError` for another coding.
    """
    with path.open("rb") as packed:
        opened: Any = packed
        if path.suffix == ".gz":
            opened = gzip.GzipFile(fileobj=packed)
        elif path.suffix == ".zst":
            import pyarrow as pa

            opened = io.BufferedReader(pa.CompressedInputStream(packed, "zstd"))
        try:
            begin = opened.peek(4)[:4]
            if begin.startswith(codecs.BOM_UTF8):
                opened.read(len(codecs.BOM_UTF8))
            # Without a mark, every second byte of the first two characters is 0 in most languages.
            elif begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or begin.count(0) > 1:
                raise ValueError(
                    f"{path}: is UTF-16 or UTF-32; export it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
                )
            yield opened
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            name = "gzip" if path.suffix == ".gz" else "zstd"
            truncated = isinstance(error, EOFError) or "Truncated" in str(error)
            wrong = f"the {name} file is truncated" if truncated else f"not a valid {name} file ({error})"
            raise ValueError(f"{path}: {wrong}; copy it again") from None


def _decode(raw: bytes) -> tuple[str, bool]:
    """Decode UTF-8 with replacement, and return whether anything was replaced."""
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", errors="replace"), True


# ----------------------------------------------------------------------------------------------- writing


def _write(documents: Iterable[Document], source: Path, output: Path, dataset: Dataset) -> None:
    """Write documents as parquet, and warn of malformed ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in dataset.columns])
    count = size = 0
    malformed: list[str] = []
    group: list[Document] = []
    with replacing(output) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for document in chain(documents, [None]):
            if group and (document is None or size >= FLUSH_BYTES or len(group) >= FLUSH_ROWS):
                columns = zip(*(one.values for one in group), strict=True)
                writer.write_table(pa.table(list(map(list, columns)), schema=schema))
                group, size = [], 0
            if document is not None:
                group.append(document)
                size += len(document.values[0] or "")
                count += 1
                malformed += [document.malformed] if document.malformed else []
    if count == 0:
        log.warning("%s: holds no documents", source)
    if malformed:
        warning = "%s: %d documents had invalid UTF-8, now U+FFFD (first: %s)"
        log.warning(warning, source, len(malformed), malformed[0])
