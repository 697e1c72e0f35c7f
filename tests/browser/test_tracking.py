"""A real MLflow server with passwords, on a real PostgreSQL, tracks a small run from end to end.

The run is made once, by the workflow.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from spider.common.files import read_json
from spider.tracking.pages import COLUMNS, CURVE
from tests import forkserver
from tests.servers import SlowConnection, free_port, mlflow_server, postgresql, wait_for_http
from tests.workflow.conftest import ROOT, SMALL, SNAKEMAKE, Workflow

SPIDER = Path(sys.executable).parent / "spider"
SECRETS = {"database": "sesame-of-the-database", "ada": "sesame-of-ada-4711"}
SECRETS["hub"] = "hf_SesameSesameSesame4711"
RUNS = ("deep", "shallow")
CHECKPOINTS = 4

OF_STAGES = ("draw", "evaluate", "sample", "stage_baselines", "train")
JOBS = ["compare", "download text/000", "encode text/000", "index text", *(f"report {run}" for run in RUNS)]
JOBS += [f"{rule} {run}/only" for rule in OF_STAGES for run in RUNS]
#: Rules whose jobs are named by a digest: a warm-up of each run, and one job for the text that they share.
BY_DIGEST = ["baselines", "overlap", "warmup", "warmup"]


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "SPIDER_", "HF_"))}
    return kept | more


@pytest.fixture(scope="module")
def database():
    with postgresql(SECRETS["database"], "mlflow", "users") as uri:
        yield uri


@pytest.fixture(scope="module")
def server(database, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    users = f"{database}/users"
    with mlflow_server(folder, f"{database}/mlflow", admin=("ada", SECRETS["ada"]), users=users) as uri:
        yield uri


@pytest.fixture(scope="module")
def as_ada(server):
    """Return the environment of a user who may write to the server."""
    password = {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": SECRETS["ada"]}
    return clean_environment(MLFLOW_TRACKING_URI=server, HF_TOKEN=SECRETS["hub"], **password)


@pytest.fixture(scope="module")
def small_run(as_ada, tmp_path_factory):
    """Return the results folder of two small runs that the server tracked."""
    folder = Workflow(tmp_path_factory.mktemp("run")).folder
    config = copy.deepcopy(SMALL)
    run = config["runs"].pop("small") | {"stages": [{"name": "only", "max_steps": 20}]}
    run["defaults"] |= {"warmup_steps": 5, "val_every": 5}
    run["evaluation"]["checkpoints"] = CHECKPOINTS
    shallow = copy.deepcopy(run)
    shallow["model"]["recurrence"]["loops"] = 1
    config |= {"runs": {"deep": run, "shallow": shallow}, "tracking": {"experiment": "lab"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [forkserver.python(), str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--cores", "2"]
    done = subprocess.run(command, cwd=folder, env=as_ada, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "results/logs/printed.log").write_text(done.stdout + done.stderr)
    return folder / "results"


@pytest.fixture
def client(monkeypatch, as_ada, server):
    """Return a client of the server with the password of Ada."""
    from mlflow import MlflowClient

    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, as_ada[name])
    return MlflowClient(server)


def spider(
    results: Path, *arguments: str, environment: dict[str, str], config: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [forkserver.spider(), "--config", config or results / "config.yaml", *arguments]
    return subprocess.run(
        command, cwd=results.parent, env=environment, capture_output=True, text=True, timeout=200
    )


def configured(results: Path, experiment: str) -> Path:
    """Return a configuration of the run that names other experiments."""
    plain = yaml.safe_load((results / "config.yaml").read_text()) | {"tracking": {"experiment": experiment}}
    path = results.parent / f"{experiment}.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def tracked(client, experiment="lab"):
    """Return the jobs, the workflow, the trainings and the models in the experiments of that name."""
    ids = {e.name: e.experiment_id for e in client.search_experiments()}
    pipeline = client.search_runs([ids[f"{experiment}/Pipeline"]])
    jobs = [r for r in pipeline if r.data.tags["spider.kind"] == "job"]
    (workflow,) = [r for r in pipeline if r.data.tags["spider.kind"] == "workflow"]
    return (
        jobs,
        workflow,
        client.search_runs([ids[f"{experiment}/Training"]]),
        client.search_logged_models([ids[f"{experiment}/Training"]]),
    )


def curve(client, run, key):
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]


def rows_of(results, run, key):
    rows = (results / "runs" / run / "only/metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["metrics"][key]) for row in map(json.loads, rows)]


def figures(results, run):
    """Return the figures of a run in the comparison."""
    evaluation = read_json(results / "runs" / run / "only/evaluation.json")
    receipt = read_json(results / "runs" / run / "only/train.json")
    return {name: evaluation[name] for name in ("bpb", "parameters")} | {
        name: receipt[name] for name in ("bytes", "seconds")
    }


def check_complete(client, results, experiment="lab"):
    """Check that the server has everything once, and return the trainings and the models."""
    jobs, workflow, trainings, models = tracked(client, experiment)
    names = [r.info.run_name for r in jobs]
    rules = sorted(name.split()[0] for name in names)
    assert sorted(name for name in names if name.split()[0] not in BY_DIGEST) == sorted(JOBS)
    assert [rule for rule in rules if rule in BY_DIGEST] == BY_DIGEST
    assert {r.info.status for r in (*jobs, workflow, *trainings)} == {"FINISHED"}
    assert {r.data.tags.get("mlflow.parentRunId") for r in jobs} == {workflow.info.run_id}
    assert sorted(r.info.run_name for r in trainings) == sorted(RUNS)
    assert len(models) == CHECKPOINTS * len(RUNS)
    for training in trainings:
        run = training.info.run_name
        for key in ("train/bpb", "system/rss_mb", "system/cpu_percent"):
            assert curve(client, training, key) == rows_of(results, run, key)
        evaluation = read_json(results / "runs" / run / "only/evaluation.json")
        assert {name: training.data.metrics[name] for name in COLUMNS} == figures(results, run)
        (model,) = [m for m in models if m.name == f"{run}-only"]
        scores = {m.key: m.value for m in model.metrics}
        assert scores["bpb"] == evaluation["bpb"] and scores["bpb_strict"] == evaluation["bpb_strict"]
        at_loops = curve(client, training, "val/bpb_at_loops/only")
        (figure,) = evaluation["results"]["loops"]["figures"]
        assert [bpb for _, bpb in at_loops] == figure["values"]
        used = {(i.dataset.name, i.dataset.digest) for i in training.inputs.dataset_inputs}
        assert used == {("text", read_json(results / "shards/text/metadata.json")["digest"])}
        assert training.data.tags["spider.spec.only"] and training.data.params["only.settings.lr"] == "0.001"
        files = {f.path for f in client.list_artifacts(training.info.run_id, "only")}
        assert {"only/evaluation.json", "only/sample.txt", "only/loss.svg"} <= files
        name = f"{experiment}.{run}"
        (version,) = client.search_model_versions(f"name = '{name}'")
        assert (version.source, version.tags["bpb"]) == (f"models:/{model.model_id}", str(evaluation["bpb"]))
        assert client.get_model_version_by_alias(name, "best").version == version.version
    return trainings, models


def test_a_whole_run_arrives_on_a_server_with_passwords_on_postgresql(small_run, client):
    trainings, _ = check_complete(client, small_run)
    query = "params.`model.recurrence.loops` = '1' and metrics.bpb < 9"
    found = client.search_runs([trainings[0].info.experiment_id], query)
    assert [r.info.run_name for r in found] == ["shallow"]


def test_a_model_is_loaded_from_the_server_and_predicts(small_run, client, server):
    import mlflow

    mlflow.set_tracking_uri(server)
    model = mlflow.pyfunc.load_model("models:/lab.deep@best")
    (row,) = model.predict(["Document 7 says: "], params={"max_bytes": 20}).to_dict("records")
    assert row["text"] and row["bytes"] == 17 and 0 < row["bits_per_byte"] < 9


@pytest.mark.long
def test_a_run_arrives_in_postgresql_without_a_server(small_run, client, database):
    environment = clean_environment(MLFLOW_TRACKING_URI=f"{database}/mlflow")
    done = spider(small_run, "track", "sync", environment=environment)
    assert (done.returncode, done.stdout) == (0, "sent nothing\n"), "the database has all that the server got"
    (more := small_run / "runs/deep/only/more.txt").write_text("a file that it lacks")
    done = spider(small_run, "track", "sync", environment=environment)
    more.unlink()
    assert done.returncode == 1 and "send to the server's address instead of its database" in done.stdout
    config = configured(small_run, "direct")
    done = spider(small_run, "track", "sync", environment=environment, config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    check_complete(client, small_run, "direct")


def test_a_wrong_password_is_named_and_loses_nothing(small_run, as_ada, server):
    done = spider(small_run, "track", "sync", environment=as_ada | {"MLFLOW_TRACKING_PASSWORD": "wrong-one"})
    assert done.returncode == 1
    assert f"{server}: the server refuses this user name or password (401)" in done.stdout
    assert "sent nothing" in done.stdout and "Traceback" not in done.stderr
    done = spider(small_run, "track", "sync", environment=as_ada)
    assert (done.returncode, done.stdout) == (0, "sent nothing\n"), "all that is there has arrived"


@pytest.mark.long
def test_a_user_without_permission_gets_an_error_and_can_log_to_experiments_of_his_own(
    small_run, as_ada, client, server
):
    from mlflow.server.auth.client import AuthServiceClient

    AuthServiceClient(server).create_user("bob", "sesame-of-bob-4711")
    as_bob = as_ada | {"MLFLOW_TRACKING_USERNAME": "bob", "MLFLOW_TRACKING_PASSWORD": "sesame-of-bob-4711"}
    done = spider(small_run, "track", "sync", environment=as_bob)
    assert done.returncode == 1 and "this user may not write there (403)" in done.stdout
    config = configured(small_run, "of-bob")
    done = spider(small_run, "track", "sync", environment=as_bob, config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    check_complete(client, small_run, "of-bob")


def test_no_secret_is_in_any_file_of_the_run(small_run, client, server):
    files = [path for path in small_run.parent.rglob("*") if path.is_file()]
    assert {"sync.log", "config.yaml", "printed.log"} <= {path.name for path in files}
    secrets = [text.encode() for text in SECRETS.values()]
    assert [path for path in files for text in secrets if text in path.read_bytes()] == []
    jobs, workflow, *_ = tracked(client)
    shown = [str(run.to_dictionary()) for run in (*jobs, workflow)]
    assert not any(secret in text for text in shown for secret in SECRETS.values())


def test_a_slow_connection_that_breaks_loses_nothing(small_run, as_ada, client, server):
    connection = SlowConnection(int(server.rsplit(":", 1)[1]))
    connection.delay = 0.5
    config = configured(small_run, "slow")
    command = [forkserver.spider(), "--config", config, "track", "sync", "--follow"]
    environment = as_ada | {"MLFLOW_TRACKING_URI": connection.uri}
    piped = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    follower = subprocess.Popen(command, cwd=small_run.parent, env=environment, **piped)
    deadline = time.monotonic() + 120
    while connection.requests < 8:
        assert follower.poll() is None and time.monotonic() < deadline, follower.communicate()
        time.sleep(0.1)
    connection.cut()
    _, warned = follower.communicate("x", timeout=120)
    assert follower.returncode == 1 and "`spider track sync` sends what is missing" in warned
    done = spider(small_run, "track", "sync", environment=as_ada, config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    check_complete(client, small_run, "slow")


# ------------------------------------------------------------------------------------------------ the pages


@pytest.fixture(scope="module")
def pages(small_run):
    """Start `spider track ui` on a new SQLite store of the run, which listens on loopback only."""
    port = free_port()
    command = [SPIDER, "--config", small_run / "config.yaml", "track", "ui", "--port", str(port)]
    log = small_run.parent / "ui.log"
    with open(log, "w") as output:
        how = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, cwd=small_run.parent, env=clean_environment(), **how)
    try:
        wait_for_http(f"http://127.0.0.1:{port}/health", process, log)
        family = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
        found = [one for pid in family for one in psutil.Process(pid).net_connections("inet")]
        assert {one.laddr for one in found if one.status == psutil.CONN_LISTEN} == {("127.0.0.1", port)}
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def test_the_printed_addresses_open_on_the_comparison(pages, browser, small_run):
    printed = (small_run.parent / "ui.log").read_text()
    charts, table, scored = re.findall(r": (http\S+over-bytes\S+)", printed)
    best_first = sorted(RUNS, key=lambda run: figures(small_run, run)["bpb"])
    page = browser.new_page(viewport={"width": 1500, "height": 950})
    page.set_default_timeout(90_000)

    page.goto(charts)
    cards = page.locator("[data-testid=experiment-view-compare-runs-card]")
    lines = cards.first.locator(".scatterlayer .trace path.js-line")
    lines.nth(1).wait_for(state="attached")
    drawn = {line.get_attribute("d") for line in lines.all()}
    assert len(drawn) == 2 and all(path.count("L") == CHECKPOINTS - 1 for path in drawn)
    titles = [card.inner_text().split("\n")[0] for card in cards.all()]
    assert titles[: len(COLUMNS) + 1] == [CURVE, *COLUMNS]
    for name, card in zip(COLUMNS, cards.all()[1:], strict=False):
        card.locator(".bartext").nth(1).wait_for()
        bars = card.locator(".bartext").all_text_contents()
        assert sorted(bars) == sorted(f"{figures(small_run, run)[name]:.2f}" for run in RUNS)
    assert runs_in_order(page) == best_first
    page.close()

    page = browser.new_page(viewport={"width": 1500, "height": 950})
    page.set_default_timeout(90_000)
    page.goto(table)
    heads = page.locator("[role=columnheader][col-id^='metrics.']")
    heads.nth(3).wait_for()
    assert runs_in_order(page) == best_first
    shown = sorted((head.bounding_box()["x"], head.inner_text().strip()) for head in heads.all())
    assert [name for _, name in shown] == [*COLUMNS]
    for name in COLUMNS:
        cells = page.locator(f"[role=gridcell][col-id='metrics.`{name}`']").all()
        values = sorted(float(cell.inner_text()) for cell in cells)
        assert values == pytest.approx(sorted(figures(small_run, run)[name] for run in RUNS), rel=1e-3)

    page.goto(scored)
    page.locator("[role=columnheader][col-id='metrics.`sample_bpb`']").wait_for()
    listed = spider(small_run, "checkpoint", "list", "results", "--json", environment=clean_environment())
    best_first = [f"{one['stage'].replace('/', '-')}-step-{one['step']}" for one in json.loads(listed.stdout)]
    assert runs_in_order(page) == best_first
    page.close()


def runs_in_order(page) -> list[str]:
    """Return the names of the runs on a page of MLflow, from the top."""
    links = page.locator("[role=row] a[href*='/runs/']").all()
    return [name for _, name in sorted((link.bounding_box()["y"], link.inner_text()) for link in links)]
