"""The whole configuration: read from a file, with settings of the command line, and validated.

Settings of the command line and of the environment are written into the parsed file
(`spider.config.settings`). The result is then validated like a file, with the same messages.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from spider import extras
from spider.config.block import Block, ConfigError, Name, explain, none_such
from spider.config.cleaning import Cleaning, DecontaminateConfig
from spider.config.data import Dataset, TokenizerConfig, expand_likes
from spider.config.imports import allow_import
from spider.config.ladders import Ladder, LadderConfig, expand_ladders, inherited
from spider.config.leaks import leak_problems, shared_file
from spider.config.measurement import measurement_problems
from spider.config.run import ForeignConfig, Run, RunSettings, TrackingConfig, weights_of
from spider.config.settings import expand_grids, put, resolve
from spider.config.spec import StageSpec
from spider.config.tasks import TaskConfig, in_chat_form
from spider.config.tokens import sized, token_problems, tokenizer_of
from spider.record import key_path


class Config(Block):
    """A whole configuration."""

    results: str = "results"
    """Folder of all results."""
    strict_code: bool = False
    """true: run a finished job again if a module that it imported was edited since."""
    datasets: dict[Name, Dataset]
    """Datasets by name."""
    tokenizers: dict[Name, TokenizerConfig] = {}
    """Tokenizers by name, which datasets may name."""
    runs: Annotated[dict[Name, Run], Field(min_length=1)] = {}
    """Runs by name. There must be one, or a ladder."""
    foreign: dict[Name, ForeignConfig] = {}
    """Models that others trained, by name, which stand beside the runs in the comparison."""
    tracking: TrackingConfig = TrackingConfig()
    """Records in MLflow."""
    ladders: dict[Name, LadderConfig] = {}
    """Runs of a family at several budgets of FLOPs, from which larger runs are forecast (docs/sweeps.md)."""
    _written: dict[str, Any] = {}
    _sweeps: dict[str, list[str]] = {}
    _extras: dict[str, Any] = {}
    _rungs: dict[str, Ladder] = {}

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Names of the runs of each grid, by the name of the block with the grid."""
        return self._sweeps

    @property
    def extras(self) -> dict[str, Any]:
        """The blocks of extras, each by its key (`spider.extras`)."""
        return self._extras

    @property
    def rungs(self) -> dict[str, Ladder]:
        """The runs of each ladder, by its name. Runs that name a ladder as their ``forecast`` wait for it."""
        return self._rungs

    @property
    def shown(self) -> list[str]:
        """Runs with a page and a row of the comparison: all but those that an extra hides.

        A configuration that has only those shows them.
        """
        hidden = {run for block in self.extras.values() for run in getattr(block, "hidden", ())}
        hidden |= {run for ladder in self.rungs.values() for run in ladder.rungs}
        return [run for run in self.runs if run not in hidden] or [*self.runs]

    def forecast_at(self, ladder: str) -> list[float]:
        """Return the FLOPs that a ladder is to forecast, in rising order."""
        waiting = [
            budget
            for run in self.runs.values()
            if run.forecast == ladder
            for stage in run.stages
            if (budget := run.settings_of(stage).target_flops)
        ]
        return sorted({*waiting, *([at] if (at := self.rungs[ladder].at) else [])})

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

    def scored_like(self, foreign: ForeignConfig) -> StageSpec:
        """Return the stage whose text and tasks a foreign model shares: the last one of its run."""
        name = foreign.like or next(iter(self.runs))
        return self.stage(name, self.run(name).stages[-1].name)

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
        last = self.stage(run, stage).index
        names = [name for one in settings.stages[: last + 1] for name in self.stage(run, one.name).weights]
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

    def earlier(self, dataset: str, part: str) -> list[tuple[str, str]]:
        """Return the parts whose documents come before those of a part: pairs of dataset and part, in order.

        They are all parts of the datasets in ``against``, and the parts of its own dataset before it.
        """
        others = [(name, one) for name in self.dataset(dataset).against for one in self.parts(name)]
        return others + [(dataset, one) for one in self.parts(dataset) if int(one) < int(part)]

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

    def decontaminated(self, dataset: str) -> DecontaminateConfig | None:
        """Return how a dataset is compared with what models are measured with, or None if it is not."""
        cleaning = self.cleaning(dataset)
        return cleaning.decontaminate if cleaning else None

    def protected(self, dataset: str) -> list[str]:
        """Return the datasets with held-out text that a dataset is compared with, each by its raw text."""
        settings = self.decontaminated(dataset)
        if settings is None or not settings.held_out:
            return []
        used = [one for s in self._learners(dataset) for one in (*s.weights, s.evaluation.data or s.data)]
        names = {self.raw(name): self.dataset(name) for name in [dataset, *used]}
        stored = {n: one for n, one in names.items() if not (one.source.STREAMED or one.source.TOKENS)}
        return [name for name, one in stored.items() if one.validation]

    def protected_tasks(self, dataset: str) -> list[tuple[str, TaskConfig]]:
        """Return the tasks with files that a dataset is compared with; tasks with the same files are one."""
        settings = self.decontaminated(dataset)
        found: dict[tuple[str, ...], tuple[str, TaskConfig]] = {}
        for spec in self._learners(dataset) if settings and settings.tasks else []:
            for name, task in spec.evaluation.tasks.items():
                found.setdefault(tuple(task.files()), (name, task))
        return list(found.values())

    def _learners(self, dataset: str) -> Iterator[StageSpec]:
        """Yield all stages of the runs that learn from a dataset in one of them."""
        for name, run in self.runs.items():
            specs = [self.stage(name, stage.name) for stage in run.stages]
            if any(self.raw(dataset) == self.raw(one) for spec in specs for one in spec.weights):
                yield from specs

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
    ladders = inherited(written.get("ladders"))
    of_ladders, rungs = expand_ladders(ladders)
    if isinstance(runs := written.get("runs", {}), dict):
        runs, sweeps = expand_grids(runs)
        if twice := runs.keys() & of_ladders.keys():
            raise ConfigError(f"runs.{min(twice)}: a ladder makes a run of this name")
        written = {**written, "runs": runs | of_ladders, "ladders": ladders or {}}
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
    if ladders != {}:  # else the ladders of this mapping are expanded already
        problems = list(_forecast_problems(config, rungs))
        if problems:
            raise ConfigError("\n".join(problems))
    config._written, config._sweeps, config._rungs = {**written, "ladders": {}}, sweeps, rungs
    config._extras = blocks
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
        yield from (f"runs.{name}.{problem}" for problem in _run_problems(run))
        yield from (f"runs.{name}.{problem}" for problem in _ngram_problems(config, run))
        yield from (f"runs.{name}.{problem}" for problem in _ttt_problems(config, name))
        yield from (f"runs.{name}.{problem}" for problem in _mixer_problems(config, run))
        yield from (f"runs.{name}.{problem}" for problem in _chat_problems(config, name))
        for i, stage in enumerate(run.stages):
            spec = config.stage(name, stage.name)
            if spec.index < i:
                yield f"runs.{name}.stages[{i}].name: {stage.name!r} is used twice in this run"
            else:
                yield from (f"runs.{name}.stages[{i}]{problem}" for problem in _stage_problems(config, spec))
        for one in weights_of(run.data).keys() - config.datasets.keys() - {run.dataset}:
            yield f"runs.{name}.data.mix: {none_such('dataset', one, config.datasets)}"
        where, scored = f"runs.{name}.evaluation.data", run.evaluation.data or run.dataset
        if (dataset := config.datasets.get(scored)) is None:
            yield f"{where}: {none_such('dataset', scored, config.datasets)}"
        elif dataset.source.STREAMED:
            yield f"{where}: {scored!r} is a stream and has no validation shards; name another dataset"
        elif dataset.validation == 0:
            yield f"datasets.{scored}.validation: must be above 0, because runs.{name} is evaluated on it"
        elif run.evaluation.largest_group is not None and dataset.split_by is None:
            wanted = f"needs groups of documents; set datasets.{scored}.split_by, or leave it out"
            yield f"runs.{name}.evaluation.largest_group: {wanted}"
        else:
            yield from (
                f"runs.{name}.{one}" for one in leak_problems(config.datasets, config.tokenizers, run)
            )
    for name, foreign in config.foreign.items():
        if name in config.runs:
            yield f"foreign.{name}: a run has the same name; choose another"
        if foreign.like is not None and foreign.like not in config.runs:
            yield f"foreign.{name}.like: {none_such('run', foreign.like, config.runs)}"
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


