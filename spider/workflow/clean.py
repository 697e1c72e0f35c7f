"""Find what no configuration in a results folder reaches, and remove it.

A results folder has a copy of every configuration that a workflow used (``configs/``). A run, a dataset or
another result is reached if one of them names it. A configuration that is not valid for this version of
Spider reaches nothing. Records of jobs, logs and benchmarks always stay.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import filelock

from spider.common.results import NEWEST, REMOVABLE
from spider.config import Config, load_config
from spider.config.scored import baselines_name, overlap_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftover:
    """A file or a folder that no configuration reaches."""

    kind: str
    path: Path

    @property
    def bytes(self) -> int:
        """Size of all files, without those behind symbolic links."""
        if self.path.is_symlink() or self.path.is_file():
            return self.path.lstat().st_size
        files = (Path(parent, name) for parent, _, names in os.walk(self.path) for name in names)
        return sum(file.lstat().st_size for file in files)

    def remove(self) -> None:
        """Remove the file or the folder. A symbolic link is removed, and its target stays."""
        if self.path.is_symlink() or self.path.is_file():
            self.path.unlink()
        else:
            shutil.rmtree(self.path)


def leftovers(root: Path, *, newest: bool = False) -> list[Leftover]:
    """Return what no configuration in a results folder reaches. Runs that are being trained are left out.

    Args:
        newest: whether only the newest configuration counts.

    Raises:
        ValueError: the folder has no valid configuration.
    """
    copies = sorted((root / "configs").glob("*.yaml"))
    reached: set[Path] = set()
    invalid: list[Path] = []
    for path in filter(Path.exists, [root / NEWEST, *([] if newest else copies)]):
        try:
            reached |= {root / name for name in _reached(load_config(path))}
        except ValueError as error:
            log.warning("%s: not valid, so it reaches nothing: %s", path, str(error).splitlines()[0])
            invalid.append(path)
    if not reached:
        raise ValueError(f"{root}: has no valid configuration, so nothing can be kept; remove it by hand")
    kept_out = [run for run in root.glob("runs/*/") if _in_use(run)]
    for run in kept_out:
        log.info("%s: left out, because it is being trained", run)
    found = [Leftover("configuration", path) for path in invalid if path in copies]
    for pattern, kind in REMOVABLE.items():
        for path in sorted(root.glob(pattern)):
            inside = any(path.is_relative_to(one) for one in (*kept_out, *(one.path for one in found)))
            if path not in reached and not inside and not path.name.startswith("."):
                found.append(Leftover(kind, path))
    return found


def _reached(config: Config) -> set[str]:
    """Return the paths in a results folder that a configuration names, whether they exist or not."""
    found = {f"{folder}/{config.raw(name)}" for name in config.datasets for folder in ("raw", "cleaning")}
    found |= {f"{folder}/{name}" for name in config.datasets for folder in ("shards", "text")}
    found |= {f"tokenizers/{name}" for name in config.tokenizers}
    found |= {f"foreign/{name}" for name in config.foreign}
    for run, block in config.runs.items():
        found |= {f"runs/{run}", f"report/runs/{run}.html"}
        if block.model.ngram:
            found.add(f"ngram/{block.dataset}/{block.model.ngram.counted}")
        for stage in block.stages:
            spec = config.stage(run, stage.name)
            found |= {
                f"runs/{run}/{stage.name}",
                f"runs/{run}/warmup-{spec.shape}.json",
                f"runs/{run}/warmup-{spec.shape}.compile-cache",
                f"overlap/{overlap_name(config, spec)}.json",
                f"baselines/{baselines_name(config, spec)}.json",
            }
    return found


def _in_use(run: Path) -> bool:
    """Return whether a process trains in a run's folder."""
    for lock in run.glob("*/.lock"):
        try:
            with filelock.FileLock(lock, timeout=0):
                pass
        except filelock.Timeout:
            return True
    return False
