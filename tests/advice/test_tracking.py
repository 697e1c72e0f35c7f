"""Advice about the tracking store, on real SQLite stores."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mlflow import MlflowClient

from spider.common.files import write_json
from spider.common.results import Results
from spider.config.run import TrackingConfig
from spider.tracking.pages import serve
from spider.tracking.target import explain, reach, store_uri
from tests.forkserver import python
from tests.servers import postgresql
from tests.unit.tracking.conftest import (  # noqa: F401 (fixtures)
    empty_database,
    make_folder,
    no_tracking_environment,
    results,
)
from tests.unit.tracking.test_checkpoints_shown import scored  # noqa: F401 (fixture)
from tests.unit.tracking.test_registry import demo, versions, weights  # noqa: F401 (fixtures)

from .followed import advised, refused


def test_a_folder_with_a_question_mark_is_renamed(tmp_path):
    (tmp_path / "what?").mkdir()
    with refused("tracking/target.py", "SQLite store cannot be in a folder with '?' in its name; rename it"):
        store_uri(tmp_path / "what?", TrackingConfig())
    store_uri((tmp_path / "what?").rename(tmp_path / "what"), TrackingConfig())


def test_a_folder_of_an_older_mlflow_is_copied_into_a_database(results, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    theirs = MlflowClient("file:./my%20runs")
    theirs.create_run(theirs.create_experiment("theirs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./my%20runs")
    results.workflow()
    said = results.sync().error
    advised(said, "config/run.py", "set sqlite:///mlflow.db, which `{}` makes of a folder")
    (command,) = re.findall("`(.*)`", said)
    subprocess.run([sys.executable, "-m", *shlex.split(command)], check=True, capture_output=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert results.sync().sent == {"workflows": 1}
    names = {one.name for one in MlflowClient("sqlite:///mlflow.db").search_experiments()}
    assert {"theirs", "Pipeline", "Training"} <= names


def test_a_damaged_store_is_moved_away(results):  # noqa: F811
    (results.root / "mlflow.db").write_bytes(b"not a database at all" * 100)
    results.workflow()
    said = results.sync().error
    advised(said, "tracking/target.py", "move it away and sync again")
    (results.root / "mlflow.db").rename(results.root / "aside")
    assert results.sync().error is None


def test_a_deleted_experiment_is_restored_or_another_is_named(results):  # noqa: F811
    results.sync()
    experiment = results.client.get_experiment_by_name("Pipeline").experiment_id
    results.client.delete_experiment(experiment)
    results.workflow()
    said = results.sync().error
    advised(said, "tracking/store.py", "was deleted in MLflow; restore it there (`mlflow experiments restore")
    assert results.sync(experiment="other").error is None
    results.client.restore_experiment(experiment)
    assert results.sync().error is None


def test_the_password_of_a_database_is_set(monkeypatch):
    with postgresql("sesame", "mlflow") as address:
        right = f"{address}/mlflow"
        for uri in (right.replace(":sesame", ""), right.replace("sesame", "mistaken")):
            with pytest.raises(Exception, match="password") as refusal:
                reach(uri)
            said = explain(refusal.value, uri)
            advised(said, "tracking/target.py", "the database refuses this user or password; set PGPASSWORD")
        reach(right)
        monkeypatch.setenv("PGPASSWORD", "sesame")
        reach(right.replace(":sesame", ""))


class Protected(BaseHTTPRequestHandler):
    """A server that has no experiments, and says so to one user and to one token."""

    ALLOWED = ("Basic " + b64encode(b"ada:sesame").decode(), "Bearer ticket")

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") not in self.ALLOWED:
            return self.send_error(401)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_the_password_or_the_token_of_a_server_is_set(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Protected)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(Exception, match="401") as refusal:
            reach(uri)
        advised(explain(refusal.value, uri), "tracking/target.py", "set MLFLOW_TRACKING_USERNAME and")
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
            patch.setenv("MLFLOW_TRACKING_PASSWORD", "sesame")
            reach(uri)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "ticket")
        reach(uri)
    finally:
        server.shutdown()
        server.server_close()


def test_a_registered_model_of_the_same_name_is_renamed(demo):  # noqa: F811
    (demo.root / "tracking").mkdir()
    write_json(demo.root / "tracking/folder.json", {"format": 1, "identity": "fedcba987654"})
    for name in ("demo", "demo-fedcba"):
        demo.client.create_registered_model(name)
    advised(demo.sync().error, "tracking/registry.py", "rename one of them")
    demo.client.rename_registered_model("demo", "theirs")
    assert demo.sync().error is None
    assert set(versions(demo).values()) == {"warmup", "main"}


def test_another_port_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execvp", lambda *words: None)  # MLflow's server, which takes this process
    monkeypatch.setattr(os, "execv", lambda *words: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused("tracking/pages.py", "name another: spider track ui --port {}"):
            serve(Results(tmp_path), TrackingConfig(), taken.getsockname()[1], {})


#: MLflow's own server, without what those before MLflow 3 lack while a file is there.
SERVER = """\
import sys
from pathlib import Path
from flask import abort, request
from mlflow.server import app

@app.before_request
def without_models():
    if "logged-models" in request.path and Path(sys.argv[2]).exists():
        abort(404)

app.run(port=int(sys.argv[1]))
"""


def test_a_server_without_models_is_updated(scored, caplog, tmp_path):  # noqa: F811
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (old := tmp_path / "old").touch()
    server = {"_MLFLOW_SERVER_FILE_STORE": scored.uri, "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true"}
    server["_MLFLOW_SERVER_ARTIFACT_DESTINATION"] = str(scored.root / "served")
    server["_MLFLOW_SERVER_ARTIFACT_ROOT"] = "mlflow-artifacts:/"
    command = [python(), "-c", SERVER, str(port), str(old)]
    process = subprocess.Popen(command, env=os.environ | server, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)
        assert scored.sync(uri=address).error is None
        advised(
            caplog.text,
            "tracking/store.py",
            "update MLflow there to 3 or later",
            ", then run `spider track sync`",
        )
        assert caplog.text.count("update MLflow") == 1
        runs = {one.info.run_name: one for one in scored.shown("Training")}
        assert len(scored.history(runs["demo"], "sample_bpb")) == 4
        assert len(scored.shown("Checkpoints")) == 6
        training = [runs["demo"].info.experiment_id]
        assert scored.client.search_logged_models(training) == []
        old.unlink()
        assert scored.sync(uri=address).error is None
        assert len(scored.client.search_logged_models(training)) == 6
    finally:
        process.kill()
        process.wait()
