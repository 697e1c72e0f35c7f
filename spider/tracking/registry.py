"""The model registry: every run a registered model, every stage a version, alias ``best``.

It is brought up to date run by run, after all else was sent: one that is read-only, or not there, costs the
rest of tracking nothing.

A registered model is known by its tag ``spider.identity``, whatever it is named now; a version by the model
in the store that it is of. What somebody deleted there stays deleted, an alias that somebody moved and a
description that somebody wrote stay as they are: tags tell what was left there from here.
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
#: Tags: what a registered model is of, and a version; what is registered already, and loaded from where;
#: digests of what was written as a description.
_IDENTITY, _MODEL, _REGISTERED, _LOADED, _SAID = (
    f"spider.{name}" for name in ("identity", "model", "registered", "loaded", "description")
)

There = tuple[Version, "ModelVersion"]


class Registry:
    """That of a store."""

    def __init__(self, store: Store) -> None:
        self.store, self.client = store, store.client

    def explain(self, failure: Exception) -> str:
        """One line on why it takes nothing; may hold secrets."""
        import mlflow

        return (
            f"no model registry: {explain(failure, mlflow.get_registry_uri())}. All else was sent; `spider "
            "track sync` registers the models later, `tracking: {registry: false}` asks for none"
        )

    def publish(self, line: Line) -> None:
        """Bring a run's model, its versions, their descriptions and the alias up to date; safe to repeat.
        `RefusedError` where that of one run cannot be done."""
        found = [(version, self.store.find_model(version.record.identity)) for version in line.versions]
        models = [(version, model) for version, model in found if model]  # others were deleted there
        for version, model in models:
            self._make_loadable(version, model)
        registered = self._find(line.run)
        if registered is None and all(_REGISTERED in model.tags for _, model in models):
            return log.info("run %s: its registered model was deleted in MLflow, and stays so", line.run)
        name = registered.name if registered else self._create(line.run)
        known = {v.tags.get(_MODEL): v for v in self.client.search_model_versions(f"name = '{name}'")}
        there: list[There] = []
        for version, model in models:
            made = known.get(model.model_id)
            if made is None and _REGISTERED in model.tags:
                log.info("%s: its version of %s was deleted in MLflow, and stays so", name, model.name)
                continue
            made = made or self._create_version(name, version, model)
            self._update(version, model, made)
            there.append((version, made))
        registered = self.client.get_registered_model(name)
        best = self._choose(registered, line, there)
        numbered = [(str(made.version), made.run_id, version) for version, made in there]
        said = about_run(line, numbered, name, best)
        if (noted := _may_say(registered, said)) is not None:
            self.client.set_registered_model_tag(name, _SAID, noted)
            self.client.update_registered_model(name, said)

    def _make_loadable(self, version: Version, model: LoggedModel) -> None:
        """Put into a model in the store the file from which MLflow loads the checkpoint, and a copy of the
        weights where that is asked for."""
        place = (self.store.results / version.record.params["path"]).resolve()
        told = {"model": f"{version.run}/{version.stage}", "weights": version.weights}
        told |= {"checkpoint": str(place), "copied": f"weights/{place.name}" if copies_weights() else ""}
        if model.tags.get(_LOADED) == (known := digest([told, PARAMS])):
            return
        with tempfile.TemporaryDirectory() as folder:
            if told["copied"]:
                _copy(place, Path(folder) / told["copied"], version.weights)
            describe(Path(folder), model, **told)
            self.client.log_model_artifacts(model.model_id, folder)
        self.client.set_logged_model_tags(model.model_id, {_LOADED: known})

    def _identity(self, run: str) -> str:
        return f"{self.store.folder}/{prefix()}{run}"

    def _find(self, run: str) -> RegisteredModel | None:
        tagged = f"tags.`{_IDENTITY}` = '{self._identity(run)}'"
        return next(iter(self.client.search_registered_models(tagged, max_results=1)), None)

    def _create(self, run: str) -> str:
        """Its name: the run's, behind the experiments' where these have one; where others have a model of
        this name, with some letters that tell this results folder from theirs."""
        from mlflow.exceptions import MlflowException

        plain = f"{prefix()}{run}".replace("/", ".")  # MLflow takes no slash, and no name of ours has a dot
        names = plain, f"{plain}-{self.store.folder[:6]}"
        tags = {_IDENTITY: self._identity(run), "spider.run": run}
        for name in names:
            try:
                self.client.create_registered_model(name, tags)
                return name
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise RefusedError(f"others have registered models {' and '.join(names)} already; rename one of them")

    def _create_version(self, name: str, version: Version, model: LoggedModel) -> ModelVersion:
        tags = version.tags() | {_MODEL: model.model_id}
        source, run = f"models:/{model.model_id}", model.source_run_id
        return self.client.create_model_version(name, source, run, tags=tags, model_id=model.model_id)

    def _update(self, version: Version, model: LoggedModel, made: ModelVersion) -> None:
        """Tags and description of a version; and on its model that there is one."""
        name, number = made.name, str(made.version)
        for key, value in version.tags().items():
            if made.tags.get(key) != value:
                self.client.set_model_version_tag(name, number, key, value)
        if _REGISTERED not in model.tags:
            told = {_REGISTERED: f"{name}/{number}"}
            if not is_server(self.store.uri):  # which tells its pages so itself
                told["mlflow.modelVersions"] = json.dumps([{"name": name, "version": number}])
            self.client.set_logged_model_tags(model.model_id, told)
        said = about_version(version, f"{name}/{number}", made.run_id)
        if (noted := _may_say(made, said)) is not None:
            self.client.set_model_version_tag(name, number, _SAID, noted)
            self.client.update_model_version(name, number, said)

    def _choose(self, registered: RegisteredModel, line: Line, there: list[There]) -> str | None:
        """Move the alias to the best of the stages, unless somebody else moved it; returns where it is."""
        name, choice, noted = registered.name, line.choice, registered.tags.get("spider.best")
        now = str(registered.aliases[BEST]) if BEST in registered.aliases else None
        fits = [str(made.version) for one, made in there if choice and choice.means(one.stage, one.weights)]
        if choice is None or now in fits:
            pass
        elif not fits:
            log.warning("%s: its best stage by comparison, %s, is no version of it", name, choice.stage)
        elif now not in (None, noted):
            log.warning(
                "%s: the alias best was moved to version %s in MLflow and stays there; by comparison it were "
                "version %s. To give it back, delete that alias and tracking/sent.json, and sync",
                name, now, fits[-1],
            )  # fmt: skip
        else:
            now = fits[-1]
            self.client.set_registered_model_alias(name, BEST, now)
        if now in fits and now != noted:
            self.client.set_registered_model_tag(name, "spider.best", now)
        return now


def _may_say(there: RegisteredModel | ModelVersion, said: str) -> str | None:
    """Digests of the description that is there and of this one, to be noted before that is written; None
    where it is there already, or somebody wrote another."""
    now, noted = there.description or "", there.tags.get(_SAID, "")
    if now == said or (now and digest(now) not in noted.split()):
        return None
    return f"{digest(now)} {digest(said)}"


def _copy(place: Path, output: Path, weights: str) -> None:
    """Copy a compressed model, or export a checkpoint.

    Log a warning and copy nothing where these weights are gone, trained again or moved.
    """
    from spider.checkpoints.load import Checkpoint
    from spider.publish.export import export

    output.parent.mkdir()
    try:
        if (there := Checkpoint.at(place).weights) != weights:
            raise CheckpointError(f"{place}: other weights lie there now, {there}")
        shutil.copyfile(place, output) if place.suffix == COMPRESSED else export(place, output)
    except CheckpointError as error:
        log.warning("the weights %s are registered without a copy: %s", weights, error)
