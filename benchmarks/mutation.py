"""Plant faults in the product code and count how many of them the tests find.

    pip install -c constraints.txt -e '.[mutation]'
    python benchmarks/mutation.py --faults 200        # continues where it stopped

A fault changes one token: an operator, a comparison, a constant, ``and`` for ``or``. cosmic-ray makes it.
Faults are drawn at random places of the modules whose faults cost most, one fault at a place. For each
fault, the tests that execute the changed function run until one fails. One run of the tests under coverage
says which tests these are; it is kept in ``build/mutation``. Remove that folder when code or tests change.

Faults are planted in copies of the last commit, one copy for each worker, so the checkout stays as it is.
Only unit tests and kernel tests take part. A fault that only a whole workflow shows counts as missed, so the
share that is found is a lower bound of what ``make test`` finds. Each missed fault is printed as a diff, for
a person to read: some of them change no behaviour.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

import attrs
import coverage
from common import ROOT, parser, report
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome

BUILD = ROOT / "build/mutation"
COVERED = BUILD / "tests.coverage"
PACKAGES = ("data", "sources", "evaluation", "checkpoints", "training", "ngram", "compress", "model")
TESTS = ("tests/unit", "tests/kernels")
#: cosmic-ray's operators that change more than one token of an expression.
LEFT_OUT = ("RemoveDecorator", "VariableReplacer", "VariableInserter", "ExceptionReplacer", "ZeroIteration")
#: Tests that run for one fault at most, those of the module itself first.
MOST_TESTS = 150
#: Seconds after which a fault counts as found, because the tests no longer end.
PATIENCE = 600


def environment(tree: Path) -> dict[str, str]:
    """Return environment variables that make the code of ``tree`` the installed one."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def copy_tree(number: int) -> Path:
    """Return a clean copy of the last commit."""
    tree = BUILD / f"tree-{number}"
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--", "."], cwd=tree, check=True)
    return tree


def measure_coverage(tree: Path, tests: list[str]) -> None:
    """Run the tests once in ``tree`` and keep which test executes which line."""
    settings = BUILD / "coverage.ini"
    settings.write_text("[run]\nrelative_files = true\nsource = spider\n")
    command = [sys.executable, "-m", "pytest", *tests, "-n", "2", "--dist", "loadfile", "--cov"]
    # In one word each: pytest looks for its settings above the paths that stand alone.
    command += [f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    command += [f"--junit-xml={BUILD / 'tests.xml'}"]
    running = BUILD / "running.coverage"
    done = subprocess.run(command, cwd=tree, env={**environment(tree), "COVERAGE_FILE": str(running)})
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {done.returncode} and left no coverage")
    running.rename(COVERED)


def failing_tests() -> set[str]:
    """Return the node ids of the tests that fail without a planted fault."""
    failing = set()
    for case in ElementTree.parse(BUILD / "tests.xml").iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            file = case.get("classname", "").replace(".", "/")
            failing.add(f"{file}.py::{case.get('name')}")
    return failing


def functions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno or node.lineno


def annotations(tree: ast.Module) -> set[tuple[int, int]]:
    """Return the lines and columns that type annotations start at; a fault there changes nothing."""
    places = set()
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.AST):
                places |= {(n.lineno, n.col_offset) for n in ast.walk(annotation) if isinstance(n, ast.expr)}
                places |= {
                    (n.left.end_lineno, n.left.end_col_offset + 1)
                    for n in ast.walk(annotation)
                    if isinstance(n, ast.BinOp)
                }
    return places


