"""The whole configuration, from a file and from settings that are given beside it, checked.

Settings from elsewhere go where the file has its own (`spider.config.settings`), and the whole is checked as
a file is: so nothing can be asked for that a file could not, in the same messages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from spider.config.block import Block, ConfigError, Name, explain, nearest, none_such
from spider.config.data import Dataset, TokenizerConfig, expand_likes
from spider.config.imports import allow_import
from spider.config.leaks import leak_problems
from spider.config.measurement import measurement_problems
from spider.config.run import Run, RunSettings, TrackingConfig
from spider.config.settings import expand_grids, put, resolve
from spider.config.spec import StageSpec
from spider.config.tokens import sized, token_problems
from spider.record import key_path


class Config(Block):
    results: str = "results"
    """Folder for everything that is made."""
    datasets: dict[Name, Dataset]
    """Datasets by name."""
    tokenizers: dict[Name, TokenizerConfig] = {}
    """Learned vocabularies by name, for datasets to be written in."""
    runs: Annotated[dict[Name, Run], Field(min_length=1)]
    tracking: TrackingConfig = TrackingConfig()
    scaling: str | None = None
    """Fit a scaling law to this run's grid, over models and ``target_flops`` (docs/sweeps.md)."""
    _written: dict[str, Any] = {}
    _sweeps: dict[str, list[str]] = {}

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Of each block with a grid, the names of the runs that it became."""
        return self._sweeps

    @property
    def written(self) -> dict[str, Any]:
        """The mapping that this was read from, runs in the place of their grids."""
        return self._written

    def choose(self, run: str | None = None, stage: str | None = None) -> tuple[str, str]:
        """The run and stage meant: where none is named, the only run, and a run's first stage."""
        if run is None:
            run, *others = self.runs
            if others:
                raise ConfigError(f"which run? There are several, name one: {', '.join(self.runs)}")
        return run, stage or self.run(run).stages[0].name

    def stage(self, run_name: str, stage_name: str) -> StageSpec:
        """Resolve one stage: its own settings over the run's defaults over the schema's."""
        run = self.run(run_name)
        names = [s.name for s in run.stages]
        if stage_name not in names:
            raise ConfigError(f"runs.{run_name}: {none_such('stage', stage_name, names)}")
        stage = run.stages[index := names.index(stage_name)]
        own = {k: getattr(stage, k) for k in stage.model_fields_set - {"name"}}
        settings = run.defaults.model_copy(update=own)
        data, loops = settings.data or run.data, settings.n_loops or run.model.loops
        dataset = self.datasets.get(data)
        shared = {name: getattr(run, name) for name in RunSettings.model_fields}
        shared["evaluation"] = run.evaluation.model_copy(update={"data": run.evaluation.data or run.data})
        return StageSpec(
            run=run_name,
            stage=stage_name,
            index=index,
            data=data,
            stream=dataset if dataset and dataset.source.STREAMED else None,
            processes=run.resources.processes,
            settings=settings.model_copy(update={"data": data, "n_loops": loops}),
            **shared,
        )

    def dataset(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise ConfigError(f"datasets: {none_such('dataset', name, self.datasets)}")
        return self.datasets[name]

    def parts(self, dataset: str) -> dict[str, str]:
        """Return the parts of a dataset by name, each with the file or the piece that it is made from."""
        source = self.dataset(dataset).source
        try:
            return dict(zip(source.parts(), source.items(), strict=True))
        except ConfigError as error:
            raise ConfigError(f"datasets.{dataset}.{error}") from None

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
    """Return what a YAML file holds; `ConfigError` names the file, and the line where it is not YAML."""
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def load_config(source: Path | dict[str, Any], *, allow_imports: bool = True) -> Config:
    """Validate a YAML file or a parsed mapping.

    Args:
        allow_imports: whether the families, sources and measurements that it names may be imported, which
            runs their code. Only a configuration of the user's own may allow that.

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
    if isinstance(runs := written.get("runs"), dict):
        runs, sweeps = expand_grids(runs)
        written = {**written, "runs": runs}
    try:
        datasets = expand_likes(written.get("datasets"))
        config = Config.model_validate({**written, "datasets": datasets} if datasets else written)
    except ValidationError as error:
        raise ConfigError("\n".join(map(explain, error.errors()))) from None
    known = config.datasets, config.tokenizers
    if problems := list(token_problems(*known, config.runs)):
        raise ConfigError("\n".join(problems))
    runs = {name: sized(run, *known) for name, run in config.runs.items()}
    config = config.model_copy(update={"runs": runs})
    config._written, config._sweeps = written, sweeps
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


# ------------------------------------------------------------------------ what no block can see by itself


def _problems(config: Config) -> Iterator[str]:
    """A line for each, with the path of its key."""
    for name, run in config.runs.items():
        yield from (f"runs.{name}.{problem}" for problem in _run_problems(run))
        yield from (f"runs.{name}.{problem}" for problem in _ngram_problems(config, run))
        yield from (f"runs.{name}.{problem}" for problem in _ttt_problems(config, name))
        for i, stage in enumerate(run.stages):
            spec = config.stage(name, stage.name)
            if spec.index < i:
                yield f"runs.{name}.stages[{i}].name: {stage.name!r} is used twice in this run"
            else:
                yield from (f"runs.{name}.stages[{i}]{problem}" for problem in _stage_problems(config, spec))
        where, scored = f"runs.{name}.evaluation.data", run.evaluation.data or run.data
        if (dataset := config.datasets.get(scored)) is None:
            yield f"{where}: {none_such('dataset', scored, config.datasets)}"
        elif dataset.source.STREAMED:
            yield f"{where}: {scored!r} is a stream and has no validation shards; name another"
        elif dataset.validation == 0:
            yield f"datasets.{scored}.validation: must be above 0, runs.{name} is evaluated on it"
        else:
            yield from (
                f"runs.{name}.{one}" for one in leak_problems(config.datasets, config.tokenizers, run)
            )
    if config.scaling is not None:
        yield from _scaling_problems(config, config.scaling)


def _ngram_problems(config: Config, run: Run) -> Iterator[str]:
    """What keeps a run from having the n-gram index that it asks for."""
    dataset = config.datasets.get(run.data)
    if run.model.ngram is None or dataset is None:
        return
    if run.compress is not None:
        yield "compress: the model reads an index, many times as large as any file; leave one of them out"
    if dataset.ngram == 0:
        why = f"datasets.{run.data}.ngram is 0, no document is kept for it"
        yield f"model.ngram: {why}; set that to the share of documents to count, such as 0.8"
    for i, stage in enumerate(run.stages):
        if (data := stage.data or run.defaults.data or run.data) != run.data:
            why = f"its documents ({data}) may be in the n-gram index, which is of {run.data}"
            yield f"stages[{i}].data: {why}; train the stage on that dataset, or leave model.ngram out"


def _ttt_problems(config: Config, name: str) -> Iterator[str]:
    """What keeps a text from being learned from in whole windows."""
    run = config.runs[name]
    if (ttt := run.evaluation.ttt) is None:
        return
    window, stage = max((config.stage(name, stage.name).window, stage.name) for stage in run.stages)
    if ttt.chunk < window:
        of = f"the window of its evaluation, {window} in stage {stage}"
        yield f"evaluation.ttt.chunk: must be at least {of} (got {ttt.chunk})"


def _run_problems(run: Run) -> Iterator[str]:
    yield from run.model.problems(run.precision, run.compile)
    where, narrow = "optimizer.master_weights", run.optimizer.master_weights == "bf16"
    if narrow and run.precision not in ("bf16", "fp8"):
        may = f"which precision: {run.precision} may come to"
        yield f"{where}: bf16 weights cannot be multiplied in fp32, {may}; set precision: bf16 or fp8"
    if narrow and run.parallel == "fsdp":
        remedy = "set fp32 (each process then holds a share of them), or parallel: ddp"
        yield f"{where}: parallel: fsdp shares fp32 weights only; {remedy}"


def _stage_problems(config: Config, spec: StageSpec) -> Iterator[str]:
    s = spec.settings
    if not any((s.tokens, s.max_steps, s.target_flops, s.tokens_per_parameter, s.max_hours)):
        yield ": needs tokens, max_steps, target_flops, tokens_per_parameter or max_hours"
    if s.max_hours and s.schedule not in ("wsd", "constant"):
        remedy = "set schedule: wsd, which decays when time runs out, or constant"
        yield f".max_hours: schedule: {s.schedule} must know its last step from the first; {remedy}"
    yield from _row_problems(config, spec)
    try:
        spec.micro_batch(spec.processes)
    except ConfigError as error:
        yield f": {error}"
    if s.keep_every and s.ckpt_minutes:
        yield ".keep_every: counts steps, and ckpt_minutes saves by the clock; leave one of them out"
    elif s.keep_every and s.keep_every % s.ckpt_every:
        got = f"(got {s.keep_every}, ckpt_every is {s.ckpt_every})"
        yield f".keep_every: must be a multiple of ckpt_every, only what is saved can be kept {got}"
    yield from _validation_problems(config, spec)
    if not spec.model.looped and spec.loops != 1:
        yield f".n_loops: this model of family {spec.model.family} has no loops; leave it out"
    if spec.data not in config.datasets:
        yield f".data: {none_such('dataset', spec.data, config.datasets)}"


def _validation_problems(config: Config, spec: StageSpec) -> Iterator[str]:
    """What keeps a stage from being validated as asked; as often as by default it is where it can be."""
    s, dataset = spec.settings, config.datasets.get(spec.data)
    if not s.val_every or dataset is None:
        return
    if s.ckpt_minutes is None and s.val_every % s.ckpt_every and s.ckpt_every % s.val_every:
        got = f"(got {s.val_every}, ckpt_every is {s.ckpt_every})"
        yield f".val_every: must be a multiple or a divisor of ckpt_every, or the best is never saved {got}"
    if spec.stream is not None:
        yield f".val_every: {spec.data} is a stream and has no validation split; leave it out"
    elif dataset.validation == 0:
        yield f".val_every: datasets.{spec.data}.validation is 0: raise it, or leave val_every out"


def _row_problems(config: Config, spec: StageSpec) -> Iterator[str]:
    """What rows of a stage cannot be made or read as asked."""
    s, packed = spec.settings, spec.settings.packing == "best_fit"
    if packed and spec.stream is not None:
        yield f".packing: {spec.data} is a stream, whose documents are not known before; leave it out"
    if packed and spec.model.ngram is not None:
        yield ".packing: best_fit knows no place in the text, by which an n-gram index proposes; leave it out"
    if s.attend == "document" and not (packed and spec.model.DOCUMENTS):
        why = "the model's family sees all of a row" if packed else "rows are cut from one long text"
        yield f".attend: document: {why}; {'leave it out' if packed else 'set packing: best_fit'}"
    if s.learn == "assistant" and not packed:
        yield ".learn: assistant: who speaks at a window's start is not known; set packing: best_fit"
    dataset = config.datasets.get(spec.data)
    if s.learn == "assistant" and dataset is not None and dataset.format != "chat":
        yield f".learn: assistant: {spec.data} holds no conversations (format: {dataset.format})"


def _scaling_problems(config: Config, sweep: str) -> Iterator[str]:
    """What keeps a law from being fitted; better said before its runs are trained than after."""
    if sweep not in config.sweeps:
        yield f"scaling: no run {sweep!r} with a grid{nearest(sweep, config.sweeps)}"
        return
    runs = {name: config.runs[name] for name in config.sweeps[sweep]}
    if (count := len(next(iter(runs.values())).stages)) != 1:
        yield f"runs.{sweep}.stages: what a scaling law is fitted to has one stage (here are {count})"
        return
    budgets = {config.stage(name, run.stages[0].name).settings.target_flops for name, run in runs.items()}
    models = {run.model.model_dump_json() for run in runs.values()}
    if None in budgets or len(budgets) < 2 or len(models) < 3:
        needs = "a scaling law needs at least 3 models and 2 values of target_flops"
        yield f"runs.{sweep}.grid: {needs} (here are {len(models)} and {len(budgets - {None})})"


# --------------------------------------------------------------------------------------------- from elsewhere


@dataclass
class Given:
    """A setting that is not from the file; a value that is text is read as YAML."""

    origin: str
    """What messages call it: ``--lr``, ``LR``, ``lr=4e-3``."""
    key: str
    value: Any
    yields: bool = False
    """To another of the same setting, as a variable does to the command line."""

    def __post_init__(self) -> None:
        if not isinstance(self.value, str):
            return
        try:
            plain = yaml.safe_load(self.value)
        except yaml.YAMLError:
            raise ConfigError(f"{self.origin}: {self.value!r} is not a value as YAML has them") from None
        # YAML 1.1 wants ``4.0e-3``; ``4e-3`` is a number here too.
        number = isinstance(plain, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", plain)
        self.value = float(plain) if number else plain


def with_settings(config: Config, run: str, stage: str, given: Sequence[Given]) -> tuple[Config, list[Given]]:
    """The configuration with these settings of one stage, and those that were not yielded. `ConfigError`
    where there is no such setting, one is given twice, or what comes of it is refused."""
    index = config.stage(run, stage).index
    plain = copy.deepcopy({**config.written, "scaling": None})  # there are no grids left to fit a law to
    block = plain["runs"][run]
    used: dict[tuple[str, ...], Given] = {}
    for one in sorted(given, key=lambda one: (one.yields, one.key.count("."))):  # a model before its parts
        path = resolve(one.origin, one.key, block, stage)
        if path not in used:
            used[path] = one
            put(block, path, one.value)
        elif not one.yields:
            raise ConfigError(f"{used[path].origin} and {one.origin} are the same setting; give one of them")
    for one in used.values():  # once more, since one may hide another
        resolve(one.origin, one.key, block, stage)
    try:
        return load_config(plain), [one for one in given if one in used.values()]
    except ConfigError as error:
        text = str(error)
        for path, one in used.items():  # in the words in which it was given
            inside = ("stages", index, *path[2:]) if path[0] == "stages" else path
            place = re.escape(key_path(("runs", run, *inside)))
            text = re.sub(rf"^{place}(?=[:.\[])", one.origin.replace("\\", r"\\"), text, flags=re.MULTILINE)
        raise ConfigError(text) from None
