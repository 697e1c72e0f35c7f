"""Check the layout of the code: the size of each package, the order of the layers, no circles, no extras."""

import ast
import io
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "spider").rglob("*.py"), *(ROOT / "kernels").glob("*.py")])
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_lines(path: Path) -> int:
    """Count the lines of a file that hold code: no blank ones, no comments and no docstrings."""
    text = path.read_text(encoding="utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for one in node.body
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
        for line in range(one.lineno, one.end_lineno + 1)
    }
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.ENCODING):
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


#: Most lines of code of each package of the core, of its single modules (`spider`), and of each extra.
MOST = {
    "checkpoints": 1822,
    "cli": 1435,
    "common": 461,
    "config": 2231,
    "data": 5458,
    "evaluation": 3029,
    "extras/lab": 1706,
    "extras/trust": 1935,
    "hf": 446,
    "kernels": 1468,
    "model": 2588,
    "processes": 803,
    "provenance": 993,
    "publish": 343,
    "report": 1510,
    "spider": 15,
    "tokens": 478,
    "tracking": 1394,
    "training": 2653,
    "verify": 338,
    "workflow": 1708,
}
#: A row that is so many lines too high could be lowered.
SLACK = 25


def package_of(path: Path) -> str:
    """Return the row of a file in `MOST`."""
    first, second, *rest = path.relative_to(ROOT).parts
    return f"extras/{second}" if first == "extras" else second if first == "spider" and rest else first


def test_no_package_grows():
    """A change may lower a row. One that raises a row lowers another in the same commit."""
    lines = Counter()
    for path in [*FILES, *(ROOT / "extras").glob("*/spider_*/**/*.py")]:
        lines[package_of(path)] += code_lines(path)
    assert lines.keys() == MOST.keys(), "MOST has a row for each package"
    above = [
        f"{row} has {n} lines, {n - MOST[row]} more than MOST" for row, n in lines.items() if n > MOST[row]
    ]
    assert not above, "\n".join(
        [*above, "shorten it, or raise its row and lower another row in the same commit"]
    )
    for row, most in MOST.items():
        if most - lines[row] > SLACK:
            warnings.warn(f"MOST[{row!r}] could be {lines[row]}, {most - lines[row]} lower", stacklevel=1)


def test_the_core_imports_no_extra():
    wrong = re.compile(r"^\s*(?:from|import) spider_(?:lab|trust)\b", re.M)
    files = [*FILES, *(ROOT / "rules").glob("*.smk"), ROOT / "workflow/Snakefile"]
    assert not [named(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))]


#: Packages and modules in the order of their layers. Each imports only those before it.
LAYERS = [
    "kernels",
    "common",
    "tokens",
    "config",
    "data",
    "model",
    "processes",
    "checkpoints",
    "evaluation",
    "training",
    "provenance",
    "verify",
    "report",
    "publish",
    "tracking",
    "hf",
    "workflow",
    "cli",
    "spider",
]


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
    assert not upwards


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


BENCHMARKS = [
    *ROOT.glob("benchmarks/**/*.py"),
    *ROOT.glob("extras/*/benchmarks/*.py"),
    ROOT / "docs/screenshots.py",
]


@pytest.mark.parametrize("path", BENCHMARKS, ids=named)
def test_what_a_benchmark_imports_of_the_project_exists(path):
    """No other test runs most of them, and a name may move."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("spider", "kernels"):
            for one in node.names:
                where = f"{node.module}.{one.name}"
                assert hasattr(import_module(node.module), one.name) or find_spec(where), where
