"""A finished stage, and the fixtures of small trainings and workflows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spider.common.results import StageFolder
from spider.training.stage import train
from tests.unit.small_training import *  # noqa: F403
from tests.workflow.conftest import prepared_folder, trained, trained_folder  # noqa: F401

SHORT = {"max_steps": 6, "val_every": 0}


@pytest.fixture(scope="session")
def finished(tmp_path_factory, make_spec, shards) -> Path:
    """Return the folder of a finished stage, to copy."""
    train(make_spec(**SHORT), folder := tmp_path_factory.mktemp("finished") / "a", shards)
    return folder


@pytest.fixture
def stage(finished, tmp_path) -> StageFolder:
    return StageFolder(shutil.copytree(finished, tmp_path / "a", symlinks=True))
