"""What the rules ask of a configuration: inputs, params and resources of jobs, and the targets of a run.

Snakemake calls the functions of `Plan` with the wildcards of a job. They use no network, and import
no torch. A path begins with ``<results>``, which Snakemake replaces by the results folder.

Snakemake does not record a param whose function takes ``output``, so its value is no reason to run a job
again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from snakemake.io import ancient, contains_wildcard, expand, flag, local

from spider.common.results import Results
from spider.config import CompressConfig, Config, Dataset, StageSpec
from spider.config.data import Cleaning
from spider.config.requests import Request, Requests
from spider.config.schema import model_files
from spider.config.scored import baselines_name, learned_splits, overlap_name, stage_with
from spider.evaluation.questions import protected_files
from spider.provenance.made import STANDS_FOR, in_future
from spider.workflow.doctor import obstacles, own_text
from spider.workflow.start import lacking_gpus


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a function. After an error for the user, end Snakemake with its message."""
    try:
        return function(*arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")


def growing(value: Any) -> Callable[..., Any]:
    """Return a resource that grows with each attempt. A profile may cap it."""
    return lambda wildcards, attempt: attempt * (value(wildcards) if callable(value) else value)


def requested(request: Callable[[Any], Request]) -> dict[str, Callable[..., Any]]:
    """Return memory and time as resources that grow with each attempt."""
    minutes = growing(lambda wildcards: request(wildcards).minutes)
    return {"mem_mb": growing(lambda wildcards: request(wildcards).mem_mb), "runtime": minutes}


def watched(files: Iterable[str]) -> list[Any]:
    """Return the user's own files as inputs, so that a job runs again after an edit.

    Snakemake takes braces in a path for a wildcard. This module stands for a file with such a path, and only
    the recorder compares that file.
    """
    return [
        flag(ancient(local(__file__)), STANDS_FOR, file) if contains_wildcard(file) else local(file)
        for file in sorted(set(files))
    ]


class Plan:
    """What a configuration says about jobs.

    Args:
        root: the results folder.
        here: whether jobs run on this machine.
        bound: the most GPUs that all jobs at once may use; None: no bound.
    """

    def __init__(self, config: Config, root: Path, *, here: bool, bound: int | None = None) -> None:
        self.config, self.root, self.here, self.bound = config, root, here, bound
        self.requests = Requests(config, root)
        self.parts: Callable[[str], dict[str, str]] = cache(partial(checked, config.parts))
        self.cleaned = cache(lambda dataset: Results(root).cleaned(dataset, tuple(self.parts(dataset))))
        """The parts of a dataset that are cleaned together: new ones apart from finished ones."""
        self.bucket_count = cache(config.buckets)
        self.stage = cache(config.stage)
        self.stage_with = cache(partial(stage_with, config))
        runs = {name: run.resources.model_dump() for name, run in config.runs.items()}
        for resources in runs.values():
            resources["gpu"] = min(1, resources["gpus"])  # of a job that is one process
        # A foreign model has the resources of the run whose text it is scored on.
        self.resources = runs | {name: runs[config.scored_like().run] for name in config.foreign}
        self.wanted: list[str] = []
        """Targets of the rule `all` that extras add."""
        self.measured_by: list[Callable[[str], list[str]]] = []
        """Functions of extras that name further files of a run, for its page and the comparison."""

    # ------------------------------------------------------------------------------------------ datasets

    def dataset(self, wildcards: Any) -> Dataset:
        return self.config.datasets[wildcards.dataset]

    def existing(self, key: str, files: Iterable[str]) -> list[Any]:
        """Return the files that a key names, the user's own or downloaded ones.

        A missing one ends Snakemake, which would not name the key.
        """
        files = [*files]
        missing = [one for one in files if not (Path(one).exists() or self.config.download(one))]
        if missing:
            remedy = "put it there, or name where it comes from (downloads)"
            sys.exit(f"error: {key}: {missing[0]}: no such file or folder; {remedy}")
        return watched(files)

    def downloaded(self) -> str:
        """Return a regular expression of the paths of the files that the workflow downloads."""
        places = self.config.downloads
        return "|".join(re.escape(one) + "/.+" * (self.config.download(one) is None) for one in places)

    def own_files(self, wildcards: Any) -> list[Any]:
        """Return the user's own files that a part is read from."""
        item = self.parts(wildcards.dataset)[wildcards.part]
        return watched(self.dataset(wildcards).source.own_files(item))

    def raw_identity(self, wildcards: Any) -> Any:
        """Return what decides the content of a downloaded or imported part."""
        dataset = self.dataset(wildcards)
        return dataset.source.identity(self.parts(wildcards.dataset)[wildcards.part], dataset)

    def encoding_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return what decides the ids of a part, besides its text and its tokenizer."""
        dataset = self.dataset(wildcards)
        return dataset.encoding() | dataset.source.encoding(wildcards.part)

    def part_files(self, pattern: str) -> Callable[[Any], list[str]]:
        """Return an input function that names one file for each part of a dataset."""
        return lambda wildcards: expand(
            f"<results>/{pattern}", part=self.parts(wildcards.dataset), **wildcards
        )

    def raw_part(self, wildcards: Any) -> Any:
        """Return the file that a part is encoded from. Imported token ids are read where they lie."""
        if self.dataset(wildcards).source.TOKENS:
            return watched([self.parts(wildcards.dataset)[wildcards.part]])
        return f"<results>/raw/{self.config.raw(wildcards.dataset)}/{wildcards.part}.parquet"

    def raw_records(self, wildcards: Any) -> list[str]:
        """Return the records of the downloaded parts of a dataset."""
        if self.dataset(wildcards).source.TOKENS:
            return []
        raw = f"<results>/raw/{self.config.raw(wildcards.dataset)}/{{part}}.json"
        return expand(raw, part=self.parts(wildcards.dataset))

    def removed(self, dataset: str, *parts: str) -> list[str]:
        """Return the evidence of what is left out of parts, if the documents of a dataset are compared."""
        raw = self.config.raw(dataset)
        compared = parts if self.config.cleaning(raw) else ()
        return [f"<results>/cleaning/{raw}/removed/{part}.parquet" for part in compared]

    def removed_part(self, wildcards: Any) -> list[str]:
        """Return the evidence of what encoding leaves out."""
        return self.removed(wildcards.dataset, wildcards.part)

    def tokenizer_file(self, wildcards: Any) -> Any:
        """Return the tokenizer that encodes a dataset, or nothing for bytes."""
        dataset = self.dataset(wildcards)
        if dataset.source.own_tokenizer:
            return watched([dataset.source.own_tokenizer])
        return self.tokenizer_of(dataset)

    def tokenizer_of(self, dataset: Dataset) -> list[str]:
        """Return the tokenizer that a dataset names, or nothing for bytes."""
        return [f"<results>/tokenizers/{dataset.tokenizer}/tokenizer.json"] if dataset.tokenizer else []

    def learned_from(self, wildcards: Any) -> list[str]:
        """Return the parts that a tokenizer is learned from."""
        data = self.config.tokenizers[wildcards.tokenizer].data
        return expand(f"<results>/raw/{self.config.raw(data)}/{{part}}.parquet", part=self.parts(data))

    def not_learned_from(self, wildcards: Any) -> list[str]:
        """Return the evidence of the documents that a tokenizer is not learned from."""
        data = self.config.tokenizers[wildcards.tokenizer].data
        return self.removed(data, *self.parts(data))

    def tokenizer_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return what decides a tokenizer, besides the text that it is learned from."""
        tokenizer = self.config.tokenizers[wildcards.tokenizer]
        held_out = self.config.datasets[tokenizer.data].held_out()
        return {"learner": tokenizer.LEARNER, **tokenizer.changed(exclude={"data"}), **held_out}

    def metadata(self, *datasets: str | None) -> list[str]:
        """Return the files that describe the shards of datasets. A stream has none."""
        known = [name for name in dict.fromkeys(datasets) if name]
        stored = (name for name in known if not self.config.datasets[name].source.STREAMED)
        return [f"<results>/shards/{name}/metadata.json" for name in stored]

    def shards(self, wildcards: Any) -> list[str]:
        """Return the file that describes the shards of a dataset."""
        return self.metadata(wildcards.dataset)

    def indexes(self, *texts: str) -> Callable[[Any], list[str]]:
        """Return an input function that names the n-gram indexes of a run, if its model reads any."""

        def files(wildcards: Any) -> list[str]:
            run = self.config.runs[wildcards.run]
            folder = f"<results>/ngram/{run.dataset}/{run.model.ngram.counted}" if run.model.ngram else ""
            return [f"{folder}/{text}/index.json" for text in texts] if folder else []

        return files

    def ngram_reader(self, wildcards: Any, output: Any) -> str:
        """Return a run that reads an n-gram index. The path of an index contains all that decides it."""
        return self.config.ngram_reader(wildcards.dataset, wildcards.counted)

    # ------------------------------------------------------------------------------------------ cleaning

    def keys(self, wildcards: Any) -> list[str]:
        """Return the signatures of all parts up to the last one that is cleaned.

        The jobs that pair near duplicates read the raw files too, so the first bucket waits for these.
        """
        parts = self.config.in_order(wildcards.dataset, wildcards.last)
        files = [f"<results>/cleaning/{name}/signatures/{part}.parquet" for name, part in parts]
        texts = self.compared_texts(wildcards.dataset, wildcards.last) if wildcards.bucket == "0" else []
        return files + texts

    def compared_texts(self, dataset: str, last: str) -> list[str]:
        """Return the raw files of all parts up to the last one that is cleaned, if by their texts."""
        parts = self.config.in_order(dataset, last) if self._cleaning(dataset).near else []
        return [f"<results>/raw/{name}/{part}.parquet" for name, part in parts]

    def first_cleaned(self, wildcards: Any) -> str:
        """Return the first part that is cleaned together with the last one."""
        return next(parts[0] for parts in self.cleaned(wildcards.dataset) if parts[-1] == wildcards.last)

    def buckets(self, wildcards: Any) -> list[str]:
        """Return what was found of a part in the keys of all parts."""
        dataset, part = wildcards.dataset, wildcards.part
        last = next(parts[-1] for parts in self.cleaned(dataset) if part in parts)
        numbers = range(self.bucket_count(dataset))
        return [f"<results>/cleaning/{dataset}/buckets/{last}-{number}" for number in numbers]

    def evidence(self, dataset: str, parts: Sequence[str]) -> list[str]:
        """Return the files that decide which documents of parts are removed, which are cleaned together."""
        steps = self._cleaning(dataset).steps
        pattern = "<results>/cleaning/{dataset}/{step}/{part}.parquet"
        files = expand(pattern, dataset=dataset, step=steps, part=parts)
        before = self.config.in_order(dataset, parts[-1])[: -len(parts)]
        removed = [file for name, part in before for file in self.removed(name, part)]
        return [*files, *removed, *self.compared_texts(dataset, parts[-1])]

    def _cleaning(self, dataset: str) -> Cleaning:
        """Return how the documents of a dataset are compared. Only such datasets have these jobs."""
        cleaning = self.config.cleaning(dataset)
        assert cleaning is not None
        return cleaning

    def signatures_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return what decides the signatures of a part, besides its text."""
        near = self.config.near(wildcards.dataset)
        return self.dataset(wildcards).chosen() | {"hash": "xxh3", "near": near}

    def pairs_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return what decides the pairs of a part, besides texts."""
        cleaning = self._cleaning(wildcards.dataset)
        return {"exact": cleaning.exact, "near": cleaning.near}

    def split_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return what decides which documents of a part are held out, and their text."""
        dataset = self.dataset(wildcards)
        return dataset.held_out() | dataset.chosen() | dataset.changed(include={"max_document_bytes"})

    def protected_texts(self, wildcards: Any) -> list[Any]:
        """Return the texts that a dataset is compared with: of held-out documents, tasks and other files."""
        held_out = [
            f"<results>/cleaning/{name}/held_out/{part}.parquet"
            for name in self.config.protected(wildcards.dataset)
            for part in self.parts(name)
        ]
        own = checked(protected_files, self.config, wildcards.dataset)
        return held_out + watched(map(str, own))

    # ----------------------------------------------------------------------------------- runs and stages

    def stage_of(self, wildcards: Any) -> StageSpec:
        return self.stage(wildcards.run, wildcards.stage)

    def stage_settings(self, wildcards: Any, output: Any) -> dict[str, Any]:
        """Return what the identity of a stage stands for, for the record of its job."""
        return self.stage_of(wildcards).recorded()

    def training_data(self, wildcards: Any) -> list[str]:
        """Return the files that describe the datasets of a stage, or the tokenizer of a stream."""
        spec = self.stage_of(wildcards)
        return self.tokenizer_of(spec.stream) if spec.stream else self.metadata(*spec.weights)

    def previous_receipt(self, wildcards: Any) -> str | list[str]:
        """Return the receipt of the stage before. The first stage has none."""
        before = self.stage_folders(wildcards.run)[: self.stage_of(wildcards).index]
        return f"{before[-1]}/train.json" if before else []

    def warmup(self, wildcards: Any) -> str:
        """Return the warm-up of the shape of a stage."""
        return f"<results>/runs/{wildcards.run}/warmup-{self.stage_of(wildcards).shape}.json"

    def packed_rows(self, wildcards: Any) -> list[str]:
        """Return the plan of the rows of a stage, if they are packed."""
        return _rows(self.stage_of(wildcards))

    def measured_stage(self, wildcards: Any) -> StageSpec:
        """Return the first stage of a shape, which its warm-up measures."""
        specs = (self.stage(wildcards.run, one.name) for one in self.config.runs[wildcards.run].stages)
        return next(spec for spec in specs if spec.shape == wildcards.shape)

    def shape_settings(self, wildcards: Any, output: Any) -> dict[str, Any]:
        """Return what a shape stands for, for the record of its job."""
        return self.measured_stage(wildcards).shape_fields()

    def rows_with_documents(self, wildcards: Any) -> list[str]:
        """Return the plans that decide how many documents a row of the measured stage has."""
        spec = self.measured_stage(wildcards)
        return _rows(spec) if spec.settings.attend == "document" else []

    def compress_identity(self, wildcards: Any) -> dict[str, Any]:
        """Return how a run is compressed. A target may name any stage of any run."""
        return (self.config.runs[wildcards.run].compress or CompressConfig()).changed()

    # ---------------------------------------------------------------------------------------- evaluation

    def receipt(self, wildcards: Any) -> str:
        """Return the file that names the weights of a stage, or of its compressed model."""
        name = "compressed/compress.json" if getattr(wildcards, "compressed", "") else "train.json"
        return f"<results>/runs/{wildcards.run}/{wildcards.stage}/{name}"

    def scored_data(self, wildcards: Any) -> list[str]:
        """Return the files that describe the datasets whose held-out text is scored."""
        data = self.stage_of(wildcards).evaluation.data
        return self.metadata(data, *self.config.sources(wildcards.run))

    def texts_of(self, name_of: Callable[[Config, StageSpec], str]) -> Callable[[Any], list[str]]:
        """Return an input function: what describes a scored text, and the texts that its run learns from."""

        def files(wildcards: Any) -> list[str]:
            spec = self.stage_with(wildcards.scored, name_of)
            learned = learned_splits(self.config, spec)
            return self.metadata(spec.evaluation.data, *(name for name, _ in learned))

        return files

    def overlap_of(self, wildcards: Any) -> str:
        """Return the overlap of the held-out text of a stage, or of the text of baselines."""
        named = hasattr(wildcards, "scored")
        spec = self.stage_with(wildcards.scored, baselines_name) if named else self.stage_of(wildcards)
        return f"<results>/overlap/{overlap_name(self.config, spec)}.json"

    def shared_baselines(self, wildcards: Any) -> str:
        """Return the baselines of the held-out text of a stage."""
        return f"<results>/baselines/{baselines_name(self.config, self.stage_of(wildcards))}.json"

    def task_files(self, wildcards: Any) -> list[Any]:
        """Return the user's own files that the questions of a stage are read from."""
        key = f"runs.{wildcards.run}.evaluation.tasks"
        tasks = self.stage_of(wildcards).evaluation.tasks
        files = {
            file for name, task in tasks.items() for file in self.existing(f"{key}.{name}", task.files())
        }
        return sorted(files)

    def foreign_spec(self, _: Any) -> StageSpec:
        """Return the stage whose text and tasks a foreign model shares."""
        return self.config.scored_like()

    def foreign_files(self, wildcards: Any) -> list[Any]:
        """Return the files of a foreign model."""
        folder = Path(self.config.foreign[wildcards.run])
        return self.existing(f"foreign.{wildcards.run}", [*map(str, model_files(folder))])

    # ------------------------------------------------------------------------------------------- targets

    def stage_folders(self, *runs: str) -> list[str]:
        """Return the folders of the stages of these runs."""
        return [
            f"<results>/runs/{run}/{stage.name}" for run in runs for stage in self.config.runs[run].stages
        ]

    def model_folders(self, *runs: str) -> list[str]:
        """Return the folders of the stages of these runs, and those of their compressed models."""
        compressed = [run for run in runs if self.config.runs[run].compress]
        return self.stage_folders(*runs) + [f"{self.stage_folders(run)[-1]}/compressed" for run in compressed]

    def scores(self, *runs: str) -> list[str]:
        """Return the scores and samples of these runs, and what extras measure."""
        names = ("evaluation.json", "sample.json", "sample.txt")
        files = expand("{folder}/{name}", folder=self.model_folders(*runs), name=names)
        for run in runs:
            folders = self.stage_folders(run)
            files += expand("{folder}/{name}.json", folder=folders, name=("checkpoints", "baselines"))
            files += [file for measured_by in self.measured_by for file in measured_by(run)]
        return files

    def measured(self, *runs: str) -> list[str]:
        """Return all that is measured, written and drawn of these runs."""
        figures = ("loss.svg", "inside.svg", "boundaries.html")
        drawn = expand("{folder}/{name}", folder=self.stage_folders(*runs), name=figures)
        return self.scores(*runs) + drawn

    # ---------------------------------------------------------------------------------------- resources

    def of_run(self, name: str) -> Any:
        """Return a resource that all runs share, or else a function that returns that of a job's run.

        Snakemake calls a function several times for each job, and its `lookup` walks through all runs.
        """
        first, *others = {resources[name] for resources in self.resources.values()}
        return (lambda wildcards: self.resources[wildcards.run][name]) if others else first

    def of_part(self, rule: str) -> dict[str, Callable[..., Any]]:
        """Return the memory and time of the jobs of a rule that read the text of one part."""

        def request(wildcards: Any) -> Request:
            item = self.parts(wildcards.dataset)[wildcards.part]
            return self.requests.of_part(rule, wildcards.dataset, wildcards.part, item)

        return requested(request)

    def of_nodes(self) -> dict[str, Callable[..., Any]]:
        """Return the resources of trainings on several nodes, for Snakemake's Slurm executor.

        A job has one task on each node, which it starts itself. A resource of None is not set.
        """
        if all(resources["nodes"] == 1 for resources in self.resources.values()):
            return {}

        def several(wildcards: Any) -> int | None:
            nodes: int = self.resources[wildcards.run]["nodes"]
            return nodes if nodes > 1 else None

        return {
            "mpi": lambda wildcards: several(wildcards) and "srun",
            "tasks": several,
            "tasks_per_gpu": lambda wildcards: several(wildcards) and 0,
        }

    # ------------------------------------------------------------------------------------------- warnings

    def hopeless(self, jobs: Sequence[Any]) -> list[str]:
        """Return why some of these jobs would fail: their GPUs, times of files, their text, or the disk."""
        found = [*self.lacking_gpus(jobs), *self.future_inputs(jobs)]
        fetched = [str(job.output.file) for job in jobs if job.rule.name == "fetch" and self.here]
        return found + obstacles(self.config, self.root, self._items(jobs), fetched)

    def lacking_gpus(self, jobs: Iterable[Any]) -> list[str]:
        """Return a line for each reason why runs of these jobs cannot have their GPUs.

        Snakemake would start a job that requests more than the user's bound, as if it requested the bound.
        Another executor's jobs run on other machines.
        """
        runs = sorted({job.wildcards.run for job in jobs if job.resources.get("gpu") is not None})
        asked = {run: gpus for run in runs if (gpus := self.resources[run]["gpus"])}
        found = [lacking_gpus(gpus) for gpus in sorted({*asked.values()})] if self.here else []
        if self.bound is not None:
            found += [
                f"runs.{run}.resources.gpus: is {gpus}, and --resources gpu={self.bound} allows fewer; "
                "raise the bound"
                for run, gpus in asked.items()
                if gpus > self.bound
            ]
        return [reason for reason in found if reason]

    def future_inputs(self, jobs: Iterable[Any]) -> list[str]:
        """Return a line for each input of these jobs whose time is in the future."""
        return in_future(file for job in jobs for file in job.input)

    def own_texts(self, jobs: Iterable[Any]) -> list[str]:
        """Return a line for each dataset of the user's own files that these jobs need."""
        needed = {job.wildcards.dataset for job in jobs if job.rule.name == "index"}
        lines = (own_text(self.config, self.root, name) for name in self.config.datasets if name in needed)
        return [line for line in lines if line]

    def _items(self, jobs: Iterable[Any]) -> dict[str, list[str]]:
        """Return the items of datasets that jobs read: the user's files, and what this machine downloads."""
        items: dict[str, list[str]] = {}
        for job in jobs:
            if job.rule.name in ("download", "download_temp", "encode", "encode_with_ngrams"):
                name = job.wildcards.dataset
                item = self.parts(name)[job.wildcards.part]
                downloads = self.here and job.rule.name.startswith("download")
                if downloads or self.config.datasets[name].source.own_files(item):
                    items.setdefault(name, []).append(item)
            elif job.rule.name == "train" and self.here and (spec := self.stage_of(job.wildcards)).stream:
                items[spec.data] = []
        return items


def _rows(spec: StageSpec) -> list[str]:
    """Return the plans of the rows of a stage, if they are packed."""
    packed = [f"<results>/shards/{name}/packed-{spec.settings.seq_len}.json" for name in spec.weights]
    return packed if spec.settings.packing == "best_fit" else []