def _ngram_problems(config: Config, run: Run) -> Iterator[str]:
    """Yield the problems of a run whose model reads an n-gram index."""
    dataset = config.datasets.get(run.dataset)
    if run.model.ngram is None or dataset is None:
        return
    if run.compress is not None:
        reason = "the model needs its n-gram index, which is many times as large as the compressed file"
        yield f"compress: {reason}; leave compress or model.ngram out"
    if dataset.ngram == 0:
        reason = f"datasets.{run.dataset}.ngram is 0, so the n-gram index has no documents"
        yield f"model.ngram: {reason}; set that to the share of documents to count, such as 0.8"
    for i, stage in enumerate(run.stages):
        where = f"stages[{i}].data: the n-gram index is of {run.dataset}"
        names = list(weights_of(run.data_of(stage)))
        if names[0] != run.dataset:
            yield f"{where}; name that first, or leave model.ngram out"
        for other in (name for name in names if name != run.dataset and name in config.datasets):
            if file := shared_file(dataset, config.datasets[other]):
                reason = f"which shares {file} with {other}, so it may hold text that is trained on"
                yield f"{where}, {reason}; take the file out of one of them, or leave model.ngram out"


def _ttt_problems(config: Config, name: str) -> Iterator[str]:
    """Yield the problems of test-time training with the windows and the model of a run."""
    run = config.runs[name]
    ttt = run.evaluation.ttt
    if ttt is None:
        return
    for window, stage in {config.stage(name, s.name).window: s.name for s in run.stages}.items():
        of = f"the window of its evaluation, {window} in stage {stage}"
        if (ttt.objective == "projection" or ttt.reset == "window") and ttt.chunk >= window:
            inside = "objective: projection" if ttt.objective == "projection" else "reset: window"
            yield f"evaluation.ttt.chunk: with {inside} must be shorter than {of} (got {ttt.chunk})"
        elif ttt.chunk < window and window % ttt.chunk:
            yield f"evaluation.ttt.chunk: must divide {of}, or be at least as long (got {ttt.chunk})"
    if ttt.objective == "projection" and not run.model.FFN_INPUTS:
        reason = f"the family {run.model.family} does not support it; set next_token, or use a gpt"
        yield f"evaluation.ttt.objective: projection: {reason}"
    for layer in ttt.layers or ():
        if layer >= run.model.feed_forwards:
            known = f"the model's {run.model.feed_forwards} layers, counted from 0"
            yield f"evaluation.ttt.layers: {layer} is not one of {known}"


