"""Paths in the results folder, and ``spider.json`` at its root.

That file has the format of the folder, which another version of Spider checks. It also marks the root, so
that a command with a path inside the folder finds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spider.common import VERSION
from spider.common.files import digest, read_json, write_json, write_text

FORMAT = 1
MARK = "spider.json"
#: The newest configuration of a results folder, for people and for commands that name none.
NEWEST = "config.yaml"


@dataclass(frozen=True)
class _Inside:
    """Attribute of a folder: the path of this name inside it."""

    name: str

    def __get__(self, folder: StageFolder, owner: type[StageFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class StageFolder:
    """The files of one stage in ``runs/{run}/{stage}``."""

    path: Path

    origin = _Inside("origin.json")  # the training that the checkpoints and metrics belong to
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples")  # written during the training
    checkpoints = _Inside("checkpoints")
    receipt = _Inside("train.json")
    evaluation = _Inside("evaluation.json")
    checkpoint_scores = _Inside("checkpoints.json")  # of checkpoints up to the end of the stage
    scores = _Inside("scores")  # of each of them, kept if the job is killed
    baselines = _Inside("baselines.json")  # rates of compressors on the text that the stage is scored on
    sample = _Inside("sample.json")
    sample_text = _Inside("sample.txt")
    compressed = _Inside("compressed")
    lock = _Inside(".lock")  # held by the trainer of this folder
    holder = _Inside(".lock.json")  # process and host of that trainer


@dataclass(frozen=True)
class CompressedFolder(StageFolder):
    """The files of a stage's compressed model and of its evaluation, in the stage's folder ``compressed``."""

    receipt = _Inside("compress.json")
    model = _Inside("model.spider")


@dataclass(frozen=True)
class Results:
    """Paths in a results folder, in the order of the workflow."""

    root: Path

    def raw(self, dataset: str, part: str) -> Path:
        return self.root / "raw" / dataset / f"{part}.parquet"

    def tokenizer(self, name: str) -> Path:
        return self.root / "tokenizers" / name / "tokenizer.json"

    def cleaning(self, dataset: str, step: str, part: str) -> Path:
        """Return a file of the cleaning of a part: ``signatures``, ``pairs``, ``removed`` and others."""
        return self.root / "cleaning" / dataset / step / f"{part}.parquet"

    def cleaned(self, dataset: str, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Divide the parts of a dataset into those that were cleaned together, and the new ones at the end.

        A file names the last part of those that one job has decided on. It stays when the job runs again.
        """
        together, first = [], 0
        for end, part in enumerate(parts, 1):
            if end == len(parts) or self.decided(dataset, part).exists():
                together.append(parts[first:end])
                first = end
        return together

    def decided(self, dataset: str, last: str) -> Path:
        """Return the file that says that parts up to the last one were cleaned."""
        return self.root / "cleaning" / dataset / "decided" / f"{last}.json"

    def protected(self, dataset: str) -> Path:
        """Return the file of the texts that the documents of a dataset are compared with."""
        return self.root / "cleaning" / dataset / "protected.parquet"

    def shards(self, dataset: str) -> Path:
        return self.root / "shards" / dataset

    @property
    def runs(self) -> list[str]:
        return [path.name for path in sorted((self.root / "runs").glob("*/"))]

    def run(self, run: str) -> Path:
        return self.root / "runs" / run

    def stage(self, run: str, stage: str) -> StageFolder:
        return StageFolder(self.run(run) / stage)

    def stages(self, run: str) -> list[StageFolder]:
        """Return the stage folders of a run, sorted by name, including stages that are not trained yet."""
        return [StageFolder(path) for path in sorted(self.run(run).glob("*/"))]

    def foreign(self, name: str) -> StageFolder:
        """Return the folder of the scores of a model that others trained."""
        return StageFolder(self.root / "foreign" / name)

    @property
    def foreign_scores(self) -> list[Path]:
        """Return the evaluations of all models that others trained."""
        return sorted(self.root.glob("foreign/*/evaluation.json"))

    def warmup(self, run: str, shape: str) -> Path:
        return self.run(run) / f"warmup-{shape}.json"

    def warmups(self, run: str) -> list[Path]:
        return sorted(self.run(run).glob("warmup-*.json"))

    def ngram(self, dataset: str, counted: str, text: str = "full") -> Path:
        """Return the folder of a dataset's n-gram index.

        Args:
            counted: digest of the settings of the index.
            text: ``split`` for the n-gram split only, which training reads; ``full`` for the index with the
                training split merged in, which everything else reads.
        """
        return self.root / "ngram" / dataset / counted / text

    def overlap(self, name: str) -> Path:
        """Return the file of what of a held-out text occurs in the training text (`spider.config.scored`)."""
        return self.root / "overlap" / f"{name}.json"

    def baselines(self, name: str) -> Path:
        """Return the file of the rates of compressors on a held-out text (`spider.config.scored`)."""
        return self.root / "baselines" / f"{name}.json"

    @property
    def report(self) -> Path:
        return self.root / "report"

    def page(self, run: str) -> Path:
        return self.report / "runs" / f"{run}.html"


