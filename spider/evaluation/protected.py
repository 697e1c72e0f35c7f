"""Texts that models are measured with, besides held-out documents: files of tasks, and files of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spider.config import Config, ConfigError
from spider.config.cleaning import SHORTEST
from spider.data.sources.local import all_texts, files_of
from spider.evaluation.questions import texts


def files(config: Config, dataset: str) -> list[Path]:
    """Return the files that a dataset is compared with. Raise `ConfigError` for a missing or unknown one."""
    found = []
    for name, task in config.protected_tasks(dataset):
        found += [Path(file) for file in task.files()]
        if missing := [file for file in task.files() if not Path(file).is_file()]:
            raise ConfigError(f"evaluation.tasks.{name}: {missing[0]}: no such file")
    return found + [file for file, _ in _own(config, dataset)]


def given(config: Config, dataset: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the source, the place and the texts of each question and document; raises as `files`."""
    for name, task in config.protected_tasks(dataset):
        yield from ((f"tasks/{name}", where, found) for where, found in texts(task))
    for file, fewest in _own(config, dataset):
        yield from ((str(file), where, found) for where, found in all_texts(file, fewest))


def check(config: Config, dataset: str) -> None:
    """Read the beginning of each file. Raise `ValueError` for a malformed one, or one without text."""
    files(config, dataset)
    for _, task in config.protected_tasks(dataset):
        next(texts(task), None)
    for file, fewest in _own(config, dataset):
        next(found for _, found in all_texts(file, fewest) if found)


def _own(config: Config, dataset: str) -> Iterator[tuple[Path, int]]:
    """Yield each file of the user that is no task, and the fewest words of its texts."""
    cleaning = config.cleaning(dataset)
    for folder in cleaning.folders if cleaning else ():
        try:
            yield from ((file, SHORTEST) for file in files_of(Path(folder)))
        except ValueError as error:
            raise ConfigError(f"datasets.{dataset}.cleaning.decontaminate: {error}") from None
