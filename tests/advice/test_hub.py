"""Advice about a hub, on one of loopback with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import constants, hf_hub_download

from spider.cli import cli
from spider.config import load_config
from spider.data import hub as reading
from spider.data.hub import HubFile, Patience, download_file, survey
from spider.data.remote import resolve
from tests.unit.data.hub_server import REPO, REVISION, closed_port, serving
from tests.unit.small_datasets import dataset

from .followed import refused
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
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "data/hub.py": [
        (
            "nothing was kept, check the proxy or mirror (HF_ENDPOINT) and run again",
            {"corrupt": -1},
            {},
            {"corrupt": 0},
            {},
        ),
        ("accept the terms at {} and set HF_TOKEN to your token", {"gated": True}, {}, {"token": "mine"}, {}),
        (
            "check the name at {}, and set HF_TOKEN if it is private",
            {},
            {"repo": "acme/test"},
            {},
            {"repo": REPO},
        ),
        (
            "no such revision; take a commit from {}/commits/main",
            {},
            {"revision": "2" * 40},
            {},
            {"revision": REVISION},
        ),
        (
            "the hub still responds {}; run again later to resume",
            {"unavailable": -1},
            {},
            {"unavailable": 0},
            {},
        ),
        (
            "no space left in {} ({}); free some and run again to resume",
            {"declared_sizes": {FILE: 1 << 60}},
            {},
            {"declared_sizes": {}},
            {},
        ),
        (
            "cannot write {} ({}); check the folder and its permissions",
            {},
            {"output": "file/out"},
            {},
            {"output": "new/out"},
        ),
        (
            "run `spider data resolve CONFIG` if the new one is wanted",
            {},
            {"locked": "sha256:0"},
            {},
            {"locked": None},
        ),
    ],
}


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
    with refused(
        "data/hub.py", "is corrupt, expected {} but got {}; delete it and download it again with a network"
    ):
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
    with refused("data/hub.py", "is no parquet file; correct source.files"):
        survey(REPO, REVISION, ["sample/text.parquet"], "sample/text.parquet")
    survey(REPO, REVISION, [FILE], FILE)
    with refused("data/remote.py", "no file matches; correct source.files"):
        resolve(REPO, REVISION, ["texts/*"], dataset(), lambda name: False)
    resolve(REPO, REVISION, ["sample/0*"], dataset(), lambda name: False)


def test_a_lock_is_named_and_written_by_the_command(hub):
    source = {"kind": "hub", "repo": REPO, "revision": "main", "files": ["sample/0*"]}
    run = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 1}]}
    plain = {"datasets": {"d": {"source": source}}, "runs": {"r": run}}
    with refused("sources/hub.py", "is required for the glob {}; name a file, as in lock: texts.lock.json"):
        load_config(plain).parts("d")
    source["lock"] = "texts.lock.json"
    with refused("config/lock.py", "run `spider data resolve CONFIG`, which needs a network"):
        load_config(plain).parts("d")
    Path("config.yaml").write_text(yaml.safe_dump(plain))
    done = CliRunner().invoke(cli, ["data", "resolve", "config.yaml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert load_config(plain).parts("d") == {"000": FILE}
