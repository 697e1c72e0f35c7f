"""The embedded corpus: text that is on every machine where Spider is installed.

An installed Python carries tens of megabytes of edited English: the docstrings of the standard library and
of every package Spider depends on, and the long descriptions of those packages. `write_pydocs` reads them
offline, parsing source files and never importing them, and writes FineWeb-Edu's columns.

`pydocs.txt` lists the packages and their versions. Other installed packages never enter, so a new requirement
of Spider leaves the corpus as it is, and two machines with the same versions get the same corpus. A package
that is missing, or installed in another version, is named in a warning.

A document is one module's docstrings in source order, each under the name it documents, cut between
docstrings where it exceeds `DOCUMENT_CHARS`. Only paragraphs of English prose are kept, each once:
interpreter sessions, tables and repeated boilerplate are what a compressor copies and what teaches a small
model little.

Pieces are parallel jobs, and each parses only its own packages. Files of equal content are harvested once
over all pieces (their hashes are in the installer's RECORD). A paragraph that repeats within a piece is
dropped; a repeat between two pieces stays, since to find it each job had to parse everything.
"""

from __future__ import annotations

import ast
import contextlib
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
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from packaging.version import Version

from spider.files import replacing

log = logging.getLogger(__name__)

#: The columns of FineWeb-Edu. Our tokens are bytes.
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("text", "id", "dump", "url", "file_path", "language")),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)
#: What does not differ, for ours are not rated.
CONSTANT = {"dump": "pydocs", "language": "en", "language_score": 1.0, "score": 0.0, "int_score": 0}
ROW_GROUP = 1000
#: Characters at which a module is cut into further documents, and below which one is left out.
DOCUMENT_CHARS, MIN_DOCUMENT = 16_384, 200
#: A shorter paragraph is a heading: kept where prose follows it.
MIN_PARAGRAPH = 40
#: Characters of the longest answer to what a name is for, and where its first sentence ends.
MAX_ANSWER, SENTENCE = 300, re.compile(r"(?<=[a-z)\]'\"`])\.\s")
#: A shorter string constant of a module's top level is data.
MIN_CONSTANT = 400
#: Share of a source file in triple quotes below which parsing it costs more than it yields.
MIN_DENSITY = 0.1

# ------------------------------------------------------------------------------------ what is installed

#: Folders whose text is not documentation, or is another package's.
SKIPPED = {"test", "tests", "testing", "encodings", "idlelib", "lib2to3", "locale", "locales", "licenses"}
SKIPPED |= {"_vendor", "vendor", "vendored", "third_party", "externals", "site-packages", "dist-packages"}

#: Names of files that are licences, news or tests.
UNREAD = re.compile(r"(?i:licen|change|history|news)|(test_.*|.*_test|conftest)\.py$")
#: The list of packages, one ``name==version bytes`` a line.
PACKAGES = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class SourceFile:
    """One file to harvest; ``relative`` is its path below the folder of installed packages."""

    package: str
    relative: str
    path: Path


@dataclass(frozen=True)
class Listed:
    """A package of the corpus."""

    version: str
    bytes: int
    """Size of its files, which decides the piece that holds it. Installed sizes depend on the build."""


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
    """Return the listed packages that are installed, by name, and warn about every difference from the list.

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
        version = package.version
        try:
            installed[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            differences.append(f"{name} is missing (listed: {version})")
            continue
        if Version(installed[name].version).public != version:
            differences.append(f"{name} {installed[name].version} (listed: {version})")
    if differences:
        log.warning(
            "pydocs: the text differs from the one that the quoted figures were measured on, because these "
            "packages differ from the list: %s. `pip install -c constraints.txt -e .` installs the listed "
            "versions.",
            "; ".join(differences),
        )
    return installed


def installed_files(distributions: dict[str, importlib.metadata.Distribution]) -> Iterator[SourceFile]:
    """Source and documentation files of the standard library and of ``distributions``, each content once."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(stdlib):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py":
                yield SourceFile("python", path.relative_to(stdlib).as_posix(), path)
    contents: set[str] = set()
    for package, distribution in distributions.items():
        for name, digest, size in _recorded(package, distribution):
            file = PurePosixPath(name)
            is_description = file.name == "METADATA" and file.parent.name.endswith(".dist-info")
            if not (is_description or file.suffix in (".py", ".rst", ".md")) or UNREAD.match(file.name):
                continue
            if ".." in file.parts or not SKIPPED.isdisjoint(file.parts) or size == "0":
                continue
            path = Path(str(distribution.locate_file(name)))
            # Without a RECORD, what the source tree had is listed.
            if (content := digest or str(path)) in contents or not (digest or path.exists()):
                continue
            contents.add(content)
            version = distribution.version
            yield SourceFile(package, file.as_posix().replace(version, Version(version).public), path)


def _recorded(package: str, distribution: importlib.metadata.Distribution) -> list[tuple[str, str, str]]:
    """Name, hash and size of each file of a distribution, by name: as the installer wrote it down, for making
    an object of each takes longer than all else here."""
    if record := distribution.read_text("RECORD"):
        return sorted((row[0], row[1], row[2]) for row in csv.reader(record.splitlines()) if len(row) == 3)
    if distribution.files is None:
        log.warning("pydocs: %s was installed without a RECORD of its files; it is left out", package)
    return sorted((str(file), "", "") for file in distribution.files or ())


def share_out(packages: Mapping[str, Listed], pieces: int) -> list[set[str]]:
    """Split packages into ``pieces`` of about equal size: the largest first, to the lightest piece."""
    shares: list[set[str]] = [set() for _ in range(pieces)]
    loads = [0] * pieces
    for name in sorted(packages, key=lambda name: (-packages[name].bytes, name)):
        lightest = loads.index(min(loads))
        shares[lightest].add(name)
        loads[lightest] += packages[name].bytes
    return shares


