"""The whole configuration: datasets, runs, tracking; and how a stage of a run is resolved."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from spider.config.block import Block, Name
from spider.config.data import Dataset, StreamSource
from spider.config.explain import ConfigError, none_such
from spider.config.run import Run, RunSettings, TrackingConfig
from spider.config.spec import StageSpec


class Config(Block):
    results: str = "results"
    """Folder for everything that is made."""
    datasets: dict[Name, Dataset]
    """Datasets by name."""
    runs: Annotated[dict[Name, Run], Field(min_length=1)]
    tracking: TrackingConfig = TrackingConfig()
    scaling: str | None = None
    """Fit a scaling law to this run's grid, over models and ``target_flops`` (docs/sweeps.md)."""
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)
    _sweeps: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Of each block with a grid, the names of the runs that it became."""
        return self._sweeps

    @property
    def written(self) -> dict[str, Any]:
        """The mapping that this was read from, runs in the place of their grids."""
        return self._written

    def choose(self, run: str | None = None, stage: str | None = None) -> tuple[str, str]:
        """The run and stage meant: where none is named, the only run, and a run's first stage.

        Raises:
            ConfigError: no run is named and there are several.
        """
        if run is None:
            run, *others = self.runs
            if others:
                known = ", ".join(self.runs)
                raise ConfigError(f"which run? The configuration has several, name one: {known}")
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
        stream = dataset if dataset and isinstance(dataset.source, StreamSource) else None
        shared = {name: getattr(run, name) for name in RunSettings.model_fields}
        shared["evaluation"] = run.evaluation.model_copy(update={"data": run.evaluation.data or run.data})
        return StageSpec(
            run=run_name,
            stage=stage_name,
            index=index,
            data=data,
            stream=stream,
            processes=run.resources.processes,
            settings=settings.model_copy(update={"data": data, "n_loops": loops}),
            **shared,
        )

    def dataset(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise ConfigError(f"datasets: {none_such('dataset', name, self.datasets)}")
        return self.datasets[name]

    def run(self, name: str) -> Run:
        if name in self.sweeps:
            known = ", ".join(self.sweeps[name])
            raise ConfigError(f"runs: {name} is a sweep, name one of its runs: {known}")
        if name not in self.runs:
            raise ConfigError(f"runs: {none_such('run', name, self.runs)}")
        return self.runs[name]
