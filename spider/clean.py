"""Find what no configuration in a results folder reaches, and remove it.

A results folder has a copy of every configuration that a workflow used (``configs/``). A run, a dataset or
another result is reached if one of them names it. A configuration that is not valid for this version of
Spider reaches nothing. Records of jobs, logs and benchmarks always stay.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from spider.common.results import NEWEST, Results
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
    paths = [path for path in (root / NEWEST, *([] if newest else copies)) if path.exists()]
    configs: list[Config] = []
    invalid: list[Path] = []
    for path in paths:
        try:
            configs.append(load_config(path))
        except ValueError as error:
            log.warning("%s: not valid, so it reaches nothing: %s", path, str(error).splitlines()[0])
            invalid.append(path)
    if not configs:
        raise ValueError(f"{root}: has no valid configuration, so nothing can be kept; remove it by hand")
    found = [Leftover("configuration", path) for path in invalid if path in copies]
    return [*_data(root, configs), *_runs(Results(root), configs), *found]


def _data(root: Path, configs: list[Config]) -> Iterator[Leftover]:
    """Yield what lies there of unreached datasets, from raw files to n-gram indexes and baselines."""
    datasets = {name for config in configs for name in config.datasets}
    runs = [run for config in configs for run in config.runs.values()]
    raw = {config.raw(name) for config in configs for name in config.datasets}
    for kind, folder, names in (
        ("raw text", "raw", raw),
        ("evidence of cleaning", "cleaning", raw),
        ("shards", "shards", datasets),
        ("index of the training text", "text", datasets),
        ("tokenizer", "tokenizers", {name for config in configs for name in config.tokenizers}),
        ("scores of a foreign model", "foreign", {name for config in configs for name in config.foreign}),
    ):
        yield from (Leftover(kind, path) for path in _inside(root / folder) if path.name not in names)
    indexes = {(run.dataset, run.model.ngram.counted) for run in runs if run.model.ngram}
    for dataset in _inside(root / "ngram"):
        for index in _inside(dataset):
            if (dataset.name, index.name) not in indexes:
                yield Leftover("n-gram index", index)
    scored = [
        (config, config.stage(run, stage.name))
        for config in configs
        for run, block in config.runs.items()
        for stage in block.stages
    ]
    for kind, name_of in (("overlap", overlap_name), ("baselines", baselines_name)):
        names = {name_of(*one) for one in scored}
        yield from (Leftover(kind, p) for p in sorted((root / kind).glob("*.json")) if p.stem not in names)


def _runs(results: Results, configs: list[Config]) -> Iterator[Leftover]:
    """Yield unreached runs, and the unreached stages, checkpoints, warm-ups and pages of all runs."""
    runs = {name for config in configs for name in config.runs}
    specs = [
        config.stage(name, stage.name)
        for config in configs
        for name, run in config.runs.items()
        for stage in run.stages
    ]
    stages = {(spec.run, spec.stage) for spec in specs}
    warmups = {results.warmup(spec.run, spec.shape) for spec in specs}
    for run in results.runs:
        folder = results.run(run)
        if _in_use(folder):
            log.info("%s: left out, because it is being trained", folder)
        elif run not in runs:
            yield Leftover("run", folder)
        else:
            for stage in results.stages(run):
                if (run, stage.path.name) not in stages:
                    yield Leftover("stage", stage.path)
                    continue
                superseded = sorted(stage.path.glob("superseded-*/"))
                yield from (Leftover("superseded training", path) for path in superseded)
            for path in results.warmups(run):
                if path not in warmups:
                    yield Leftover("warm-up", path)
                    cache = path.with_suffix(".compile-cache")
                    yield from [Leftover("compile cache", cache)] if cache.exists() else []
    for page in sorted(results.page("*").parent.glob("*.html")):
        if page.stem not in runs:
            yield Leftover("page", page)


def _inside(folder: Path) -> list[Path]:
    """Return the folders and links to folders in a folder."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))


def _in_use(run: Path) -> bool:
    """Return whether a process trains in a run's folder."""
    for lock in run.glob("*/.lock"):
        try:
            with filelock.FileLock(lock, timeout=0):
                pass
        except filelock.Timeout:
            return True
    return False