def _mixer_problems(config: Config, run: Run) -> Iterator[str]:
    """Yield a problem if a model with a mixer is not one of bytes."""
    if run.evaluation.mixer and tokenizer_of(config.datasets, run.dataset):
        reason = f"needs a model over bytes, and tokens of {run.dataset} stand for several bytes"
        yield f"evaluation.mixer: {reason}; leave the mixer out"


def _chat_problems(config: Config, name: str) -> Iterator[str]:
    """Yield the tasks in chat form of a run without conversations."""
    run = config.runs[name]
    names = {one for stage in run.stages for one in config.stage(name, stage.name).weights}
    datasets = [config.datasets.get(one) for one in names]
    if None in datasets or any(dataset.format == "chat" for dataset in datasets if dataset):
        return
    keys = [f"evaluation.tasks.{key}" for key, task in run.evaluation.tasks.items() if in_chat_form(task)]
    for key in keys + ["harness"] * bool(run.harness and run.harness.chat):
        remedy = "train a stage on data of format: chat, or leave it out"
        yield f"{key}.chat: no stage of the run learns from conversations; {remedy}"


def _run_problems(run: Run) -> Iterator[str]:
    """Yield the problems of a run's settings with each other."""
    yield from run.model.problems(run.precision, run.compile)
    yield from _group_problems(run)
    narrow = [f"groups.{name}.weights" for name, one in run.optimizer.groups.items() if one.weights == "bf16"]
    if run.optimizer.master_weights == "bf16":
        narrow.insert(0, "master_weights")
    if not narrow:
        return
    where = f"optimizer.{narrow[0]}"
    if run.precision not in ("bf16", "fp8"):
        reason = f"bf16 weights cannot be multiplied in fp32, which precision: {run.precision} may choose"
        yield f"{where}: {reason}; set precision: bf16 or fp8"
    if run.parallel == "fsdp":
        remedy = "set fp32 (each process then holds a share of them), or parallel: ddp"
        yield f"{where}: parallel: fsdp shares fp32 weights only; {remedy}"


