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
from dataclasses import dataclass, field
from pathlib import Path

import filelock

from spider.config import Config, load_config
from spider.files import read_json
from spider.results import NEWEST, Results

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


@dataclass
class Reached:
    """The names that configurations reach."""

    raw: set[str] = field(default_factory=set)
    datasets: set[str] = field(default_factory=set)
    tokenizers: set[str] = field(default_factory=set)
    indexes: set[tuple[str, str]] = field(default_factory=set)
    """Datasets with the digests of their n-gram indexes."""
    runs: set[str] = field(default_factory=set)
    stages: set[tuple[str, str]] = field(default_factory=set)
    warmups: set[tuple[str, str]] = field(default_factory=set)
    """Runs with the digests of their warm-ups."""

    def add(self, config: Config) -> None:
        """Add the names of one configuration."""
        self.datasets |= set(config.datasets)
        self.raw |= {dataset.like or name for name, dataset in config.datasets.items()}
        self.tokenizers |= set(config.tokenizers)
        for name, run in config.runs.items():
            self.runs.add(name)
            if run.model.ngram is not None:
                self.indexes.add((run.data, run.model.ngram.counted))
            for stage in run.stages:
                self.stages.add((name, stage.name))
                self.warmups.add((name, config.stage(name, stage.name).shape))


def leftovers(root: Path, *, newest: bool = False) -> list[Leftover]:
    """Return what no configuration in a results folder reaches. Runs that are being trained are left out.

    Args:
        newest: whether only the newest configuration counts.

    Raises:
        ValueError: the folder has no valid configuration.
    """
    copies = sorted((root / "configs").glob("*.yaml"))
    paths = [path for path in (root / NEWEST, *([] if newest else copies)) if path.exists()]
    reached = Reached()
    invalid: list[Path] = []
    for path in paths:
        try:
            reached.add(load_config(path))
        except ValueError as error:
            log.warning("%s: not valid, so it reaches nothing: %s", path, str(error).splitlines()[0])
            invalid.append(path)
    if len(invalid) == len(paths):
        raise ValueError(f"{root}: has no valid configuration, so nothing can be kept; remove it by hand")
    found = [Leftover("configuration", path) for path in invalid if path in copies]
    return [*_data(root, reached), *_runs(Results(root), reached), *found]


def _data(root: Path, reached: Reached) -> Iterator[Leftover]:
    """Yield the raw files, shards, tokenizers, n-gram indexes and baselines of unreached datasets."""
    for kind, folder, names in (
        ("raw text", "raw", reached.raw),
        ("shards", "shards", reached.datasets),
        ("tokenizer", "tokenizers", reached.tokenizers),
    ):
        yield from (Leftover(kind, path) for path in _inside(root / folder) if path.name not in names)
    for dataset in _inside(root / "ngram"):
        for index in _inside(dataset):
            if (dataset.name, index.name) not in reached.indexes:
                yield Leftover("n-gram index", index)
    metadata = [root / "shards" / name / "metadata.json" for name in sorted(reached.datasets)]
    digests = {read_json(path)["digest"] for path in metadata if path.exists()}
    for path in sorted((root / "baselines").glob("*.json")):
        spans = read_json(path)["of"]["split"] or []
        if not {digest for digest, *_ in spans} <= digests:
            yield Leftover("baseline", path)


def _runs(results: Results, reached: Reached) -> Iterator[Leftover]:
    """Yield unreached runs, and the unreached stages, checkpoints, warm-ups and pages of all runs."""
    for run in results.runs:
        folder = results.run(run)
        if _in_use(folder):
            log.info("%s: left out, because it is being trained", folder)
        elif run not in reached.runs:
            yield Leftover("run", folder)
        else:
            for stage in results.stages(run):
                if (run, stage.path.name) not in reached.stages:
                    yield Leftover("stage", stage.path)
                    continue
                superseded = sorted(stage.path.glob("superseded-*/"))
                yield from (Leftover("superseded training", path) for path in superseded)
            for path in results.warmups(run):
                if (run, path.stem.removeprefix("warmup-")) not in reached.warmups:
                    yield Leftover("warm-up", path)
                    cache = path.with_suffix(".compile-cache")
                    yield from [Leftover("compile cache", cache)] if cache.exists() else []
    for page in sorted(results.page("*").parent.glob("*.html")):
        if page.stem not in reached.runs:
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
