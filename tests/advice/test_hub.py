"""Advice about a hub, on one of loopback with faults."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import constants, hf_hub_download
from snakemake.iocontainers import Wildcards

from spider.cli import cli
from spider.config import load_config
from spider.data import hub as reading
from spider.data.hub import HubFile, Patience, download_file, matching
from spider.workflow.plan import Plan
from tests.unit.data.hub_server import REPO, REVISION, closed_port, serving
from tests.unit.small_datasets import dataset

from .followed import advised, refused
from .test_commands import refusal, spider
from .test_texts import parquet

FILE = "sample/000.parquet"
HASTE = Patience(2, 0.01)
OFFLINE = "HF_HUB_OFFLINE"
URL = "{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "HURRY", HASTE)
    with serving({FILE: parquet(), "sample/text.parquet": b"no table"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.endpoint}/{URL}")
        yield server


def fetch(name: str = FILE, *, repo: str = REPO, revision: str = REVISION, **options: Any) -> None:
    download_file(HubFile(repo, revision, name), Path(options.pop("output", "out")), HASTE, **options)


#: A phrase; the faults of the hub and what is asked of it; and what changes, as the message says.
# fmt: off
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "data/hub.py": [
        ("nothing was kept, check the proxy or mirror (HF_ENDPOINT) and run again", {"corrupt": -1}, {},
         {"corrupt": 0}, {}),
        ("accept the terms at {} and set HF_TOKEN to your token", {"gated": True}, {}, {"token": "mine"}, {}),
        ("check the name at {}, and set HF_TOKEN if it is private", {}, {"repo": "acme/test"}, {},
         {"repo": REPO}),
        ("no such revision; take a commit from {}/commits/main", {}, {"revision": "2" * 40}, {},
         {"revision": REVISION}),
        ("the hub still responds {}; run again later to resume", {"unavailable": -1}, {}, {"unavailable": 0},
         {}),
        ("no space left in {} ({}); free some and run again to resume", {"declared_sizes": {FILE: 1 << 60}},
         {}, {"declared_sizes": {}}, {}),
        ("cannot write {} ({}); check the folder and its permissions", {}, {"output": "file/out"}, {},
         {"output": "new/out"}),
        ("{}: is a folder; name the files in it", {}, {"name": "sample"}, {}, {"name": FILE}),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("phrase", "faults", "asked", "repaired", "instead"),
    [pytest.param(*row, id=row[0][:40]) for rows in ADVICE.values() for row in rows],
)
def test_a_file_is_downloaded_after_the_remedy(hub, monkeypatch, phrase, faults, asked, repaired, instead):
    Path("file").touch()
    for name, value in faults.items():
        setattr(hub, name, value)
    with refused("data/hub.py", phrase):
        fetch(**asked)
    for name, value in repaired.items():
        setattr(hub, name, value)
    monkeypatch.setenv("HF_TOKEN", "mine")
    fetch(**instead)


def test_a_file_that_a_configuration_names_is_downloaded_after_its_address_is_corrected(hub):
    run = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 1}]}
    run |= {"evaluation": {"tasks": {"t": {"file": "files/t.parquet"}}}}
    plain = {"datasets": {"d": {"source": {"kind": "mock"}}}, "runs": {"r": run}}
    with refused(
        "workflow/plan.py", "put it there, or name where it comes from (downloads)", error=SystemExit
    ):
        Plan(load_config(plain), Path("results"), here=True).task_files(
            Wildcards(fromdict={"run": "r", "stage": "a"})
        )

    def named(name: str) -> str:
        digest = hashlib.sha256(hub.files[FILE]).hexdigest()
        address = f"{hub.endpoint}/datasets/{REPO}/resolve/main/{name}#sha256={digest}"
        Path("config.yaml").write_text(yaml.safe_dump(plain | {"downloads": {"files/t.parquet": address}}))
        return "files/t.parquet"

    advised(
        refusal("data", "fetch", named("old.parquet")),
        "data/hub.py",
        "run again to resume; if it moved, correct its address in downloads, or put it in its place",
    )
    advised(
        refusal("data", "fetch", named("sample/text.parquet")),
        "data/hub.py",
        "; if its publisher replaced the file, correct its digest in downloads",
    )
    place = named(FILE)
    advised(
        refusal("data", "fetch", Path(place).name),
        "cli/data.py",
        "comes from none of downloads ({}); give a path of one of them",
    )
    spider("data", "fetch", place)
    assert Path(place).read_bytes() == hub.files[FILE]


def test_a_rejected_token_is_replaced(hub, monkeypatch):
    hub.token = "mine"
    monkeypatch.setenv("HF_TOKEN", "expired")
    with refused("data/hub.py", "the hub rejects the token (401); set HF_TOKEN to a valid one"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "mine")
    fetch()


def test_an_interrupted_command_is_repeated(hub):
    run = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 1}]}
    source = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": [FILE]}
    Path("config.yaml").write_text(
        yaml.safe_dump({"datasets": {"d": {"source": source}}, "runs": {"r": run}})
    )
    words = ["data", "download", "d", "000", "--output", "out.parquet"]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": "home", "SPIDER_TRACKING": "off"}

    command = [sys.executable, "-m", "spider.cli", *words]
    hub.seconds_per_request = 8.0
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not hub.content_requests and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    advised(said, "cli/__init__.py", "interrupted; run the same command again to continue")
    hub.seconds_per_request = 0.0
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0 and Path("out.parquet").read_bytes() == hub.files[FILE], done.output


def test_the_network_and_the_cache_are_mended(hub, monkeypatch):
    present = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with refused("data/hub.py", "check the network, the proxy and HF_ENDPOINT, then run again to resume"):
        fetch()
    monkeypatch.setattr(constants, "ENDPOINT", present)
    monkeypatch.setattr(constants, OFFLINE, True)
    with refused("data/hub.py", "unset it, or fill that cache with a network"):
        fetch()
    monkeypatch.setattr(constants, OFFLINE, False)
    copy = Path(hf_hub_download(REPO, FILE, repo_type="dataset", revision=REVISION)).resolve()
    copy.write_bytes(b"damaged")
    monkeypatch.setattr(constants, OFFLINE, True)
    with refused("data/hub.py", "expected {} but got {}; delete it and download it again with a network"):
        fetch()
    copy.unlink()
    monkeypatch.setattr(constants, OFFLINE, False)
    hf_hub_download(REPO, FILE, repo_type="dataset", revision=REVISION)
    monkeypatch.setattr(constants, OFFLINE, True)
    fetch()


def test_files_of_the_source_are_corrected(hub):
    file = HubFile(REPO, REVISION, FILE)
    with refused("data/hub.py", "(it was {}, it is {}); name a commit as revision and run again"):
        reading.read_range(file, 0, 9, "sha256:0")
    reading.read_range(file, 0, 9, reading.look_up(file, HASTE)[1])


def test_a_file_that_does_not_decode_is_requested_again_or_left_out(hub):
    def take(*files: str) -> None:
        source = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": files, "take": "100%"}
        texts = dataset(source=source)
        texts.source.fetch("000", Path("out"), texts)

    hub.corrupt = -1
    with refused("data/hub.py", "{}, twice; run again, and {}"):
        take(FILE)
    hub.corrupt = 0
    take(FILE)
    for _ in range(2):
        with refused("data/hub.py", "the file is damaged or not a parquet file: leave it out"):
            take(FILE, "sample/text.parquet")
    take(FILE)


def test_a_stream_is_read_after_the_remedy(hub, monkeypatch):
    damaged = parquet()[:200] + b"damaged" * 9 + parquet()[263:]
    empty = parquet(text=[""] * 2000, body=["one two three"] * 2000)
    hub.files |= {"sample/damaged.parquet": damaged, "sample/empty.parquet": empty}

    def begin(
        *files: str,
        revision: str = REVISION,
        rows: int = 2,
        position: Any = None,
        **settings: Any,
    ) -> Any:
        source = {"kind": "stream", "repo": REPO, "revision": revision, "files": files}
        texts = dataset(source=source, **settings)
        options = {"seq_len": 512, "rows": rows, "seed": 1, "patience": HASTE, "position": position}
        loader = texts.source.batches(texts, **options)
        try:
            return [next(loader) for _ in range(40)][-1].position
        finally:
            loader.close()

    monkeypatch.setattr(constants, OFFLINE, True)
    with refused("data/stream.py", "a stream needs the hub; unset HF_HUB_OFFLINE"):
        begin(FILE)
    monkeypatch.setattr(constants, OFFLINE, False)
    present = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with refused("data/hub.py", "check the network, the proxy and HF_ENDPOINT, then run again to resume"):
        begin(FILE)
    monkeypatch.setattr(constants, "ENDPOINT", present)
    begin(FILE)
    with refused("data/stream.py", "no text is left; lower validation, or set text_column"):
        begin(FILE, validation=0.9999999)
    begin(FILE, validation=0.1)
    with refused("data/stream.py", "no text is left; lower validation, or set text_column"):
        begin("sample/empty.parquet")
    begin("sample/empty.parquet", text_column="body")
    with refused("data/documents.py", "if it happens again, leave it out, or name another revision"):
        begin(FILE, "sample/damaged.parquet")
    many = {f"many/{i}.parquet": parquet() for i in range(16)}
    hub.files |= many
    place = begin(*many, rows=4)
    assert place["lanes"] > 1
    with refused(
        "data/stream.py", "windows of a step do not share evenly; start again, or restore the batch"
    ):
        begin(*many, rows=1, position=place)
    begin(*many, rows=1)
    begin(*many, rows=4, position=place)
    hub.files["sample/damaged.parquet"], hub.revision = parquet(), "2" * 40
    begin(FILE, "sample/damaged.parquet", revision="2" * 40)


def test_files_are_named_instead_of_a_glob(hub):
    source = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": ["sample/0*"]}
    with refused("data/sources/hub.py", "{} is a glob; write what `spider data files {} '{}'` prints"):
        dataset(source=source)
    printed = CliRunner().invoke(cli, ["data", "files", REPO, "sample/0*"]).stdout
    named = dataset(**yaml.safe_load(printed)).source
    assert (named.revision, named.items()) == (REVISION, sorted(n for n in hub.files if n[:8] == "sample/0"))
    with pytest.raises(ValueError, match=r"no file matches sample/9\*; see "):
        matching(REPO, REVISION, ["sample/9*"])
