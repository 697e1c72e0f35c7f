"""Check the layout of the code: hints about long files and functions, the order of the layers, no circles."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "spider").rglob("*.py"), *(ROOT / "kernels").glob("*.py")])
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
#: Lines from which a file or a function causes a warning. A readable long file is better than two halves.
LONG_FILE = 500
LONG_FUNCTION = 80


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_warn_about_long_files():
    product = [*FILES, *(ROOT / "rules").glob("*.smk"), *(ROOT / "spider/report").glob("page.*")]
    for path in product:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONG_FILE:
            warnings.warn(f"{named(path)} has {lines} lines", stacklevel=1)


def test_warn_about_long_functions():
    """A docstring does not count, so it may be as long as it needs to be."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > LONG_FUNCTION:
                    warnings.warn(f"{named(path)}: {node.name} has {lines} lines", stacklevel=1)


#: Packages and modules in the order of their layers. Each imports only those before it.
LAYERS = [
    "kernels",
    "version",
    "files",
    "pace",
    "errors",
    "sealed",
    "record",
    "results",
    "cluster",
    "tokens",
    "config",
    "codefiles",
    "requests",
    "data",
    "ngram",
    "cleaning",
    "model",
    "processes",
    "checkpoints",
    "compress",
    "sources",
    "evaluation",
    "ladders",
    "training",
    "tracking",
    "provenance",
    "verdicts",
    "audit",
    "report",
    "progress",
    "publish",
    "hf",
    "describe",
    "doctor",
    "unlock",
    "clean",
    "cli",
    "spider",
]
#: Imports of a later layer, all of them inside a function or for a type, with the reason.
EXCEPTIONS = {
    ("spider/checkpoints/load.py", "compress"),  # A path may name a compressed model, which `compress` reads.
    ("spider/data/loader.py", "ngram"),  # The type of an argument.
    ("spider/tracking/registry.py", "publish"),  # With `copy_weights` the store gets an exported folder.
}


def layer_of(path: Path) -> str:
    """Return the name of a file's package or module in ``spider/``, or ``kernels``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "kernels" or parts[1] == "__init__" else parts[1]


def file_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p in TREES), None)


def imports(path: Path) -> Iterator[Path]:
    """Yield the files of the project that a file imports, also inside functions."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            targets = [file_of(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = [file_of(f"{node.module}.{a.name}") or file_of(node.module) for a in node.names]
        else:
            continue
        yield from (target for target in targets if target not in (None, path))


def test_each_layer_imports_only_the_layers_before_it():
    assert {layer_of(path) for path in FILES} == set(LAYERS), "LAYERS lists all packages and modules"
    upwards = {
        (named(path), layer_of(target))
        for path in FILES
        for target in imports(path)
        if LAYERS.index(layer_of(target)) > LAYERS.index(layer_of(path))
    }
    assert upwards == EXCEPTIONS


def test_no_files_import_each_other_in_a_circle():
    """Circles inside a package; the order of the layers excludes all others."""
    reached = {path: set(imports(path)) for path in FILES}
    grew = True
    while grew:
        grew = False
        for targets in reached.values():
            further = set().union(*(reached[target] for target in targets)) - targets
            if further:
                targets |= further
                grew = True
    circles = {frozenset({named(a), named(b)}) for a in FILES for b in reached[a] - {a} if a in reached[b]}
    assert not circles


@pytest.mark.parametrize("folder", ["spider", "kernels", "rules", "docs", "benchmarks", "tests"])
def test_no_document_is_cited_that_is_not_in_the_tree(folder):
    cited = re.compile(r"\bDESIGN\b" if folder != "tests" else r"\(DESIGN|DESIGN section")
    here = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".smk", ".md", ".j2")]
    wrong = [named(path) for path in here if path != Path(__file__) and cited.search(path.read_text())]
    assert not [path for path in wrong if path != "docs/LOG.md"]