def _group_problems(run: Run) -> Iterator[str]:
    """Yield the settings of groups that the run's model cannot have."""
    for name, group in run.optimizer.groups.items():
        where = f"optimizer.groups.{name}"
        if name not in run.model.GROUPS:
            known = ", ".join(run.model.GROUPS)
            yield f"{where}: the family {run.model.family} has no such group; its groups are {known}"
            continue
        role = run.model.GROUPS[name]
        if group.decay == "scaled" and role != "matrix":
            yield f"{where}.decay: only matrices have a scaled rate; set decoupled or l2"
        if run.optimizer.kind == "muon" and role == "matrix" and group.betas:
            yield f"{where}: Muon has no betas; set optimizer.muon_momentum and muon_beta2 instead"
        if group.weights == "bf16" and role != "table":
            remedy = "leave it out (kind: adamw8bit with master_weights: bf16 makes those of matrices bf16)"
            yield f"{where}.weights: only tables may be bf16 by this key; {remedy}"
        if group.width_exponent and run.model.WIDTH is None:
            yield f"{where}.width_exponent: the family {run.model.family} names no width; leave it out"


def _stage_problems(config: Config, spec: StageSpec) -> Iterator[str]:
    """Yield the problems of a stage's settings, without the path of the stage."""
    s = spec.settings
    if not any((s.tokens, s.max_steps, s.target_flops, s.tokens_per_parameter, s.max_hours)):
        yield ": needs tokens, max_steps, target_flops, tokens_per_parameter or max_hours"
    if s.max_hours and s.schedule not in ("wsd", "constant"):
        remedy = "set schedule: wsd, which decays at the end of the time, or constant"
        yield f".max_hours: schedule: {s.schedule} needs the number of steps in advance; {remedy}"
    if s.max_hours and s.schedule == "constant" and spec.optimizer.weight_decay_end is not None:
        reason = "optimizer.weight_decay_end follows the falling rate of a stage with max_hours"
        yield f".schedule: constant: {reason}; set schedule: wsd, or leave weight_decay_end out"
    yield from dict.fromkeys(one for name in spec.weights for one in _row_problems(config, spec, name))
    yield from _rollout_problems(config, spec)
    if s.micro_batch == "auto" and not s.windows_per_step:
        yield ".micro_batch: auto cuts the windows of a step, so say how many those are: windows_per_step"
        return
    if s.windows_per_step and s.grad_accum != 1:
        yield f".grad_accum: a step already has {s.windows_per_step} windows_per_step; leave one of them out"
    try:
        spec.micro_batch(spec.processes)
    except ConfigError as error:
        yield f": {error}"
    if s.keep_every and s.ckpt_minutes:
        yield ".keep_every: counts steps, and ckpt_minutes saves by the clock; leave one of them out"
    elif s.keep_every and s.keep_every % s.ckpt_every:
        got = f"(got {s.keep_every}, ckpt_every is {s.ckpt_every})"
        yield f".keep_every: must be a multiple of ckpt_every, because only saved steps can be kept {got}"
    yield from dict.fromkeys(one for name in spec.weights for one in _validation_problems(config, spec, name))
    if spec.stream and spec.evaluation.train_bytes:
        yield f": evaluation.train_bytes: {spec.data} is a stream, without a train split; leave it out"
    if s.tasks_every and not spec.evaluation.tasks:
        yield ".tasks_every: evaluation.tasks lists no task; add one, or leave it out"
    if spec.parallel == "fsdp" and (s.samples_every or s.tasks_every):
        key = "samples_every" if s.samples_every else "tasks_every"
        yield f".{key}: parallel: fsdp shares the weights, and one process writes; set ddp, or leave it out"
    if not spec.model.looped and spec.loops != 1:
        yield f".n_loops: this model of family {spec.model.family} has no loops; leave it out"
    for name in spec.weights:
        if name not in config.datasets:
            yield f".data: {none_such('dataset', name, config.datasets)}"
        elif config.datasets[name].source.STREAMED and name != spec.settings.data:
            yield f".data: {name} is a stream, which has no order to mix; use an encoded dataset, such as hub"


