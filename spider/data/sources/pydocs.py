"""The embedded corpus: text of every machine where Spider is installed.

An installed Python has tens of megabytes of edited English. These are the docstrings of the standard library
and of every package that Spider depends on, and the long descriptions of those packages. `write_pydocs` reads
them offline, parses source files without importing them, and writes FineWeb-Edu's columns.

`pydocs.txt` lists the packages and their versions. Other installed packages are ignored, so a new requirement
of Spider does not change the corpus, and two machines with the same versions have the same corpus. A warning
names packages that are missing, or installed in another version.

A document is one module's docstrings in source order, each under the name it documents. It is divided between
docstrings if it exceeds `DOCUMENT_CHARS`. Only paragraphs of English prose are kept, each once. Interpreter
sessions, tables and repeated boilerplate are left out, because compressors copy them and small models learn
little from them.

Pieces are parallel jobs, and each parses only its own packages. Files of equal content are read once over all
pieces (their hashes are in the installer's RECORD). A paragraph that repeats within a piece is dropped. A
repetition between two pieces stays, because finding it would need each job to parse everything.
"""

from __future__ import annotations

import ast
import csv
import gc
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import re
import string
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from spider.common.files import replacing
from spider.config.data import Dataset, Files, Source

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

#: Number of parquet files. Two jobs keep two cores busy, and more would repeat more text.
PIECES = 2
#: Columns that are constant, because this text is not rated.
CONSTANT = {"dump": "pydocs", "language": "en", "language_score": 1.0, "score": 0.0, "int_score": 0}
ROW_GROUP = 1000
#: Most characters of a document, and the fewest; shorter documents are left out.
DOCUMENT_CHARS, MIN_DOCUMENT = 16_384, 200
#: A shorter paragraph is a heading, which is kept if prose follows it.
MIN_PARAGRAPH = 40
#: Characters of the longest answer, and the end of a first sentence.
MAX_ANSWER, SENTENCE = 300, re.compile(r"(?<=[a-z)\]'\"`])\.\s")
#: A shorter string constant at a module's top level is data.
MIN_CONSTANT = 400
#: A source file with a smaller share of its text in triple quotes is not worth parsing.
MIN_DENSITY = 0.1


class PydocsSource(Source):
    """Documentation of the standard library and of Spider's dependencies, as installed, without a network."""

    form: Literal["text", "questions"] = "text"
    """questions: a conversation about each documented name and its purpose (``format: chat``)."""

    def items(self) -> list[str]:
        return [f"{i}/{PIECES}" for i in range(PIECES)]

    def fetch(self, part: str, output: Path, dataset: Dataset) -> None:
        write_pydocs(int(part), PIECES, output, self.form)

    def learned_files(self) -> Files:
        return Files(f"pydocs {self.form}", frozenset({"the documentation"}))

    @property
    def description(self) -> str:
        return "documentation of Python and of installed packages"


# ----------------------------------------------------------------------------------- installed packages

#: Folders that hold no documentation, or other packages.
SKIPPED = {"test", "tests", "testing", "encodings", "idlelib", "lib2to3", "locale", "locales", "licenses"}
SKIPPED |= {"_vendor", "vendor", "vendored", "third_party", "externals", "site-packages", "dist-packages"}

#: Names of files with licences, news or tests.
UNREAD = re.compile(r"(?i:licen|change|history|news)|(test_.*|.*_test|conftest)\.py$")
#: The list of packages, one ``name==version bytes`` per line.
PACKAGES = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; ``relative`` is its path below the folder of installed packages."""

    package: str
    relative: str
    path: Path


@dataclass(frozen=True)
class Listed:
    """A package of the corpus."""

    version: str
    bytes: int
    """Listed size of its files, which decides its piece. Installed sizes depend on the build."""


def listed_packages() -> dict[str, Listed]:
    """Return the packages of the corpus by normalized name, ``python`` included."""
    listed: dict[str, Listed] = {}
    for line in PACKAGES.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            requirement, size = line.split()
            name, version = requirement.split("==")
            listed[name] = Listed(version, int(size))
    return listed


def installed_packages() -> dict[str, importlib.metadata.Distribution]:
    """Return the listed packages that are installed, by name, and warn of every difference from the list.

    A local version label does not count as a difference: ``2.13.0+cpu`` is ``2.13.0``.
    """
    listed = listed_packages()
    python = platform.python_version()
    wanted_python = listed.pop("python").version
    differences = []
    if not f"{python}.".startswith(f"{wanted_python}."):
        differences.append(f"python {python} (listed: {wanted_python})")
    installed: dict[str, importlib.metadata.Distribution] = {}
    for name, package in sorted(listed.items()):
        try:
            installed[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            differences.append(f"{name} is missing (listed: {package.version})")
            continue
        version = installed[name].version
        if _public(version) != package.version:
            differences.append(f"{name} {version} (listed: {package.version})")
    if differences:
        log.warning(
            "pydocs: the text differs from the one that the quoted figures were measured on, because these "
            "packages differ from the list: %s. `pip install -c constraints.txt -e .` installs the listed "
            "versions.",
            "; ".join(differences),
        )
    return installed


def installed_files(distributions: dict[str, importlib.metadata.Distribution]) -> Iterator[SourceFile]:
    """Yield source and documentation files of the standard library and of distributions, without copies."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(stdlib):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py":
                yield SourceFile("python", path.relative_to(stdlib).as_posix(), path)
    contents: set[str] = set()
    for package, distribution in distributions.items():
        # Reading it parses the METADATA of the package.
        version = distribution.version
        public = _public(version)
        for name, digest, size in _recorded(package, distribution):
            file = PurePosixPath(name)
            is_description = file.name == "METADATA" and file.parent.name.endswith(".dist-info")
            if not (is_description or file.suffix in (".py", ".rst", ".md")) or UNREAD.match(file.name):
                continue
            if ".." in file.parts or not SKIPPED.isdisjoint(file.parts) or size == "0":
                continue
            path = Path(str(distribution.locate_file(name)))
            if digest and digest in contents:
                continue
            contents.add(digest)
            relative = file.as_posix().replace(version, public)
            yield SourceFile(package, relative, path)


