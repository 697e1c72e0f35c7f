"""Advice about schedulers and folders that other workflows hold."""

from __future__ import annotations

import sys
from pathlib import Path

from spider.common.cluster import one_word
from tests.unit.test_unlock import entered, killed, locks, started  # noqa: F401 (a fixture)

from .followed import advised, refused


def test_an_environment_among_spaces_gets_a_link_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my environment"))
    python = f"{sys.prefix}/bin/python"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with refused("common/cluster.py", "move the project, or set XDG_CACHE_HOME to a folder without a space"):
        one_word(python)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("common/cluster.py", "name another folder in XDG_CACHE_HOME, or move the project"):
        one_word(python)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    link = Path(one_word(python)).parents[1]
    assert " " not in str(link) and link.readlink() == Path(sys.prefix)
    moved = str(tmp_path / "environment/bin/python")
    assert one_word(moved) == moved


def test_a_workflow_goes_on_when_the_other_one_is_stopped(tmp_path, started, caplog):  # noqa: F811
    other = started("0")
    entered(tmp_path)
    advised(caplog.text, "workflow/unlock.py", "wait for that process or stop it, and do not use --unlock")
    assert locks(tmp_path) == ["0.output.lock"]
    killed(other)
    entered(tmp_path)
    assert not locks(tmp_path)