def _validation_problems(config: Config, spec: StageSpec, data: str) -> Iterator[str]:
    """Yield the problems of validations that ``val_every`` requests. The default adapts to the dataset."""
    s = spec.settings
    dataset = config.datasets.get(data)
    if not s.val_every or dataset is None:
        return
    if s.ckpt_minutes is None and s.val_every % s.ckpt_every and s.ckpt_every % s.val_every:
        got = f"(got {s.val_every}, ckpt_every is {s.ckpt_every})"
        reason = "because only a saved step can be the best checkpoint"
        yield f".val_every: must be a multiple or a divisor of ckpt_every, {reason} {got}"
    if spec.stream is not None:
        yield f".val_every: {data} is a stream and has no validation split; leave it out"
    elif dataset.validation == 0:
        yield f".val_every: datasets.{data}.validation is 0; raise it, or leave val_every out"


def _row_problems(config: Config, spec: StageSpec, data: str) -> Iterator[str]:
    """Yield the problems of packing, and of attention and loss in packed rows of a dataset."""
    s = spec.settings
    packed = s.packing == "best_fit"
    if packed and spec.stream is not None:
        yield f".packing: best_fit needs all documents in advance, but {data} is a stream; leave it out"
    if packed and spec.model.ngram is not None:
        reason = "the n-gram lookup needs each row's position in the text, which best_fit does not have"
        yield f".packing: {reason}; leave it out"
    if s.order == "text" and spec.stream is not None:
        yield f".order: text: {spec.data} is a stream, which reads its files in turn anyway; leave it out"
    if s.attend == "document" and not packed:
        yield ".attend: document: needs packed rows; set packing: best_fit"
    elif s.attend == "document" and not spec.model.DOCUMENTS:
        yield f".attend: document: the family {spec.model.family} attends to the whole row; leave it out"
    if s.learn == "assistant" and not packed:
        reason = "a window may begin inside a turn, whose role is then unknown"
        yield f".learn: assistant: {reason}; set packing: best_fit"
    dataset = config.datasets.get(data)
    taken = dataset.source.text_bytes if dataset is not None else None
    if taken is not None and taken <= s.seq_len:
        yield f".seq_len: datasets.{data}.source.take is less text than a window of {s.seq_len:,} tokens"
    if s.learn == "assistant" and dataset is not None and dataset.format != "chat":
        yield f".learn: assistant: {data} has no conversations (format: {dataset.format})"


def _rollout_problems(config: Config, spec: StageSpec) -> Iterator[str]:
    """Yield the problems of reinforcement learning."""
    s = spec.settings
    if s.objective == "next_token":
        if s.rollouts.changed():
            yield ".rollouts: belong to `objective: reinforce`; set that, or leave them out"
        return
    dataset = config.datasets.get(spec.data)
    if spec.stream is not None or (dataset is not None and dataset.format != "chat"):
        yield f".objective: reinforce: {spec.data} has no conversations, whose answers are rewarded"
    if spec.mixed:
        yield ".data: a stage of `objective: reinforce` has one dataset of conversations; name one"
    if (s.packing, s.learn, s.order) != ("ring", "all", "shuffled"):
        yield ".objective: reinforce: learns from its own answers; leave packing, learn and order out"
    if spec.parallel == "fsdp":
        yield ".objective: reinforce: sampling needs the whole model in each process; set parallel: ddp"
    if spec.windows_per_step // spec.processes % s.rollouts.samples:
        yield (
            f".micro_batch: a process has {spec.windows_per_step // spec.processes} answers of a step, which "
            f"is not a multiple of rollouts.samples ({s.rollouts.samples})"
        )


def _forecast_problems(config: Config, ladders: dict[str, Ladder]) -> Iterator[str]:
    """Yield the runs that wait for a forecast which no ladder can give."""
    for name, run in config.runs.items():
        if run.forecast is None:
            continue
        if run.forecast not in ladders:
            yield f"runs.{name}.forecast: {none_such('ladder', run.forecast, ladders)}"
        if len(run.stages) > 1 or not run.settings_of(run.stages[0]).target_flops:
            yield f"runs.{name}.forecast: needs target_flops, and a single stage"


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
