"""`spider doctor` has a line for each thing that is wrong, and status 1 if a run would stop."""

import copy
import io
import json
import os
import socket
import subprocess
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from spider.config import load_config
from spider.workflow.doctor import obstacles
from tests.forkserver import spider
from tests.unit.data.hub_server import REPO, REVISION, closed_port, serving
from tests.workflow.conftest import SMALL

HUB = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": ["a.parquet"]}


class Doctor:
    """A folder with a configuration of a local text, where the command runs."""

    def __init__(self, folder):
        self.folder = folder
        self.config = copy.deepcopy(SMALL)
        self.source = self.config["datasets"]["text"]["source"]
        self.write("text.jsonl", [{"id": str(i), "text": f"Text {i}."} for i in range(9)])

    def write(self, name, rows):
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(self, *options, status=0, seconds=60, **environment):
        """Return the mark and the text of each subject."""
        (self.folder / "other.yaml").write_text(yaml.safe_dump(self.config))
        done = subprocess.run(
            [spider(), "doctor", "other.yaml", "--seconds", str(seconds), *options],
            cwd=self.folder,
            env={**os.environ, "HF_HOME": str(self.folder / "hf"), "HF_HUB_DISABLE_XET": "1", **environment},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (status, ""), done
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        return {rest.partition(": ")[0]: (mark, rest.partition(": ")[2]) for mark, rest in lines}


@pytest.fixture
def doctor(tmp_path):
    return Doctor(tmp_path)


def test_all_is_well_and_nothing_is_written(doctor):
    found = doctor()
    assert {mark for mark, _ in found.values()} == {"ok"}, found
    assert {*found} == {"versions", "GPU", "memory", "jobs at once", "data text", "tracking", "disk"}
    bounds = found["jobs at once"][1]
    assert bounds.startswith("0 GPUs and ") and "snakemake --resources gpu=0 mem_mb=" in bounds
    assert "torch 2." in found["versions"][1] and "snakemake 9." in found["versions"][1]
    assert "small needs about" in found["memory"][1] and "local files" in found["data text"][1]
    assert sorted(path.name for path in doctor.folder.iterdir()) == ["other.yaml", "text.jsonl"]


def test_a_missing_column_or_file_is_named_with_its_setting(doctor):
    doctor.write("text.jsonl", [{"id": "0", "body": "Text"}])
    mark, text = doctor(status=1)["data text"]
    assert mark == "problem" and "no 'text' (keys: 'id', 'body'); set text_column" in text
    pq.write_table(pa.table({"id": ["0"], "body": ["Text"]}), doctor.folder / "text.parquet")
    doctor.source["files"] = ["text.parquet"]
    mark, text = doctor(status=1)["data text"]
    assert (
        mark == "problem" and "text.parquet: no column 'text' (there are: id, body); set text_column" in text
    )
    doctor.source["files"] = ["nowhere.jsonl"]
    mark, text = doctor(status=1)["data text"]
    assert mark == "problem" and "nowhere.jsonl: no such file; correct its path" in text


def test_a_store_that_is_away_is_a_warning_because_no_run_stops(doctor):
    doctor.config["tracking"] = {"uri": f"http://127.0.0.1:{closed_port()}"}
    mark, text = doctor()["tracking"]
    assert mark == "warning" and "no answer" in text and "is the server running" in text
    doctor.config["tracking"] = {"enabled": False}
    assert doctor()["tracking"] == ("ok", "off")
    (doctor.folder / "results").mkdir()
    (doctor.folder / "results/mlflow.db").write_text("no database")
    del doctor.config["tracking"]
    mark, text = doctor()["tracking"]
    assert mark == "warning" and "damaged or not a SQLite database" in text


def parquet(column="text", rows=100):
    sink = io.BytesIO()
    pq.write_table(pa.table({column: [os.urandom(500).hex() for _ in range(rows)]}), sink)
    return sink.getvalue()


def test_a_hub_is_looked_at_for_files_columns_and_sizes(doctor):
    doctor.config["datasets"]["text"]["source"] = dict(HUB)
    mark, text = doctor(status=1, HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")["data text"]
    assert mark == "problem" and "cannot reach" in text and "check the network" in text
    with serving({"a.parquet": parquet(rows=1000), "b.parquet": parquet("body"), "c.parquet": b"?"}) as hub:

        def found(file, status=1, **environment):
            doctor.config["datasets"]["text"]["source"]["files"] = [file]
            return doctor(status=status, HF_ENDPOINT=hub.endpoint, **environment)["data text"]

        mark, text = found("a.parquet", status=0)
        assert (
            mark == "ok"
            and text.endswith(" in 1 parts")
            and hub.served < 1 << 17 < len(hub.files["a.parquet"])
        )
        doctor.config["datasets"]["text"]["source"]["take"] = "100 kB"
        assert "100 kB in 1 parts" in found("a.parquet", status=0)[1]
        del doctor.config["datasets"]["text"]["source"]["take"]
        assert "b.parquet of acme/texts@1111" in (text := found("b.parquet")[1])
        assert "no column 'text' (there are: body); set text_column" in text
        assert "the footer does not decode" in found("c.parquet")[1]
        assert "did you mean" in found("aa.parquet")[1]
        assert "the file is not in the cache" in found("a.parquet", HF_HUB_OFFLINE="1")[1]

        doctor.config["downloads"] = {"data": f"hf://datasets/{REPO}@{REVISION}"}
        task = doctor.config["runs"]["small"]["evaluation"]["tasks"] = {"t": {"file": "data/c.parquet"}}
        doctor.config["datasets"]["text"]["source"]["files"] = ["a.parquet"]
        assert doctor(HF_ENDPOINT=hub.endpoint)["downloads"] == ("ok", "1 B in 1 files")
        task["t"]["file"] = "data/d.parquet"
        mark, text = doctor(status=1, HF_ENDPOINT=hub.endpoint)["downloads"]
        assert mark == "problem" and "no such file in the repository" in text


@contextmanager
def silent_server():
    """Accept connections and never answer, as a host behind a broken firewall."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_hosts_that_never_answer_cost_seconds_and_are_warnings(doctor):
    doctor.config["datasets"]["text"]["source"] = HUB
    with silent_server() as address:
        doctor.config["tracking"] = {"uri": address}
        found = doctor(seconds=2, HF_ENDPOINT=address)
    assert found["data text"][0] == found["tracking"][0] == "warning"
    assert all("no answer within 2 s (--seconds)" in found[one][1] for one in ("data text", "tracking"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_for_gpus_on_a_machine_without_one_is_a_problem(doctor):
    doctor.config["runs"]["small"]["resources"] = {"gpus": 2}
    mark, text = doctor(status=1)["GPU"]
    assert mark == "problem" and "resources.gpus: the run asks for 2" in text and "To do: " in text


def test_a_training_that_cannot_fit_is_a_problem(doctor):
    doctor.config["runs"]["small"]["defaults"] |= {"seq_len": 1_000_000, "micro_batch": 1000}
    found = doctor(status=1)
    assert found["memory"][0] == "problem" and "lower seq_len (1000000)" in found["memory"][1]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: mounting a file system needs root")
def test_a_disk_that_is_too_small_is_a_problem_and_stops_a_workflow(doctor, monkeypatch):
    doctor.write("text.jsonl", [{"id": str(i), "text": "a" * 1000} for i in range(8000)])
    results = doctor.folder / "results"
    results.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(results)])
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        mark, text = doctor(status=1)["disk"]
        assert mark == "problem" and "1.05 MB free in" in text and "free some, or name a folder" in text
        monkeypatch.chdir(doctor.folder)
        config = load_config(doctor.config)
        (line,) = obstacles(config, results, {"text": ["text.jsonl"]})
        assert line.startswith("results: 1.05 MB free in")
        assert obstacles(config, results, {}) == []
    finally:
        subprocess.run(["umount", "--lazy", str(results)])


def test_a_profile_without_its_cluster_is_a_problem(doctor):
    profile = doctor.folder / "profile"
    profile.mkdir()
    (profile / "config.yaml").write_text("executor: slurm\nslurm-partition-config: partitions.yaml\n")
    found = doctor("--workflow-profile", "profile", status=1, PATH=str(doctor.folder))
    assert "start Snakemake on a login node of the cluster" in found["partitions"][1]
    assert "GPU" not in found and "memory" not in found  # Jobs run on other machines.
    (profile / "config.yaml").write_text("executor: nowhere\n")
    found = doctor("--workflow-profile", "profile", status=1)
    assert "executor nowhere is not installed: pip install" in found["partitions"][1]
