"""Stores that cannot be used. tests/browser has a server with PostgreSQL, and tests/advice the remedies."""

from __future__ import annotations

import logging
import re
import shlex
import sqlite3

import mlflow.cli
import pytest
from click.testing import CliRunner

from spider.config import ConfigError, load_config
from spider.tracking.pages import serve
from spider.tracking.target import store_uri
from tests.servers import free_port


def older_database(path):
    """Create a database without the last eight migrations of MLflow.

    They add tables, so MLflow alone would take it for a new database and migrate it.
    """
    import sqlalchemy
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    config = _get_alembic_config(f"sqlite:///{path}")
    revisions = list(ScriptDirectory.from_config(config).walk_revisions())
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    Base.metadata.create_all(engine)
    engine.dispose()
    command.upgrade(config, revisions[8].revision)


def test_a_database_of_an_older_mlflow_is_not_changed_before_its_owner_upgrades_it(results, monkeypatch):
    old = results.root / "old.db"
    older_database(old)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{old}")
    results.workflow()
    before = old.read_bytes()
    report = results.sync()
    assert report.sent == {} and old.read_bytes() == before
    reason, upgrade = report.error.split("`")[:2]
    assert "older MLflow" in reason and upgrade.startswith("mlflow db upgrade ")
    upgraded = CliRunner().invoke(mlflow.cli.cli, shlex.split(upgrade)[1:])
    assert upgraded.exit_code == 0, upgraded.output
    assert results.sync().sent == {"workflows": 1}


def test_a_database_of_a_newer_mlflow_is_named(results):
    with sqlite3.connect(results.root / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    results.workflow()
    assert "newer MLflow" in results.sync().error


def test_a_server_that_does_not_run_is_named(results, monkeypatch):
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    results.workflow()
    assert results.sync().error.startswith(f"{uri}: no answer (ConnectionRefusedError")


@pytest.mark.parametrize("uri", ["file:./mlruns", "mlflow.db", "localhost:5000", "sqlite://mlflow.db"])
def test_an_address_that_is_no_store_is_named_with_where_it_was_set(uri, results, monkeypatch):
    results.workflow()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert results.sync().error.startswith(f"MLFLOW_TRACKING_URI: {uri} is no database and no server")
    with pytest.raises(ConfigError, match=rf"^tracking\.uri: {re.escape(uri)} is no database and no server"):
        load_config(CONFIG | {"tracking": {"uri": uri}})


CONFIG = {
    "datasets": {"d": {"source": {"kind": "pydocs"}}},
    "runs": {"r": {"data": "d", "model": "tiny", "stages": [{"name": "s", "max_steps": 1}]}},
}


@pytest.mark.parametrize("uri", ["postgresql://me:sesame@host/db", "http://h?password=sesame"])
def test_a_password_in_the_configuration_is_refused_and_not_repeated(uri):
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        load_config(CONFIG | {"tracking": {"uri": uri}})
    assert "sesame" not in str(refused.value)


def test_the_configuration_names_the_store_and_the_experiment(tmp_path):
    tracking = {"uri": "postgresql://me@host/db", "experiment": "ada"}
    assert store_uri(tmp_path, load_config(CONFIG | {"tracking": tracking}).tracking) == tracking["uri"]
    with pytest.raises(ValueError, match="letters, digits"):
        load_config(CONFIG | {"tracking": {"experiment": "ada/training"}})


@pytest.mark.parametrize(
    ("experiment", "page"),
    [(None, "?workflowType=machine_learning"), ("7", "/7/runs?viewStateShareKey=over-bytes&")],
)
def test_the_address_of_a_server_is_logged_without_its_password(
    results, monkeypatch, caplog, experiment, page
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ada:sesame@tracker.example/")
    with caplog.at_level(logging.INFO):
        ids = {"Training": experiment, "Checkpoints": "8"} if experiment else {}
        serve(results, results.config().tracking, 5000, ids)
    assert f"https://***@tracker.example/#/experiments{page}" in caplog.text
    assert "sesame" not in caplog.text
