"""Restore the code, the configuration and the environment that made a result, into a new folder.

The folder is a git repository at the recorded commit, with the recorded changes that were not committed. It
also has the snapshot of the configuration as ``config.yaml``, and the installed packages as `PACKAGES`. Links
lead to the user's own files. Training there writes into ``results`` in that folder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from spider.codefiles import short_digest
from spider.files import write_text
from spider.provenance.lineage import Lineage, Made
from spider.provenance.stale import by_rule
from spider.results import NEWEST, Results
from spider.sealed import check_new, writing
from spider.tracking import code, spool
from spider.tracking.machine import processor
from spider.tracking.records import Run, file_digest

#: The file of the recorded packages, which `pip install --requirement` reads.
PACKAGES = "environment.txt"


def checkout(lineage: Lineage, run: str, stage: str, folder: Path) -> list[str]:
    """Restore what made a stage, and return lines that say how to run it and what may differ.

    Raises:
        ValueError: the folder is not empty, no repository is here, or code or configuration are not recorded.
    """
    check_new(folder)
    receipt = Results(lineage.root).stage(run, stage).receipt
    made = lineage.of(receipt)
    recorded = lineage.code(made.job) if made.job else {}
    if made.job is None or not recorded.get("commit"):
        raise ValueError(f"{receipt}: no job recorded the commit of the code that made it")
    if not (code.ROOT / ".git").exists():
        raise ValueError(
            f"{code.ROOT}: an installed Spider without a git repository, which checkout needs; clone the "
            "repository, and run this again with PYTHONPATH set to the clone"
        )
    config = lineage.configuration(made.job)
    with writing(folder) as beside:
        _restore_code(lineage.root, recorded, beside)
        lines = _link_own_files(lineage, made, config, beside)
        config |= {"results": "results", "store": None}
        write_text(beside / NEWEST, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        packages = lineage.root / f"tracking/code/{_environment(lineage, made.job)}.requirements"
        if packages.is_file():
            own = ("spider==", "spider-lm==")
            kept = [line for line in packages.read_text("utf-8").splitlines() if not line.startswith(own)]
            write_text(beside / PACKAGES, "\n".join(kept) + "\n")
        lines += _differing(lineage, made, beside)
    return [*lines, *_how_to_run(lineage, made.job, f"results/runs/{run}/{stage}/train.json", folder)]


def _git(*words: str | Path) -> None:
    done = subprocess.run(["git", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {shlex.join(map(str, words))}: {done.stderr.strip()}")


def _restore_code(root: Path, recorded: dict[str, Any], folder: Path) -> None:
    """Make a repository of the recorded commit, with the recorded changes on top."""
    commit = recorded["commit"].removesuffix("-dirty")
    _git("init", "--quiet", folder)
    _git("-C", folder, "fetch", "--quiet", "--depth", "1", code.ROOT, commit)
    _git("-C", folder, "checkout", "--quiet", "--detach", commit)
    if patch := recorded.get("patch"):
        _git("-C", folder, "apply", "--whitespace=nowarn", (root / f"tracking/code/{patch}.patch").resolve())


def _environment(lineage: Lineage, job: Run) -> str | None:
    if job.workflow is None:
        return None
    workflow = spool.read_run(spool.record_path(lineage.root, "workflows", job.workflow))
    return workflow.tags.get("spider.environment") if workflow else None


def _link_own_files(lineage: Lineage, made: Made, config: dict[str, Any], folder: Path) -> list[str]:
    """Link the user's files beside the results folder, and return a line for each that has changed.

    These are the files that the configuration names, those that jobs read, and the user's own modules.
    """
    assert made.job is not None
    root, base = lineage.root.resolve(), lineage.base(config)
    read = {one.path: one.digest for one in lineage.ancestry(made) if one.job is None}
    changed = [name for name, digest in read.items() if digest not in (None, file_digest(root / name))]
    texts = [text for text in _texts(config) if text and not Path(text).is_absolute()]
    found = [base / path for text in texts for path in glob(text, root_dir=base, recursive=True)]
    for path in [*found, *map(Path, [*read, *lineage.code(made.job).get("modules", {})])]:
        inside = path.is_absolute() and path.is_relative_to(base) and not path.is_relative_to(root)
        link = folder / path.relative_to(base) if inside else folder
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path, link)
    return [f"warning: {name} has changed since, so the bytes will differ" for name in changed]


def _texts(value: Any) -> list[str]:
    """Return all texts in a configuration."""
    if isinstance(value, dict):
        return _texts(list(value.values()))
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _differing(lineage: Lineage, made: Made, folder: Path) -> list[str]:
    """Return warnings about code, of the stage or of what it was made from, that is not restored."""

    def other(job: Run) -> list[str]:
        modules = lineage.code(job).get("modules", {})
        paths = {name: folder / name for name in modules}  # an absolute name stays itself
        return [
            name for name, path in paths.items() if not path.is_file() or short_digest(path) != modules[name]
        ]

    assert made.job is not None
    own = other(made.job)
    lines = [f"warning: {name} is not restored as it was; the record has no secrets" for name in own]
    jobs = {one.job.identity: one.job for one in lineage.ancestry(made) if one.job}
    found = [(job.tags["spider.rule"], names) for job in jobs.values() if (names := other(job))]
    return lines + [f"warning: {line}, which is not restored" for line in by_rule(found)]


def _how_to_run(lineage: Lineage, job: Run, target: str, folder: Path) -> list[str]:
    """Return the commands that make the result again, with the recorded packages if others are installed."""
    before, here = lineage.packages(job), code.packages()
    lines = []
    if (recorded := job.tags.get("spider.processor")) not in (None, processor()):
        lines.append(f"warning: trained on {recorded}, this is {processor()}, so bytes may differ")
    command = f"snakemake --cores {job.tags.get('spider.threads', 'all')} {target}"
    if before and before != here:
        lines.append(f"# other packages are installed here than those in {PACKAGES}")
        lines.append(f"cd {shlex.quote(str(folder))} && python -m venv .venv")
        lines.append(f".venv/bin/pip install -r {PACKAGES} && .venv/bin/pip install --no-deps -e .")
        return [*lines, f'PATH="$PWD/.venv/bin:$PATH" {command}']
    return [*lines, f'cd {shlex.quote(str(folder))} && PYTHONPATH="$PWD" {command}']