#: What `spider clean` may remove, by patterns. A slash at the end finds folders and links to them.
REMOVABLE = {
    "raw/*/": "raw text",
    "cleaning/*/": "evidence of cleaning",
    "shards/*/": "shards",
    "text/*/": "index of the training text",
    "tokenizers/*/": "tokenizer",
    "ngram/*/*/": "n-gram index",
    "overlap/*.json": "overlap",
    "baselines/*.json": "baselines",
    "foreign/*/": "scores of a foreign model",
    "runs/*/": "run",
    "runs/*/*/": "stage",
    "runs/*/*/superseded-*/": "superseded training",
    "runs/*/warmup-*.json": "warm-up",
    "runs/*/warmup-*.compile-cache": "compile cache",
    "report/runs/*.html": "page",
}


def check_root(root: Path) -> None:
    """Raise `ValueError` for a results folder of another format."""
    if not (root / MARK).exists():
        return
    plain = read_json(root / MARK)
    mark = plain if isinstance(plain, dict) else {}
    if mark.get("format") != FORMAT:
        raise ValueError(
            f"{root}: written by Spider {mark.get('spider', '(unknown)')} in format {mark.get('format')}, "
            f"this is Spider {VERSION} with format {FORMAT}; "
            "name another folder under `results:` in the configuration, or move this one away"
        )


def root_of(path: Path) -> Path | None:
    """Return the results folder that contains a path, or None."""
    absolute = path.resolve()
    return next((p for p in (absolute, *absolute.parents) if (p / MARK).is_file()), None)


def snapshot(root: Path, config: dict[str, Any]) -> Path:
    """Return the path of a configuration's copy in a results folder. Its name is a digest of the text."""
    return root / "configs" / f"{digest(_text(config))}.yaml"


def write_config(root: Path, config: dict[str, Any]) -> Path:
    """Copy a configuration into its results folder, for the jobs of one workflow, and return the copy.

    Write three files, if their content differs: ``spider.json``, the `snapshot` that the jobs read, and
    ``config.yaml``, the newest configuration, for people.

    Raises:
        ValueError: another version of Spider wrote the folder, or the folder cannot be written.
    """
    check_root(root)
    text, copy = _text(config), snapshot(root, config)
    try:
        if not (root / MARK).exists():
            write_json(root / MARK, {"format": FORMAT, "spider": VERSION})
        for path in (copy, root / NEWEST):
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
    except OSError as error:
        remedy = "make it writable, or name another folder under `results:` in the configuration"
        raise ValueError(f"{root}: cannot be written ({error.strerror}); {remedy}") from None
    return copy


def _text(config: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(config))  # a configuration from Snakemake has mappings of other classes
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # PyYAML may be built without its C part
    return str(yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True))
