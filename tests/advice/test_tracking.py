"""Advice about the tracking store, on real SQLite stores."""

from __future__ import annotations

import os
import socket

import pytest

from spider.tracking import spool
from spider.tracking.store import serve
from spider.tracking.sync import sync
from spider.tracking.target import store_uri
from tests.unit.tracking.conftest import (  # noqa: F401 (fixtures)
    empty_database,
    in_workflow,
    no_tracking_environment,
    results,
    store,
)
from tests.unit.tracking.test_explain import record_something

from .followed import advised, refused


def test_a_folder_with_a_question_mark_is_renamed(tmp_path):
    (tmp_path / "what?").mkdir()
    with refused(
        "tracking/target.py", "a SQLite store cannot be in a folder with '?' in its name; rename it"
    ):
        store_uri(tmp_path / "what?")
    store_uri((tmp_path / "what?").rename(tmp_path / "what"))


def test_a_damaged_store_is_moved_away(results, in_workflow):  # noqa: F811
    (results / "mlflow.db").write_bytes(b"not a database at all" * 100)
    record_something(results)
    said = sync(results).error
    advised(
        said,
        "tracking/target.py",
        "the file is damaged or not a SQLite database; move it away and sync again",
    )
    (results / "mlflow.db").rename(results / "aside")
    assert sync(results).pending == 0


def test_a_deleted_experiment_is_restored_or_another_is_named(results, store, in_workflow, monkeypatch):  # noqa: F811
    record_something(results)
    connection = store()
    connection.client.delete_experiment(experiment := connection.experiments["Pipeline"])
    said = sync(results).error
    advised(said, "tracking/store.py", "was deleted in MLflow; restore it there (`mlflow experiments restore")
    monkeypatch.setenv("SPIDER_TRACKING_EXPERIMENT", "other")
    assert sync(results).pending == 0
    monkeypatch.delenv("SPIDER_TRACKING_EXPERIMENT")
    connection.client.restore_experiment(experiment)
    assert sync(results).pending == 0


@pytest.mark.parametrize("damage", ["{", '{"format": 99}'])
def test_a_damaged_record_is_moved_away(results, in_workflow, caplog, tmp_path, damage):  # noqa: F811
    record_something(results)
    damaged = spool.record_path(results, "jobs", "0000")
    damaged.write_text(damage)
    assert sync(results).pending == 1
    if damage != "{":
        advised(caplog.text, "tracking/records.py", "move it away")
    damaged.rename(tmp_path / "aside")
    assert sync(results).pending == 0


def test_another_port_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execvp", lambda *words: None)  # MLflow's server, which takes this process
    monkeypatch.setattr(os, "execv", lambda *words: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused("tracking/store.py", "name another: spider track ui --port {}"):
            serve(tmp_path, taken.getsockname()[1], None)