# --------------------------------------------------------------------------------- text out of the files

#: In licences and generated text; substrings are found four times as fast as a pattern of them.
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
#: Bytes that are of no word, nor the blank between two.
NO_LETTERS = bytes(set(range(128)) - {ord(c) for c in string.ascii_letters + "' "})
TRIPLE_QUOTED = re.compile(rb'""".*?"""|\'\'\'.*?\'\'\'', re.S)


def is_prose(paragraph: str) -> bool:
    """English sentences rather than a table, code, an interpreter session, a licence or another language."""
    # What is cheap to ask comes first.
    letters = len(paragraph.encode("ascii", "ignore").translate(None, NO_LETTERS))
    if letters < 0.8 * len(paragraph) or ">>>" in paragraph:
        return False
    words = WORD.findall(paragraph)
    common = sum(map(COMMON_WORDS.__contains__, " ".join(words).lower().split()))
    return common >= 0.2 * len(words) and not any(said in paragraph for said in BOILERPLATE)


def module_texts(source: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Pairs (documented name, text) of a Python file in source order: docstrings, and long prose constants
    of the module's top level, where numpy, torch and pydoc keep the documentation of compiled code."""
    if sum(len(m.group()) for m in TRIPLE_QUOTED.finditer(source)) < MIN_DENSITY * len(source):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
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
    """A README without badges and markup lines, up to its changelog or licence."""
    kept: list[str] = []
    for line in source.splitlines():
        if NEWS.match(line.strip("#=*- \t")) and (line.startswith("#") or len(line) < 30):
            break
        if not BADGE.search(line):
            kept.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


class Harvest:
    """Turns files into documents, leaving out the paragraphs that it has already seen."""

    def __init__(self, form: str = "text") -> None:
        self.form = form
        self.seen: set[str] = set()

    def documents(self, file: SourceFile) -> list[str]:
        """Texts of one file's documents, in order."""
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
            return [asked for name, text in entries if (asked := self.question(name, text))]
        documents = [""]
        for name, text in entries:
            prose = self.prose(text)
            if documents[-1] and len(documents[-1]) + len(prose) > DOCUMENT_CHARS:
                documents.append("")
            if prose:
                documents[-1] += f"{name}\n\n{prose}\n\n"
        return [d.rstrip() + "\n" for d in documents if len(d) >= MIN_DOCUMENT]

    def question(self, name: str, text: str) -> str | None:
        """What a documented name is for, as a conversation in JSON, where its first paragraph says so."""
        sentence = " ".join(text.strip().partition("\n\n")[0].split())
        sentence = SENTENCE.split(sentence)[0].rstrip(".") + "."
        if (
            sentence in self.seen
            or not is_prose(sentence)
            or not MIN_PARAGRAPH <= len(sentence) <= MAX_ANSWER
        ):
            return None
        self.seen.add(sentence)
        asked = {"role": "user", "content": f"What does {name} do?"}
        return json.dumps([asked, {"role": "assistant", "content": sentence}], ensure_ascii=False)

    def prose(self, text: str) -> str:
        """The paragraphs of ``text`` that are English and new, each below the heading it had."""
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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is not looked for: syntax trees are many objects and no cycles, and looking is a fifth of the
    time that harvesting takes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def write_pydocs(piece: int, pieces: int, output: Path, form: str = "text") -> dict[str, Any]:
    """Harvest one piece of the embedded corpus into a parquet file with FineWeb-Edu's columns.

    ``form`` is ``text``, or ``questions`` for conversations about documented names. Return ``name``,
    ``documents`` and ``bytes`` (of UTF-8 text) of the written file. Raise `ValueError` for a piece out of
    range or an unreadable file.
    """
    if not 0 <= piece < pieces:
        raise ValueError(f"pydocs: piece must be between 0 and {pieces - 1} (got {piece})")
    distributions = installed_packages()
    share = share_out(listed_packages(), pieces)[piece]
    files = [file for file in installed_files(distributions) if file.package in share]
    # Without the label of a build: 2.13.0+cpu is 2.13.0.
    versions = {name: Version(one.version).public for name, one in distributions.items()}
    versions["python"] = platform.python_version()
    harvest = Harvest(form)
    rows: list[dict[str, Any]] = []
    with no_collection():
        for file in sorted(files, key=lambda f: (f.package, f.relative)):
            for i, text in enumerate(harvest.documents(file)):
                raw = text.encode("utf-8", "replace")  # lone surrogates of escape sequences
                where = f"{file.package}/{file.relative}"
                row = {"text": raw.decode("utf-8"), "file_path": where, "token_count": len(raw), **CONSTANT}
                row["id"] = hashlib.blake2b(f"{where}#{i}".encode(), digest_size=16).hexdigest()
                row["url"] = f"pydocs:{file.package}=={versions[file.package]}/{file.relative}#{i}"
                rows.append(row)
    harvested = {name: versions[name] for name in sorted({f.package for f in files})}
    made_of = json.dumps({"piece": f"{piece}/{pieces}", "packages": harvested})
    with replacing(output) as beside:
        table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"spider.pydocs": made_of}))
        pq.write_table(table, beside, row_group_size=ROW_GROUP, compression="zstd")
    total = sum(row["token_count"] for row in rows)
    counts = len(rows), total / 1e6, len(harvested)
    log.info("pydocs %d/%d: %d documents, %.1f MB from %d packages", piece, pieces, *counts)
    return {"name": output.name, "documents": len(rows), "bytes": total}
