"""The whole configuration: read from a file, with settings of the command line, and validated.

Settings of the command line and of the environment are written into the parsed file
(`spider.config.settings`). The result is then validated like a file, with the same messages.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from spider.common import extras
from spider.common.record import key_path
from spider.config.block import Block, ConfigError, Name, explain, matches, must_be, none_such
from spider.config.checks import data_problems, sized, token_problems
from spider.config.data import Cleaning, Dataset, TokenizerConfig, expand_likes
from spider.config.imports import allow_import, measurement_problems
from spider.config.run import Run, RunSettings, TrackingConfig, weights_of
from spider.config.settings import expand_grids, put, resolve
from spider.config.spec import StageSpec
from spider.config.tasks import TaskConfig

_HUB = "hf://datasets/"
#: Most jobs that find equal keys in the parts of a dataset.
_MOST_BUCKETS = 4
_an_origin = must_be(
    f"a dataset repository, {_HUB}OWNER/NAME@REVISION, or a file, https://ADDRESS#sha256=DIGEST",
    matches(rf"{_HUB}[^/@]+/[^/@]+@[^/@]+|https?://[^#]+#sha256=[0-9a-f]{{64}}"),
)
_without_password = must_be(
    "an address without a password, which the environment or the files of its package have",
    matches(r"(?!.*://[^/]*@).+"),
)


class Config(Block):
    """A whole configuration."""

    results: str = "results"
    """Folder of all results."""
    container: str | None = None
    """Image in which jobs run under ``snakemake --sdm apptainer``: a file of Apptainer, or an address such as
    ``docker://...``. A job takes its packages from the image, and its code from this checkout
    (docs/cluster.md)."""
    strict_code: bool = False
    """true: run a finished job again if a module that it imported was edited since."""
    datasets: dict[Name, Dataset]
    """Datasets by name."""
    tokenizers: dict[Name, TokenizerConfig] = {}
    """Tokenizers by name, which datasets may name."""
    downloads: dict[str, Annotated[str, _an_origin]] = {}
    """Addresses of files that others publish, by the place where this configuration names them. A place is a
    folder of the files of a repository, or one file. The workflow downloads a file before a job reads it."""
    runs: Annotated[dict[Name, Run], Field(min_length=1)] = {}
    """Runs by name. There must be one, or a block of an extra that makes one."""
    foreign: dict[Name, str] = {}
    """Causal language models of transformers by name, each a folder with ``config.json``, weights and
    tokenizer. They are scored on the text and the tasks of the first run, and stand in the comparison
    (docs/evaluation.md); this needs ``spider-lm[hf]``."""
    tracking: TrackingConfig = TrackingConfig()
    """Records in MLflow."""
    mirror: Annotated[str, _without_password] | None = None
    """Address of a copy of the results, as fsspec takes it: a folder, ``s3://BUCKET/FOLDER`` or ``gs://``
    (docs/cluster.md). A workflow copies what is finished and each checkpoint there, and restores them on an
    empty machine. null: none."""
    _written: dict[str, Any] = {}
    _sweeps: dict[str, list[str]] = {}
    _extras: dict[str, Any] = {}

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Names of the runs of each grid, by the name of the block with the grid."""
        return self._sweeps

    @property
    def extras(self) -> dict[str, Any]:
        """The blocks of extras, each by its key (`spider.common.extras`)."""
        return self._extras

    @property
    def shown(self) -> list[str]:
        """Runs with a page and a row of the comparison: all but those that an extra hides.

        A configuration that has only those shows them.
        """
        hidden = {run for block in self.extras.values() for run in getattr(block, "hidden", ())}
        return [run for run in self.runs if run not in hidden] or [*self.runs]

    @property
    def written(self) -> dict[str, Any]:
        """The mapping that this was read from, with grids and blocks that expand replaced by their runs."""
        return self._written

    def choose(self, run: str | None = None, stage: str | None = None) -> tuple[str, str]:
        """Return the names of a run and a stage (default: the only run, and the first stage of a run)."""
        if run is None:
            run, *others = self.runs
            if others:
                raise ConfigError(f"the configuration has several runs, name one: {', '.join(self.runs)}")
        return run, stage or self.run(run).stages[0].name

    def stage(self, run_name: str, stage_name: str) -> StageSpec:
        """Resolve one stage. Its own settings override the run's defaults, which override the schema's."""
        run = self.run(run_name)
        names = [s.name for s in run.stages]
        if stage_name not in names:
            raise ConfigError(f"runs.{run_name}: {none_such('stage', stage_name, names)}")
        index = names.index(stage_name)
        stage = run.stages[index]
        settings = run.settings_of(stage)
        data = run.data_of(stage)
        loops = settings.n_loops or run.model.loops
        first = next(iter(weights_of(data)))
        dataset = self.datasets.get(first)
        shared = {name: getattr(run, name) for name in RunSettings.model_fields}
        shared["evaluation"] = run.evaluation.model_copy(update={"data": run.evaluation.data or run.dataset})
        return StageSpec(
            run=run_name,
            stage=stage_name,
            index=index,
            data=first,
            stream=dataset if dataset and dataset.source.STREAMED else None,
            processes=run.resources.processes,
            settings=settings.model_copy(update={"data": data, "n_loops": loops}),
            **shared,
        )

    def sources(self, run_name: str) -> list[str]:
        """Return the datasets of a run that are scored by themselves: all, if one of its stages is mixed.

        Streams do not hold out text, so they are left out.
        """
        specs = [self.stage(run_name, stage.name) for stage in self.run(run_name).stages]
        if not any(spec.mixed for spec in specs):
            return []
        return list(dict.fromkeys(name for spec in specs if not spec.stream for name in spec.weights))

    def scored_like(self) -> StageSpec:
        """Return the stage whose text and tasks foreign models share: the last one of the first run."""
        name, run = next(iter(self.runs.items()))
        return self.stage(name, run.stages[-1].name)

    def dataset(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise ConfigError(f"datasets: {none_such('dataset', name, self.datasets)}")
        return self.datasets[name]

    def parts(self, dataset: str) -> dict[str, str]:
        """Return the items of a dataset by the name of their part."""
        source = self.dataset(dataset).source
        try:
            return dict(zip(source.parts(), source.items(), strict=True))
        except ConfigError as error:
            raise ConfigError(f"datasets.{dataset}.{error}") from None

    def learned(self, run: str, stage: str) -> list[str]:
        """Return the datasets that a run learns from by the end of a stage, or whose counts it looks up."""
        settings = self.run(run)
        last = [one.name for one in settings.stages].index(stage)
        data = map(settings.data_of, settings.stages[: last + 1])
        names = [name for one in data for name in weights_of(one)]
        return list(dict.fromkeys([*names, *([settings.dataset] if settings.model.ngram else [])]))

    def raw(self, dataset: str) -> str:
        """Return the dataset whose downloaded parts a dataset is encoded from: itself, or its ``like``."""
        return self.dataset(dataset).like or dataset

    def cleaning(self, dataset: str) -> Cleaning | None:
        """Return how documents of a dataset are compared with others, or None if they are not."""
        cleaning = self.dataset(dataset).cleaning
        return cleaning if cleaning and cleaning.removes else None

    def near(self, dataset: str) -> bool:
        """Return whether near duplicates of a dataset's documents are found, in itself or in another one."""
        cleaned = [
            (name, one.cleaning) for name, one in self.datasets.items() if one.cleaning and not one.like
        ]
        raw = self.raw(dataset)
        return any(raw in (name, *map(self.raw, block.against)) for name, block in cleaned if block.near)

    def in_order(self, dataset: str, last: str) -> list[tuple[str, str]]:
        """Return the parts whose documents are compared: all of the datasets in ``against``, then its own.

        They are pairs of dataset and part, in the order of documents, up to the part ``last``.
        """
        names = (*self.dataset(dataset).against, dataset)
        parts = [(name, one) for name in names for one in self.parts(name)]
        return parts[: parts.index((dataset, last)) + 1]

    def buckets(self, dataset: str) -> int:
        """Return the number of jobs that find equal keys in the parts of a dataset."""
        return min(_MOST_BUCKETS, 1 + len(self.parts(dataset)) // 250)

    def compared(self, datasets: Iterable[str]) -> list[str]:
        """Return datasets, by their raw text, and all datasets that their documents are compared with."""
        found: list[str] = []
        waiting = [name for name in datasets if name in self.datasets]
        while waiting:
            name = self.raw(waiting.pop(0))
            if name not in found:
                found.append(name)
                waiting += [one for one in self.dataset(name).against if one in self.datasets]
        return found

    def decontaminated(self, dataset: str) -> bool:
        """Return whether a dataset is compared with what models are measured with."""
        cleaning = self.dataset(dataset).cleaning
        return cleaning is not None and cleaning.decontaminates

    def protected(self, dataset: str) -> list[str]:
        """Return the datasets with held-out text that a dataset is compared with, each by its raw text."""
        if not self.decontaminated(dataset):
            return []
        used = [one for s in self._learners(dataset) for one in (*s.weights, s.evaluation.data or s.data)]
        names = {self.raw(name): self.dataset(name) for name in [dataset, *used]}
        stored = {n: one for n, one in names.items() if not (one.source.STREAMED or one.source.TOKENS)}
        return [name for name, one in stored.items() if one.validation]

    def protected_tasks(self, dataset: str) -> list[tuple[str, TaskConfig]]:
        """Return the tasks with files that a dataset is compared with; tasks with the same files are one."""
        found: dict[tuple[str, ...], tuple[str, TaskConfig]] = {}
        for spec in self._learners(dataset) if self.decontaminated(dataset) else []:
            for name, task in spec.evaluation.tasks.items():
                found.setdefault(tuple(task.files()), (name, task))
        return list(found.values())

    def _learners(self, dataset: str) -> Iterator[StageSpec]:
        """Yield all stages of the runs that learn from a dataset in one of them."""
        for name, run in self.runs.items():
            specs = [self.stage(name, stage.name) for stage in run.stages]
            if any(self.raw(dataset) == self.raw(one) for spec in specs for one in spec.weights):
                yield from specs

    def download(self, path: str) -> str | None:
        """Return the address that the file at a path is downloaded from; None for a file of the user."""
        for place, origin in self.downloads.items():
            if origin.startswith(_HUB) and path.startswith(f"{place}/"):
                return f"{origin}/{path.removeprefix(f'{place}/')}"
            if path == place and not origin.startswith(_HUB):
                return origin
        return None

    def ngram_reader(self, dataset: str, counted: str) -> str:
        """Return a run that reads the n-gram index of a dataset with these settings, by their digest."""
        return next(
            name
            for name, run in self.runs.items()
            if run.dataset == dataset and run.model.ngram and run.model.ngram.counted == counted
        )

    def tokenizer(self, name: str) -> TokenizerConfig:
        if name not in self.tokenizers:
            raise ConfigError(f"tokenizers: {none_such('tokenizer', name, self.tokenizers)}")
        return self.tokenizers[name]

    def run(self, name: str) -> Run:
        if name in self.sweeps:
            raise ConfigError(
                f"runs: {name} is a sweep, name one of its runs: {', '.join(self.sweeps[name])}"
            )
        if name not in self.runs:
            raise ConfigError(f"runs: {none_such('run', name, self.runs)}")
        return self.runs[name]


def model_files(folder: Path) -> list[Path]:
    """Return the files of a foreign model, or the folder if it has none; an edit of one scores it again."""
    found = [one for one in sorted(folder.glob("*")) if one.is_file() and one.name[0] != "."]
    return found or [folder]


def read_yaml(path: Path) -> Any:
    """Parse a file of YAML or JSON.

    Raises:
        ConfigError: there is no such file, it is malformed, or a key is there twice; with the lines.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # PyYAML raises errors of many kinds for a date or a number
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that a mapping has twice, where `yaml` and Snakemake take the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                key, line = self.construct_object(name), name.start_mark.line + 1
                if key in lines:
                    both = f"line {lines[key]} and again in line {line}"
                    raise ConfigError(f"the key {key!r} is given in {both}; remove or rename one")
                lines[key] = line
        return node


def _parsed(text: str) -> Any:
    """Parse YAML or JSON. Raise `ConfigError` for a key that is there twice."""
    with suppress(ValueError):
        json.loads(text)
        text = text.replace("\t", " ")  # Tabs may stand between the tokens of JSON, and not of YAML.
    return yaml.load(text, _Loader)


def load_config(source: Path | dict[str, Any], *, allow_imports: bool = True) -> Config:
    """Validate a YAML file or a parsed mapping.

    Args:
        allow_imports: whether the families, sources and measurements that it names may be imported. That runs
            their code, so only a configuration of the user may allow it.

    Raises:
        ConfigError: names the key of every problem, such as
            ``runs.demo.stages[1].tokens: must be positive (got -5)``.
    """
    written = read_yaml(source) if isinstance(source, Path) else source
    if not isinstance(written, dict):
        raise ConfigError("the configuration must be a mapping with the keys datasets and runs")
    sweeps: dict[str, list[str]] = {}
    if allow_imports:
        for name in named_imports(written):
            allow_import(name)
    if isinstance(runs := written.get("runs", {}), dict):
        runs, sweeps = expand_grids(runs)
        written = {**written, "runs": runs}
    blocks, written = _read_extras(written)
    core = {key: value for key, value in written.items() if key not in blocks}
    try:
        datasets = expand_likes(written.get("datasets"))
        config = Config.model_validate({**core, "datasets": datasets} if datasets else core)
    except ValidationError as error:
        raise ConfigError("\n".join(map(explain, error.errors()))) from None
    known = config.datasets, config.tokenizers
    if problems := list(token_problems(*known, config.runs)):
        raise ConfigError("\n".join(problems))
    runs = {name: sized(run, *known) for name, run in config.runs.items()}
    config = config.model_copy(update={"runs": runs})
    config._written, config._sweeps, config._extras = written, sweeps, blocks
    problems = list(_problems(config))
    if allow_imports:
        problems += [
            f"runs.{name}.{problem}"
            for name, run in config.runs.items()
            for problem in measurement_problems(run.evaluation.measurements)
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _read_extras(written: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all blocks of extras, and a configuration where those that expand are replaced by their runs.

    Raises:
        ConfigError: a block is wrong, its extra is not installed, or it adds a run that is there.
    """
    written, blocks = dict(written), {}
    for key in [key for key in written if key not in Config.model_fields]:
        kind = extras.config_type(str(key))
        if kind is None:
            if reason := extras.lacking(str(key)):
                raise ConfigError(f"{key}: {reason}")
            continue  # the schema refuses it
        try:
            blocks[key] = TypeAdapter(kind).validate_python(written[key])
        except ValidationError as error:
            lines = (explain({**one, "loc": (key, *one["loc"])}) for one in error.errors())
            raise ConfigError("\n".join(lines)) from None
        runs = written.get("runs")
        if hasattr(kind, "expand") and isinstance(runs, dict):
            added = kind.expand(blocks[key], runs)
            if twice := runs.keys() & added.keys():
                raise ConfigError(f"runs.{min(twice)}: {key} makes a run of this name")
            written["runs"] = runs | added
            del written[key]
    return blocks, written


def named_imports(written: Any) -> Iterator[str]:
    """Yield the families of models, the sources and the measurements that a configuration names.

    A family may also stand in the grid of a sweep.
    """
    if isinstance(written, list):
        for part in written:
            yield from named_imports(part)
    elif isinstance(written, dict):
        for key, value in written.items():
            if key == "source" and isinstance(value, dict):
                names = [value.get("kind")]
            elif str(key).rpartition(".")[2] == "family":
                names = value if isinstance(value, list) else [value]
            elif key == "measurements" and isinstance(value, dict):
                names = list(value)
            else:
                yield from named_imports(value)
                continue
            yield from (name for name in names if isinstance(name, str))


# ------------------------------------------------------------------------------ checks across several blocks


def _problems(config: Config) -> Iterator[str]:
    """Yield a line for each problem, with the path of its key."""
    for name, run in config.runs.items():
        yield from (f"runs.{name}.{problem}" for problem in run.problems())
        for i, stage in enumerate(run.stages):
            spec = config.stage(name, stage.name)
            if spec.index < i:
                yield f"runs.{name}.stages[{i}].name: {stage.name!r} is used twice in this run"
            else:
                yield from (f"runs.{name}.stages[{i}]{problem}" for problem in spec.problems(config.datasets))
        found = data_problems(config.datasets, config.tokenizers, run)
        yield from (f"runs.{name}.{problem}" for problem in found)
    for name in config.foreign.keys() & config.runs.keys():
        yield f"foreign.{name}: a run has the same name; choose another"
    yield from _cleaning_problems(config)


def _cleaning_problems(config: Config) -> Iterator[str]:
    """Yield the problems of datasets whose documents are compared with those of others."""
    for name, one in ((n, o) for n, d in config.datasets.items() for o in d.against if not d.like):
        where = f"datasets.{name}.cleaning.against"
        other = config.datasets.get(one)
        if other is None:
            yield f"{where}: {none_such('dataset', one, config.datasets)}"
        elif other.source.STREAMED or other.source.TOKENS:
            yield f"{where}: {one!r} has no stored text to compare with; leave it out"
        elif other.like:
            yield f"{where}: {one!r} has the text of {other.like!r}; name that"
        elif name in config.compared([one]):
            yield f"{where}: documents of {name!r} would come before themselves; leave {one!r} out"


# --------------------------------------------------------------- settings of command line and environment


@dataclass
class Given:
    """A setting of the command line or the environment. Text is parsed as YAML."""

    origin: str
    """Name of the setting in messages: ``--lr``, ``LR``, ``lr=4e-3``."""
    key: str
    value: Any
    yields: bool = False
    """Whether another `Given` of the same setting overrides this one, as the command line does a variable."""

    def __post_init__(self) -> None:
        if not isinstance(self.value, str):
            return
        try:
            plain = _parsed(self.value)
        except ConfigError as error:
            raise ConfigError(f"{self.origin}: {error}") from None
        except Exception:  # as in `read_yaml`
            raise ConfigError(f"{self.origin}: {self.value!r} is not valid YAML") from None
        # YAML 1.1 reads ``4.0e-3`` as a number and ``4e-3`` as text; here both are numbers.
        number = isinstance(plain, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", plain)
        self.value = float(plain) if number else plain


def with_settings(config: Config, run: str, stage: str, given: Sequence[Given]) -> tuple[Config, list[Given]]:
    """Apply settings to one stage.

    Returns:
        The new configuration, and the settings that no other one overrode.

    Raises:
        ConfigError: a setting does not exist or is given twice, or the new configuration is not valid.
    """
    index = config.stage(run, stage).index
    plain = copy.deepcopy(config.written)
    block = plain["runs"][run]
    used: dict[tuple[str, ...], Given] = {}
    for one in sorted(given, key=lambda one: (one.yields, one.key.count("."))):  # a model before its parts
        path = resolve(one.origin, one.key, block, stage)
        if path not in used:
            used[path] = one
            put(block, path, one.value)
        elif not one.yields:
            raise ConfigError(f"{used[path].origin} and {one.origin} are the same setting; give one of them")
    for one in used.values():  # again, because one setting may override another
        resolve(one.origin, one.key, block, stage)
    try:
        return load_config(plain), [one for one in given if one in used.values()]
    except ConfigError as error:
        text = str(error)
        for path, one in used.items():  # name each setting as the user gave it
            inside = ("stages", index, *path[2:]) if path[0] == "stages" else path
            key = re.escape(key_path(("runs", run, *inside)))
            text = re.sub(rf"^{key}(?=[:.\[])", one.origin.replace("\\", r"\\"), text, flags=re.MULTILINE)
        raise ConfigError(text) from None


def results_folder(path: Path) -> str:
    """Return the folder that ``results:`` names. The workflow validates the rest of the file."""
    written = read_yaml(path)
    return str(written.get("results", "results")) if isinstance(written, dict) else "results"


if __name__ == "__main__":
    # `make` calls this before Snakemake, whose own errors lack a missing file and the line of a broken one.
    try:
        print(results_folder(Path(sys.argv[1])))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