def _public(version: str) -> str:
    """Return a version without the label of a build: 2.13.0 for 2.13.0+cpu."""
    from packaging.version import Version

    return Version(version).public


def _recorded(package: str, distribution: importlib.metadata.Distribution) -> list[tuple[str, str, str]]:
    """Return the name, hash and size of each file of a distribution, sorted by name.

    The RECORD is parsed here, because an object for each file would take longer than all else.
    """
    record = distribution.read_text("RECORD")
    if record is None:
        log.warning("pydocs: %s was installed without a RECORD of its files; it is left out", package)
        return []
    return sorted((row[0], row[1], row[2]) for row in csv.reader(record.splitlines()) if len(row) == 3)


def share_out(packages: Mapping[str, Listed], pieces: int) -> list[set[str]]:
    """Divide packages into pieces of about equal size: the largest first, each into the smallest piece."""
    shares: list[set[str]] = [set() for _ in range(pieces)]
    loads = [0] * pieces
    for name in sorted(packages, key=lambda name: (-packages[name].bytes, name)):
        lightest = loads.index(min(loads))
        shares[lightest].add(name)
        loads[lightest] += packages[name].bytes
    return shares


# ------------------------------------------------------------------------------------- text of the files

#: Substrings of licences and generated text. Searching them is four times faster than one pattern.
BOILERPLATE = (
    *("ermission is hereby", "icensed under", "WITHOUT WARRANTY", "edistribution and use", "opyright"),
    *(":license:", "DO NOT EDIT", "uto-generated", "utogenerated"),
)
NEWS = re.compile(
    r"(change\s?-?log|changes|release (notes|history)|history|what.s new|news|contributors|license)\W*$", re.I
)
BADGE = re.compile(
    r"shields\.io|badge|<[a-z/!][^>]*>|^\s*\.\. (image|\|)|^\s*:(target|alt|width):|^\s*!?\[!?\[", re.I
)
COMMON_WORDS = set(
    "the of to and a in is for that be this by with as it are or on if an not from can when will".split()  # noqa: SIM905
)
WORD = re.compile(r"[A-Za-z']+")
#: Bytes that are neither in words nor blanks.
NO_LETTERS = bytes(set(range(128)) - {ord(c) for c in string.ascii_letters + "' "})
TRIPLE_QUOTED = re.compile(rb'""".*?"""|\'\'\'.*?\'\'\'', re.S)


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is English prose, not a table, code, a licence or another language."""
    # The cheap test comes first.
    letters = len(paragraph.encode("ascii", "ignore").translate(None, NO_LETTERS))
    if letters < 0.8 * len(paragraph) or ">>>" in paragraph:
        return False
    words = WORD.findall(paragraph)
    common = sum(map(COMMON_WORDS.__contains__, " ".join(words).lower().split()))
    return common >= 0.2 * len(words) and not any(phrase in paragraph for phrase in BOILERPLATE)


def module_texts(source: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (documented name, text) of a Python file in source order.

    They are docstrings, and long strings at the module's top level, where numpy, torch and pydoc store the
    documentation of compiled code.
    """
    if sum(len(m.group()) for m in TRIPLE_QUOTED.finditer(source)) < MIN_DENSITY * len(source):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the source
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # templates and files for other Python versions
    stack: list[tuple[str, Any]] = [(name, tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, ast.expr):
            for inner in ast.walk(node) if isinstance(node, (ast.Call, ast.Dict, ast.Constant)) else ():
                text = inner.value if isinstance(inner, ast.Constant) else None
                if isinstance(text, str) and len(text) >= MIN_CONSTANT:
                    yield path, inspect.cleandoc(text)
            continue
        docstring = ast.get_docstring(node)
        if docstring is not None:
            yield path, docstring
        for child in reversed(node.body[docstring is not None :]):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                stack.append((child.name if node is tree else f"{path}.{child.name}", child))
            elif node is tree and isinstance(child, (ast.Assign, ast.Expr)):
                stack.append((path, child.value))


def description_text(source: str) -> str:
    """Return a README without badges and markup lines, up to its changelog or licence."""
    kept: list[str] = []
    for line in source.splitlines():
        if NEWS.match(line.strip("#=*- \t")) and (line.startswith("#") or len(line) < 30):
            break
        if not BADGE.search(line):
            kept.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


class Harvest:
    """Turn files into documents, without paragraphs that occurred before."""

    def __init__(self, form: str = "text") -> None:
        self.form = form
        self.seen: set[str] = set()

    def documents(self, file: SourceFile) -> list[str]:
        """Return the documents of one file, in order."""
        try:
            source = file.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"pydocs: cannot read {file.path}: {error.strerror}; reinstall {file.package}"
            ) from None
        if file.path.suffix == ".py":
            name = re.sub(r"(/__init__)?\.py$", "", file.relative).replace("/", ".")
            entries = list(module_texts(source, name))
        else:
            text = source.decode("utf-8", errors="replace")
            if file.path.name == "METADATA":
                text = text.partition("\n\n")[2]
            entries = [(file.package, description_text(text))]
        if self.form == "questions":
            conversations = [self.question(name, text) for name, text in entries]
            return [conversation for conversation in conversations if conversation]
        documents = [""]
        for name, text in entries:
            prose = self.prose(text)
            if documents[-1] and len(documents[-1]) + len(prose) > DOCUMENT_CHARS:
                documents.append("")
            if prose:
                documents[-1] += f"{name}\n\n{prose}\n\n"
        return [d.rstrip() + "\n" for d in documents if len(d) >= MIN_DOCUMENT]

    def question(self, name: str, text: str) -> str | None:
        """Return a conversation in JSON about the purpose of a name, or None if its text does not fit."""
        from spider.data.chat import asked  # numpy, which a configuration does not need

        sentence = " ".join(text.strip().partition("\n\n")[0].split())
        sentence = SENTENCE.split(sentence)[0].rstrip(".") + "."
        fits = MIN_PARAGRAPH <= len(sentence) <= MAX_ANSWER
        if sentence in self.seen or not fits or not is_prose(sentence):
            return None
        self.seen.add(sentence)
        return asked(f"What does {name} do?", sentence)

    def prose(self, text: str) -> str:
        """Return the new English paragraphs of a text, each below its heading."""
        kept: list[str] = []
        heading: list[str] = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) < MIN_PARAGRAPH:
                heading = [paragraph.strip("\n")] if paragraph.strip() else []
                continue
            if paragraph not in self.seen and is_prose(paragraph):
                self.seen.add(paragraph)
                kept += [*heading, paragraph.strip("\n")]
            heading = []
        return "\n\n".join(kept)


