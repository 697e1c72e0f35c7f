"""The model registry: each run is a registered model, each stage a version, and ``best`` an alias.

The registry is updated run by run after all other records were sent. So the rest of tracking works without a
registry, or with a read-only one.

A registered model is found by its tag ``spider.identity``, even after it was renamed. A version is found by
its model in the store. Changes by people stay: what they deleted is not created again, and an alias that they
moved or a description that they wrote is kept. Tags record what Spider wrote.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spider.checkpoints.records import COMPRESSED
from spider.errors import CheckpointError
from spider.files import digest
from spider.tracking.pyfunc import PARAMS, describe
from spider.tracking.records import RefusedError
from spider.tracking.store import Store
from spider.tracking.target import copies_weights, explain, is_server, prefix
from spider.tracking.versions import Line, Version, about_run, about_version

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

log = logging.getLogger(__name__)

BEST = "best"
#: Tag of a registered model: its identity.
_IDENTITY = "spider.identity"
#: Tag of a version: the id of its model in the store.
_MODEL = "spider.model"
#: Tag of a model in the store: the name and the number of its version.
_REGISTERED = "spider.registered"
#: Tag of a model in the store: the digest of the settings that it is loaded with.
_LOADED = "spider.loaded"
#: Tag of a registered model or version: digests of the descriptions that Spider wrote.
_DESCRIBED = "spider.description"

Registered = tuple[Version, "ModelVersion"]


class Registry:
    """The model registry of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.client = store.client

    def explain(self, failure: Exception) -> str:
        """Return one line on why models cannot be registered; it may hold secrets."""
        import mlflow

        return (
            f"no model registry: {explain(failure, mlflow.get_registry_uri())}. All other records were sent; "
            "`spider track sync` registers the models later, `tracking: {registry: false}` switches this off"
        )

    def publish(self, line: Line) -> None:
        """Update the registered model of a run, its versions, their descriptions and the alias.

        The call can be repeated.

        Raises:
            RefusedError: the model of this run cannot be registered.
        """
        found = [(version, self.store.find_model(version.record.identity)) for version in line.versions]
        models = [(version, model) for version, model in found if model]  # without those that were deleted
        for version, model in models:
            self._make_loadable(version, model)
        registered = self._find(line.run)
        if registered is None and all(_REGISTERED in model.tags for _, model in models):
            return log.info("run %s: its registered model was deleted in MLflow and stays deleted", line.run)
        name = registered.name if registered else self._create(line.run)
        known = {v.tags.get(_MODEL): v for v in self.client.search_model_versions(f"name = '{name}'")}
        versions: list[Registered] = []
        for version, model in models:
            entry = known.get(model.model_id)
            if entry is None and _REGISTERED in model.tags:
                log.info("%s: its version of %s was deleted in MLflow and stays deleted", name, model.name)
                continue
            entry = entry or self._create_version(name, version, model)
            self._update(version, model, entry)
            versions.append((version, entry))
        registered = self.client.get_registered_model(name)
        best = self._choose(registered, line, versions)
        numbered = [(str(entry.version), entry.run_id, version) for version, entry in versions]
        description = about_run(line, numbered, name, best)
        digests = _description_tag(registered, description)
        if digests is not None:
            self.client.set_registered_model_tag(name, _DESCRIBED, digests)
            self.client.update_registered_model(name, description)

    def _make_loadable(self, version: Version, model: LoggedModel) -> None:
        """Log the ``MLmodel`` of the checkpoint, and a copy of the weights with ``copy_weights``."""
        path = (self.store.results / version.record.params["path"]).resolve()
        config = {
            "model": f"{version.run}/{version.stage}",
            "weights": version.weights,
            "checkpoint": str(path),
            "copied": f"weights/{path.name}" if copies_weights() else "",
        }
        settings = digest([config, PARAMS])
        if model.tags.get(_LOADED) == settings:
            return
        with tempfile.TemporaryDirectory() as folder:
            if config["copied"]:
                _copy(path, Path(folder) / config["copied"], version.weights)
            describe(Path(folder), model, config)
            self.client.log_model_artifacts(model.model_id, folder)
        self.client.set_logged_model_tags(model.model_id, {_LOADED: settings})

    def _identity(self, run: str) -> str:
        return f"{self.store.folder}/{prefix()}{run}"

    def _find(self, run: str) -> RegisteredModel | None:
        tagged = f"tags.`{_IDENTITY}` = '{self._identity(run)}'"
        return next(iter(self.client.search_registered_models(tagged, max_results=1)), None)

    def _create(self, run: str) -> str:
        """Create a registered model and return its name: the prefix of the experiments and the run.

        If that name is taken, append the beginning of the identity of this results folder.
        """
        from mlflow.exceptions import MlflowException

        plain = f"{prefix()}{run}".replace("/", ".")  # MLflow forbids slashes, and names of runs lack dots
        names = (plain, f"{plain}-{self.store.folder[:6]}")
        tags = {_IDENTITY: self._identity(run), "spider.run": run}
        for name in names:
            try:
                self.client.create_registered_model(name, tags)
                return name
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise RefusedError(f"other registered models are named {' and '.join(names)}; rename one of them")

    def _create_version(self, name: str, version: Version, model: LoggedModel) -> ModelVersion:
        tags = version.tags() | {_MODEL: model.model_id}
        return self.client.create_model_version(
            name,
            source=f"models:/{model.model_id}",
            run_id=model.source_run_id,
            tags=tags,
            model_id=model.model_id,
        )

    def _update(self, version: Version, model: LoggedModel, entry: ModelVersion) -> None:
        """Update the tags and the description of a version, and note the version on its model."""
        name = entry.name
        number = str(entry.version)
        for key, value in version.tags().items():
            if entry.tags.get(key) != value:
                self.client.set_model_version_tag(name, number, key, value)
        if _REGISTERED not in model.tags:
            tags = {_REGISTERED: f"{name}/{number}"}
            if not is_server(self.store.uri):  # a server sets this tag itself
                tags["mlflow.modelVersions"] = json.dumps([{"name": name, "version": number}])
            self.client.set_logged_model_tags(model.model_id, tags)
        description = about_version(version, f"{name}/{number}", entry.run_id)
        digests = _description_tag(entry, description)
        if digests is not None:
            self.client.set_model_version_tag(name, number, _DESCRIBED, digests)
            self.client.update_model_version(name, number, description)

    def _choose(self, registered: RegisteredModel, line: Line, versions: list[Registered]) -> str | None:
        """Move the alias to the best stage, unless a person moved it; return its version."""
        name = registered.name
        choice = line.choice
        noted = registered.tags.get("spider.best")
        now = str(registered.aliases[BEST]) if BEST in registered.aliases else None
        best = [
            str(entry.version)
            for one, entry in versions
            if choice and (one.stage, one.weights) == (choice.stage, choice.weights)
        ]
        if choice is None or now in best:
            pass
        elif not best:
            log.warning("%s: has no version of its best stage by comparison, %s", name, choice.stage)
        elif now not in (None, noted):
            log.warning(
                "%s: the alias best was moved to version %s in MLflow and stays there; by comparison version "
                "%s is the best. To reset it, delete that alias and tracking/sent.json, and sync",
                name, now, best[-1],
            )  # fmt: skip
        else:
            now = best[-1]
            self.client.set_registered_model_alias(name, BEST, now)
        if now in best and now != noted:
            self.client.set_registered_model_tag(name, "spider.best", now)
        return now


def _description_tag(entry: RegisteredModel | ModelVersion, description: str) -> str | None:
    """Return the digests of the present and the new description, for the tag to set before the new one.

    Return None if the description is up to date or a person wrote it.
    """
    present = entry.description or ""
    written = entry.tags.get(_DESCRIBED, "").split()
    if present == description or (present and digest(present) not in written):
        return None
    return f"{digest(present)} {digest(description)}"


def _copy(path: Path, output: Path, weights: str) -> None:
    """Copy a compressed model, or export a checkpoint.

    Log a warning and copy nothing if these weights were deleted, trained again or moved.
    """
    from spider.checkpoints.load import Checkpoint
    from spider.publish.export import export

    output.parent.mkdir()
    try:
        found = Checkpoint.at(path).weights
        if found != weights:
            raise CheckpointError(f"{path}: has other weights now, {found}")
        if path.suffix == COMPRESSED:
            shutil.copyfile(path, output)
        else:
            export(path, output)
    except CheckpointError as error:
        log.warning("the weights %s are registered without a copy: %s", weights, error)
