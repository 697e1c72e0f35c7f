"""Advice about exported folders and pushes, with a hub on loopback."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import spider
from spider.hf.modeling import SpiderForCausalLM
from spider.publish.export import export
from spider.publish.push import push
from tests.unit.data.hub_server import closed_port
from tests.unit.data.model_hub import TOKEN, Repository
from tests.unit.publish.test_push import ONCE, REPO, folder, hub, made  # noqa: F401 (fixtures)

from .followed import advised, refused

#: A phrase, the faults of the hub or what is pushed, and what changes, as the message says.
# fmt: off
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "publish/push.py": [
        ("give its owner and its name, such as acme/small", {}, {"repo": "small"}, {"repo": REPO}),
        ("is public, and a push publishes only with --public; add it, or name another repository", {},
         {"repo": "acme/open"}, {"repo": "acme/open", "public": True}, {"repo": REPO}),
        ("run the same command again; uploaded data are not sent again", {"/repos/create": 503}, {}, {}),
        ("the hub refuses your token ({}); make one at {}: `hf auth login`, or HF_TOKEN",
         {"/repos/create": 401}, {}, {}),
        ("you may not write there ({}); use a token that may, from {}", {"/repos/create": 403}, {}, {}),
        ("another process is changing it ({}); wait for that, then {}", {"/commit/": 409}, {}, {}),
        ("no such branch; leave --revision out, or name a branch that can be created",
         {"/branch/second": 200}, {"revision": "second"}, {}, {"revision": "third"}),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("phrase", "faults", "given", "remedies"),
    [pytest.param(*row[:3], row[3:], id=row[0][:40]) for row in ADVICE["publish/push.py"]],
)
def test_a_refused_push_is_given_again(hub, folder, phrase, faults, given, remedies):  # noqa: F811
    hub.repositories["acme/open"] = Repository(private=False)
    hub.fails = {path: [(status, "reason")] * 9 for path, status in faults.items()}
    with refused("publish/push.py", phrase):
        push(folder, **{"repo": REPO, "patience": ONCE} | given)
    hub.fails = {}
    for remedy in remedies:
        push(folder, **{"repo": REPO} | remedy)


def test_the_token_and_the_network_of_a_push_are_set(hub, folder, monkeypatch):  # noqa: F811
    monkeypatch.delenv("HF_TOKEN")
    with refused("publish/push.py", "run `hf auth login`, or set HF_TOKEN ({})"):
        push(folder, REPO, patience=ONCE)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    present = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with refused("publish/push.py", "check the network, the proxy and HF_ENDPOINT, then {}"):
        push(folder, REPO, patience=ONCE)
    monkeypatch.setattr(constants, "ENDPOINT", present)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("publish/push.py", "HF_HUB_OFFLINE is set; unset it to push"):
        push(folder, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    push(folder, REPO)


def test_a_repository_that_the_token_may_read_is_named(hub, folder):  # noqa: F811
    theirs = hub.repositories["acme/theirs"] = Repository(private=True, readable=False)
    with refused("publish/push.py", "or your token may not read it ({}); check the name, and {}"):
        push(folder, "acme/theirs", patience=ONCE)
    push(folder, REPO)
    theirs.readable = True
    push(folder, "acme/theirs")


def test_a_hub_without_xet_storage_gets_large_files_without_it(hub, folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with refused("publish/push.py", "set HF_HUB_DISABLE_XET=1 and push again"):
        push(folder, REPO, patience=ONCE)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    push(folder, REPO)


def test_refused_front_matter_is_corrected(hub, folder):  # noqa: F811
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text("---\nlicense: mine\n---\n" + card)
    with refused("publish/push.py", "the hub refuses the front matter of {} ({}); correct it"):
        push(folder, REPO)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n" + card)
    push(folder, REPO)


def test_an_edited_card_is_deleted_to_get_a_new_one(hub, folder, stage, tmp_path, caplog):  # noqa: F811
    push(folder, REPO)
    new = hub.repositories[REPO].files()["README.md"]
    hub.repositories[REPO].files()["README.md"] = b"# Mine\n"
    push(folder, REPO)
    advised(caplog.text, "publish/push.py", "was edited there and is kept; delete it there to get a new one")
    del hub.repositories[REPO].files()["README.md"]
    push(folder, REPO)
    assert hub.repositories[REPO].files()["README.md"] == new
    export(stage.path, tmp_path / "own")
    card = tmp_path / "own/README.md"
    new = card.read_bytes()
    card.write_text("# Mine\n")
    export(stage.path, tmp_path / "own")
    advised(caplog.text, "publish/export.py", "was edited and is kept as it is; delete it to get a new one")
    card.write_bytes(b"\xff")
    with refused("publish/export.py", "{}: is not UTF-8 ({}); save it as UTF-8, or delete it"):
        export(stage.path, tmp_path / "own")
    card.write_text("# Mine\n")
    export(stage.path, tmp_path / "own")
    card.unlink()
    export(stage.path, tmp_path / "own")
    assert card.read_bytes() == new


def test_an_export_goes_into_a_folder_of_its_own(stage, tmp_path):
    (tmp_path / "file").touch()
    with refused("publish/export.py", "is a file; name a folder that is new or empty"):
        export(stage.path, tmp_path / "file")
    (tmp_path / "mine").mkdir()
    export(stage.path, tmp_path / "mine")
    (tmp_path / "mine/notes").touch()
    with refused("publish/export.py", "holds {}, which no export wrote; name another folder"):
        export(stage.path, tmp_path / "mine")
    (tmp_path / "mine/config.json").unlink()
    with refused("publish/export.py", "is not empty and not an exported folder; name another"):
        export(stage.path, tmp_path / "mine")
    export(stage.path, tmp_path / "new")


def test_an_export_of_another_version_is_replaced_by_a_new_folder(stage, tmp_path):
    export(stage.path, tmp_path / "old")
    text = (tmp_path / "old/config.json").read_text()
    (tmp_path / "old/config.json").write_text(text.replace('"format": 2', '"format": 9'))
    with refused("checkpoints/records.py", "use the version that wrote it, or name another folder"):
        spider.load_model(tmp_path / "old")
    spider.load_model(stage.path)
    shutil.rmtree(tmp_path / "old")
    export(stage.path, tmp_path / "old")
    spider.load_model(tmp_path / "old")


def test_a_long_prompt_is_shortened_or_read_in_a_larger_context(stage, tmp_path):
    export(stage.path, tmp_path / "own")
    model = SpiderForCausalLM.from_pretrained(tmp_path / "own")
    ids = torch.full((1, 40), 97)
    with refused("hf/modeling.py", "truncation_side='left', truncation=True), or generate(..., context="):
        model.generate(ids, max_new_tokens=2)
    model.generate(ids[:, -20:], max_new_tokens=2)
    model.generate(ids, max_new_tokens=2, context=80)
