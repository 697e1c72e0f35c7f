"""Run the workflow on a configuration that a command has made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spider.common import files
from spider.provenance.codefiles import ROOT


def run_workflow(
    plain: dict[str, Any], file: Path, targets: Sequence[Path], options: Sequence[str], folder: Path
) -> int:
    """Write a configuration to a file, make some targets of it, and return the status of Snakemake.

    After Ctrl-C, which Snakemake receives as well, wait until it has ended.

    Args:
        options: further options of Snakemake.
        folder: folder that relative paths of the configuration start from.
    """
    files.write_text(file, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--configfile", str(file), *options, "--", *map(str, targets)]
    with subprocess.Popen(command, cwd=folder, stdout=sys.__stderr__) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
