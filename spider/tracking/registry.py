"""The model registry: each run is a registered model, each stage a version, and ``best`` an alias.

The registry is updated run by run after all other items were sent. So the rest works without a registry, or
with a read-only one.

A registered model is found by its tag, even after it was renamed. A version is found by its model in the
store. Changes by people stay: what they deleted is not created again, and an alias that they moved is kept.
Tags record what Spider wrote.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spider.common.files import digest
from spider.common.results import Results
from spider.provenance.made import stat_of
from spider.report.summary import Summary
from spider.tracking.jobs import Item
from spider.tracking.pyfunc import PARAMS, describe
from spider.tracking.store import IDENTITY, REFUSALS, Store
from spider.tracking.target import explain, is_server, prefix
from spider.tracking.trainings import Model, stages_of

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

log = logging.getLogger(__name__)

BEST = "best"
#: The beginning of a tag of a run that a model of it has.
_SENT = "spider.sent."
#: Tag of a version: the id of its model in the store.
_MODEL = "spider.model"
#: Tag of a model in the store: the name and the number of its version.
_REGISTERED = "spider.registered"
#: Tag of a model in the store: the digest of the settings that it is loaded with.
_LOADED = "spider.loaded"


class Registry:
    """The model registry of a store."""

    def __init__(self, store: Store, results: Results) -> None:
        self.store, self.results = store, results
        self.client = store.client
        self._seen: dict[str, object] = {}

    def items(self) -> Iterator[Item]:
        """Yield the runs with a finished stage, if the store has models."""
        if not self.store.has_models:
            return
        summary = self.results.report / "summary.json"
        compared = Summary.read(summary).runs if summary.is_file() else {}
        for run in self.results.runs:
            shown = self.store.newest("Training", run)
            sent = {key: value for key, value in shown.tags.items() if _SENT in key} if shown else {}
            state = [sent, stat_of(summary)]
            if not sent or self._seen.get(run) == state:
                continue
            models = [model for stage in stages_of(self.results, run) for model in stage.models]
            models = sorted(models, key=lambda one: (one.receipt.global_step, one.where))
            models = [one for one in models if _SENT + one.where in sent]
            best = compared[run].best if run in compared else None
            weights = compared[run].stages[best].weights if best else None
            chosen = next((one for one in models if (one.where, one.weights) == (best, weights)), None)
            yield Item("registered models", run, partial(self._publish, run, models, chosen))
            self._seen[run] = state

    def _publish(self, run: str, versions: list[Model], best: Model | None) -> int:
        """Update the registered model of a run, its versions and the alias of the best one.

        Raises:
            ValueError: no model, or not that of this run, can be registered.
        """
        content = [one.tags(self.results.root) for one in versions]
        place = str(self.results.root.resolve())  # models are loaded from there
        state = digest([content, best and best.identity, place])
        shown = self.store.newest("Training", run)
        if shown is None or shown.deleted or shown.tags.get(_REGISTERED) == state:
            return 0
        try:
            self._update_all(run, versions, best)
        except Exception as failure:
            if isinstance(failure, ValueError) or getattr(failure, "error_code", None) in REFUSALS:
                raise
            import mlflow

            raise ValueError(
                f"no model registry: {explain(failure, mlflow.get_registry_uri())}. All else was sent; "
                "`spider track sync` registers the models later"
            ) from failure
        self.store.note(shown, {_REGISTERED: state})
        return 1

    def _update_all(self, run: str, versions: list[Model], best: Model | None) -> None:
        found = [(version, self.store.find_model(version.identity)) for version in versions]
        models = [(version, model) for version, model in found if model]  # without those that were deleted
        for version, model in models:
            self._make_loadable(version, model)
        tagged = f"tags.`{IDENTITY}` = '{self._identity(run)}'"
        registered = next(iter(self.client.search_registered_models(tagged, max_results=1)), None)
        if registered is None and all(_REGISTERED in model.tags for _, model in models):
            return log.info("run %s: its registered model was deleted in MLflow and stays deleted", run)
        name = registered.name if registered else self._create(run)
        known = {v.tags.get(_MODEL): v for v in self.client.search_model_versions(f"name = '{name}'")}
        for version, model in models:
            entry = known.get(model.model_id)
            if entry is None and _REGISTERED in model.tags:
                log.info("%s: its version of %s was deleted in MLflow and stays deleted", name, model.name)
                continue
            if entry is None:
                entry = self.client.create_model_version(
                    name,
                    source=f"models:/{model.model_id}",
                    run_id=model.source_run_id,
                    tags=version.tags(self.results.root) | {_MODEL: model.model_id},
                    model_id=model.model_id,
                )
            for key, value in version.tags(self.results.root).items():
                if entry.tags.get(key) != value:
                    self.client.set_model_version_tag(name, str(entry.version), key, value)
            if _REGISTERED not in model.tags:
                tags = {_REGISTERED: f"{name}/{entry.version}"}
                if not is_server(self.store.uri):  # a server sets this tag itself
                    shown = [{"name": name, "version": str(entry.version)}]
                    tags["mlflow.modelVersions"] = json.dumps(shown)
                self.client.set_logged_model_tags(model.model_id, tags)
            if best is version:
                self._choose(name, str(entry.version))
        return None

    def _make_loadable(self, version: Model, model: LoggedModel) -> None:
        """Log the ``MLmodel`` of the checkpoint."""
        path = version.path.resolve()
        config = {
            "model": f"{version.receipt.run}/{version.where}",
            "weights": version.weights,
            "checkpoint": str(path),
        }
        settings = digest([config, PARAMS])
        if model.tags.get(_LOADED) == settings:
            return
        with tempfile.TemporaryDirectory() as folder:
            describe(Path(folder), model, config)
            self.client.log_model_artifacts(model.model_id, folder)
        self.client.set_logged_model_tags(model.model_id, {_LOADED: settings})

    def _identity(self, run: str) -> str:
        return f"{self.store.folder}/{prefix(self.store.settings)}{run}"

    def _create(self, run: str) -> str:
        """Create a registered model and return its name: the prefix of the experiments and the run.

        If that name is taken, append the beginning of the identity of this results folder.
        """
        from mlflow.exceptions import MlflowException

        # MLflow forbids slashes, and names of runs lack dots.
        plain = f"{prefix(self.store.settings)}{run}".replace("/", ".")
        names = (plain, f"{plain}-{self.store.folder[:6]}")
        tags = {IDENTITY: self._identity(run), "spider.run": run}
        for name in names:
            try:
                self.client.create_registered_model(name, tags)
                return name
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise ValueError(f"other registered models are named {' and '.join(names)}; rename one of them")

    def _choose(self, name: str, best: str) -> None:
        """Move the alias to the best version, unless a person moved it."""
        registered = self.client.get_registered_model(name)
        now = str(registered.aliases[BEST]) if BEST in registered.aliases else None
        if now not in (None, best, registered.tags.get("spider.best")):
            log.warning(
                "%s: the alias best was moved to version %s in MLflow and stays there; by comparison version "
                "%s is the best. To reset it, delete that alias", name, now, best
            )  # fmt: skip
            return
        if now != best:
            self.client.set_registered_model_alias(name, BEST, best)
        self.client.set_registered_model_tag(name, "spider.best", best)