def draw_faults(tree: Path, modules: list[str], number: int, seed: int) -> list[MutationSpec]:
    """Draw ``number`` faults, each at a place of its own, all places equally likely."""
    at: defaultdict[tuple[str, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    for module in modules:
        ignored = annotations(ast.parse((tree / module).read_text(encoding="utf-8")))
        for item in _all_work_items([tree / module], {}):
            spec = item.mutations[0]
            if spec.start_pos not in ignored and not any(word in spec.operator_name for word in LEFT_OUT):
                at[module, spec.start_pos].append(attrs.evolve(spec, module_path=module))
    chosen = random.Random(seed)
    places = chosen.sample(sorted(at), min(number, len(at)))
    return [chosen.choice(at[place]) for place in places]


class Selection:
    """The tests that execute a place of the code."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.data = coverage.CoverageData(str(COVERED))
        self.data.read()
        self.failing = failing_tests()

    def tests(self, spec: MutationSpec) -> list[str]:
        """Return the tests that execute the function around the fault, those of its module first.

        Coverage sees no line of a function that numba compiles, and none that runs while a module is
        imported. For such a line these are the tests of the package.
        """
        module = spec.module_path.as_posix()
        contexts = self.data.contexts_by_lineno(module)
        line = spec.start_pos[0]
        spans = functions(ast.parse((self.tree / module).read_text(encoding="utf-8")))
        around = [span for span in spans if span[0] <= line <= span[1]]
        first, last = max(around, default=(0, 10**6))
        found = {
            context.partition("|")[0]
            for number, names in contexts.items()
            if first <= number <= last
            for context in names
            if context
        }
        folder, stem = spec.module_path.parent.name, spec.module_path.stem
        if not found:
            every = {context.partition("|")[0] for context in self.data.measured_contexts()}
            found = {name for name in every if f"/{folder}/" in name}
        nearest = sorted(
            found - self.failing,
            key=lambda name: (f"test_{stem}" not in name, f"/{folder}/" not in name, name),
        )
        return nearest[:MOST_TESTS]


def pytest_command(tree: Path, tests: str) -> str:
    """Return the command that runs ``tests`` in ``tree`` until one fails."""
    inner = f"cd {tree} && exec {sys.executable} -m pytest -x -n 0 -p no:cacheprovider {tests}"
    return f"env PYTHONPATH={tree} bash -c '{inner}'"


def plant(tree: Path, spec: MutationSpec, tests: list[str]) -> dict[str, Any]:
    """Run ``tests`` with the fault in ``tree`` and return what came of it."""
    listed = tree / "selected-tests.txt"
    listed.write_text("".join(f"{test}\n" for test in tests))
    place = {"module": spec.module_path.as_posix(), "line": spec.start_pos[0], "operator": spec.operator_name}
    if not tests:
        return {**place, "tests": 0, "outcome": "not executed by a test", "diff": ""}
    there = attrs.evolve(spec, module_path=tree / spec.module_path)
    result = mutate_and_test([there], pytest_command(tree, f"@{listed.name}"), PATIENCE)
    if result.test_outcome is None:
        return {**place, "tests": len(tests), "outcome": "no fault possible", "diff": ""}
    diff = (result.diff or "").replace(f"{tree}/", "")
    output = result.output or ""
    failed = [
        line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "timeout", "Fatal"))
    ]
    if result.test_outcome == TestOutcome.SURVIVED:
        outcome = "missed"
    elif failed:
        outcome = "found"
    else:
        outcome = f"pytest broke: {output[-200:]}"
    return {**place, "tests": len(tests), "outcome": outcome, "diff": diff, "by": failed[:1]}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--faults", type=int, default=200, help="how many faults to plant")
    options.add_argument("--seed", type=int, default=0, help="of the draw")
    options.add_argument("--workers", type=int, default=2, help="faults that are tried at a time")
    asked = options.parse_args()
    packages = ("data",) if asked.quick else PACKAGES
    pattern = "split.py" if asked.quick else "*.py"
    number = 2 if asked.quick else asked.faults
    BUILD.mkdir(parents=True, exist_ok=True)
    trees = [copy_tree(worker) for worker in range(asked.workers)]
    files = sorted(path for package in packages for path in (trees[0] / f"spider/{package}").rglob(pattern))
    modules = [path.relative_to(trees[0]).as_posix() for path in files]
    if not COVERED.exists():
        measure_coverage(trees[0], ["tests/unit/data/test_split.py"] if asked.quick else list(TESTS))
    for tree in trees:
        outcome, output = run_tests(pytest_command(tree, "tests/unit/data/test_split.py"), PATIENCE)
        if outcome != TestOutcome.SURVIVED:
            raise RuntimeError(f"tests fail in {tree} without a fault:\n{output}")
    select = Selection(trees[0])
    kept = BUILD / f"faults-{asked.seed}-{number}.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    finished = {entry["fault"] for entry in done}
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def try_fault(fault: int, spec: MutationSpec) -> dict[str, Any]:
        tree = free.get()
        try:
            return {"fault": fault, **plant(tree, spec, select.tests(spec))}
        finally:
            free.put(tree)

    faults = draw_faults(trees[0], modules, number, asked.seed)
    with ThreadPoolExecutor(asked.workers) as pool, kept.open("a") as lines:
        waiting = [pool.submit(try_fault, i, spec) for i, spec in enumerate(faults) if i not in finished]
        for future in waiting:
            entry = future.result()
            done.append(entry)
            lines.write(json.dumps(entry) + "\n")
            lines.flush()
            print(
                f"{entry['outcome']:>12}  {entry['module']}:{entry['line']}  {entry['operator']}", flush=True
            )

    rows = []
    for package in packages:
        of = [entry for entry in done if entry["module"].startswith(f"spider/{package}/")]
        found = sum(entry["outcome"] == "found" for entry in of)
        rows.append([package, str(len(of)), str(found), f"{found / max(len(of), 1):.0%}"])
    for entry in done:
        if entry["outcome"] != "found":
            print(f"\n{entry['outcome']}: {entry['module']}:{entry['line']}\n{entry['diff']}")
    title = f"Planted faults, {len(done)} in all, seed {asked.seed}"
    report(title, ["package", "planted", "found", "share"], rows, {"faults": done}, asked)


if __name__ == "__main__":
    main()
