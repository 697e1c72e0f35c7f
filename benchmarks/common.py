"""Share what every benchmark needs: options, the machine, the workflow, times, a table and a JSON file."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.common.files import write_json
from spider.provenance.codefiles import processor

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options of every benchmark: ``--quick`` and ``--json FILE``."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="small inputs, for a look and for tests")
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, settings and figures there"
    )
    return options


def machine(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return processor, cores, memory, system, Python and the versions of ``packages``."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": date.today().isoformat(),
        "cpu": f"{processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def workflow(
    configuration: dict[str, Any], results: Path, *targets: str | Path, options: Sequence[str] = ()
) -> float:
    """Run the workflow of a configuration and return its seconds.

    Args:
        results: folder of the results. What is there already is not made again.
        targets: rules or files (default: all).
        options: further options of Snakemake.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    path = results.with_suffix(".json")
    write_json(path, {**configuration, "results": str(results)})
    command = [PROGRAMS / "snakemake", "--snakefile", ROOT / "Snakefile", "--configfile", path]
    command += ["--profile", ROOT / "profiles/default", "--quiet", "rules", *options, "--", *targets]
    began = time.perf_counter()
    subprocess.run(command, cwd=results.parent, check=True)
    return time.perf_counter() - began


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: dict[str, Any],
    options: argparse.Namespace,
    packages: Sequence[str] = (),
) -> None:
    """Print the machine and a table, and write ``figures`` to the file of ``--json``."""
    where = machine(packages)
    _console().print(
        "  ".join(f"{key}: {value}" for key, value in where.items()), highlight=False, style="dim"
    )
    show(title, columns, rows)
    if options.json is not None:
        command = " ".join(["python", *sys.argv])
        write_json(options.json, {"machine": where, "command": command, "title": title, "figures": figures})