def schema() -> pa.Schema:
    """Return the columns of FineWeb-Edu."""
    import pyarrow as pa

    return pa.schema(
        [
            *((name, pa.string()) for name in ("text", "id", "dump", "url", "file_path", "language")),
            ("language_score", pa.float64()),
            ("token_count", pa.int64()),
            ("score", pa.float64()),
            ("int_score", pa.int64()),
        ]
    )


def write_pydocs(piece: int, pieces: int, output: Path, form: str = "text") -> None:
    """Write one piece of the embedded corpus into a parquet file with FineWeb-Edu's columns.

    ``form`` is ``text``, or ``questions`` for conversations about documented names. Raises `ValueError` for a
    piece out of range or an unreadable file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not 0 <= piece < pieces:
        raise ValueError(f"pydocs: piece must be between 0 and {pieces - 1} (got {piece})")
    distributions = installed_packages()
    share = share_out(listed_packages(), pieces)[piece]
    files = [file for file in installed_files(distributions) if file.package in share]
    versions = {name: _public(distribution.version) for name, distribution in distributions.items()}
    versions["python"] = platform.python_version()
    harvest = Harvest(form)
    rows: list[dict[str, Any]] = []
    gc.disable()  # syntax trees have few cycles, and collection would take a fifth of the time
    try:
        for file in sorted(files, key=lambda f: (f.package, f.relative)):
            for i, text in enumerate(harvest.documents(file)):
                raw = text.encode("utf-8", "replace")  # lone surrogates of escape sequences
                where = f"{file.package}/{file.relative}"
                row = {"text": raw.decode("utf-8"), "file_path": where, "token_count": len(raw), **CONSTANT}
                row["id"] = hashlib.blake2b(f"{where}#{i}".encode(), digest_size=16).hexdigest()
                row["url"] = f"pydocs:{file.package}=={versions[file.package]}/{file.relative}#{i}"
                rows.append(row)
    finally:
        gc.enable()
    harvested = {name: versions[name] for name in sorted({f.package for f in files})}
    origin = json.dumps({"piece": f"{piece}/{pieces}", "packages": harvested})
    with replacing(output) as temporary:
        table = pa.Table.from_pylist(rows, schema=schema().with_metadata({"spider.pydocs": origin}))
        pq.write_table(table, temporary, row_group_size=ROW_GROUP, compression="zstd")
    total = sum(row["token_count"] for row in rows)
    message = "pydocs %d/%d: %d documents, %.1f MB from %d packages"
    log.info(message, piece, pieces, len(rows), total / 1e6, len(harvested))
