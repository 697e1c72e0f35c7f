"""Push with the real huggingface_hub to a local hub that refuses, stalls and drops connections."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants
from huggingface_hub.utils import _http

from spider.cli import cli
from spider.common import files
from spider.common.errors import CheckpointError
from spider.config.model import family_block
from spider.data.hub import Patience
from spider.model import build_model
from spider.publish import export as exporting
from spider.publish.push import push
from spider.report import card as report_card
from tests.unit.data.model_hub import TOKEN, Repository, serving_models
from tests.unit.hf.small_exports import exported

REPO = "acme/small"
SIZES = {"family": "gpt", "preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2}
ONCE = Patience(1, 0.0)


def export_of(tmp_path, seed, shard_bytes):
    """Return an exported folder of a model with random weights."""
    torch.manual_seed(seed)
    config = family_block(SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_SHARD_BYTES", shard_bytes)
        return exported(build_model(config), tmp_path / f"model{seed}", card=written_card(f"Model {seed}.\n"))


def written_card(text):
    """Return a model card that counts as written by Spider, not by a person."""
    return text + report_card._MARK.format(files.digest(text)) + "\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return an exported folder with several files of weights."""
    return export_of(tmp_path_factory.mktemp("made"), 0, 20_000)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Yield a local hub that accepts the token; retries do not wait."""
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving_models() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fails(folder, patience=ONCE, **options):
    """Return the message of a push that fails: one line that names the repository."""
    with pytest.raises(CheckpointError) as caught:
        push(folder, REPO, patience=patience, **options)
    message = str(caught.value)
    assert message.startswith(f"{REPO}: ") and "\n" not in message and TOKEN not in message
    return message


# --------------------------------------------------------------------------------------------- content


def test_a_push_sends_the_whole_folder_in_one_private_commit(hub, folder):
    (folder / ".hidden").write_text("mine")
    (folder / "LICENSE").write_text("yours")
    done = push(folder, REPO)
    repo = hub.repositories[REPO]
    assert repo.private and done.private and len(repo.branches["main"]) == 2
    assert repo.files() == {k: v for k, v in content(folder).items() if k != ".hidden"}
    assert done.url == f"{hub.endpoint}/{REPO}/commit/{repo.commit('main')}"
    assert hub.validated == [(folder / "README.md").read_text()], "the card is checked first"
    assert len(hub.uploaded) == len(list(folder.glob("*.safetensors"))) > 2
    push(folder, REPO)
    assert len(repo.branches["main"]) == 2, "a second push sends and commits nothing"


def test_a_push_deletes_the_weights_of_the_earlier_model(hub, folder, tmp_path):
    push(folder, REPO)
    hub.repositories[REPO].files()["notes.txt"] = b"theirs"
    other = export_of(tmp_path, 1, 10**9)
    push(other, REPO)
    files_now = hub.repositories[REPO].files()
    assert files_now == {**content(other), "notes.txt": b"theirs"}


# --------------------------------------------------------------------------------------- private and public


def test_the_flag_makes_only_new_repositories_public(hub, folder, caplog):
    assert not push(folder, "acme/open", public=True).private and not hub.repositories["acme/open"].private
    hub.repositories[REPO] = Repository(private=True)
    assert push(folder, REPO, public=True).private and hub.repositories[REPO].private
    assert f"{REPO}: is private and stays private" in caplog.text


# ----------------------------------------------------------------------------------------------- the card


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "status", "reason", "message"),
    [
        ("/repos/create", 403, "no rights", "may not write there (403: no rights); use a token that may"),
        ("/commit/", 503, "busy", "the hub answers 503: busy; run the same command again; uploaded data are"),
        ("/lfs/objects", 403, "no storage", "may not write there (403: no storage)"),
        ("PUT", 0, "", "cannot reach http://127.0.0.1:"),
    ],
)
def test_a_refused_push_is_continued_by_the_next_one(hub, folder, path, status, reason, message):
    """The folder stays unchanged, the repository lacks a partial commit, and uploaded files stay."""
    before, first = content(folder), sorted(folder.glob("*.safetensors"))[0]
    hub.fails = {f"/lfs/{files.sha256(first)}" if path == "PUT" else path: [(status, reason)] * 40}
    assert message in fails(folder)
    assert all(repo.files() == {} for repo in hub.repositories.values()) and content(folder) == before
    arrived = sum(hub.uploaded)
    hub.fails, hub.uploaded = {}, []
    push(folder, REPO)
    assert hub.repositories[REPO].files() == before
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert sum(hub.uploaded) == total - arrived, "uploaded data were sent again"
    assert arrived or path not in ("PUT", "/commit/")


def test_a_push_waits_for_a_busy_hub(hub, folder):
    hub.fails = {p: [(503, "busy"), (0, "")] for p in ("/repos/create", "/preupload/", "/commit/")}
    hub.cut_uploads = 2
    push(folder, REPO, patience=Patience(4, 0.0))
    assert hub.repositories[REPO].files() == content(folder) and not any(hub.fails.values())
    assert len(hub.repositories[REPO].branches["main"]) == 2


def test_a_commit_whose_response_is_lost_is_not_repeated(hub, folder):
    hub.lost_commits = 1
    done = push(folder, REPO, patience=Patience(3, 0.0))
    repo = hub.repositories[REPO]
    assert len(repo.branches["main"]) == 2 and done.url.endswith(repo.commit("main"))


@pytest.mark.parametrize("name", ["small", "a/b/c", "acme/a--b"])
def test_a_wrong_name_of_a_repository_is_refused_before_anything_is_sent(hub, folder, name):
    with pytest.raises(CheckpointError, match=r"give its owner and its name|not a valid name on the hub"):
        push(folder, name)
    assert not hub.asked


def test_a_damaged_export_is_not_pushed(hub, folder):
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=weights.name):
        push(folder, REPO)
    assert not hub.asked


# --------------------------------------------------------------------------------------------- command line


def test_a_killed_push_is_continued_by_the_next_one(hub, folder):
    """The first push runs in a process of its own, configured by environment variables."""
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    spider = [sys.executable, "-m", "spider.cli", "checkpoint", "push", str(folder), REPO]
    hub.fails["/commit/"] = [(503, "busy")] * 99
    process = subprocess.Popen(spider, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any("/commit/" in line for line in hub.asked):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    _, errors = process.communicate()
    sent = len(hub.uploaded)
    hub.fails = {}
    assert TOKEN not in errors and hub.repositories[REPO].files() == {}
    push(folder, REPO)
    assert len(hub.uploaded) == sent and hub.repositories[REPO].files() == content(folder)


def test_the_commands_of_a_push_print_no_secret(hub, folder):
    hub.fails["/repos/create"] = [(403, f"{TOKEN} may not")]
    refused = CliRunner().invoke(cli, ["checkpoint", "push", str(folder), REPO])
    assert isinstance(refused.exception, CheckpointError) and TOKEN not in str(refused.exception)
    done = CliRunner().invoke(cli, ["checkpoint", "push", str(folder), REPO])
    assert done.exit_code == 0 and TOKEN not in refused.output + done.output
    assert f"{hub.endpoint}/{REPO}/commit/" in done.output and ", private" in done.output
