from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import spider.hf  # noqa: F401 (registers the classes)
from spider.model.interface import Model
from tests.unit.hf.small_exports import exported, models
from tests.unit.ngram.small_index import *  # noqa: F403 (fixtures)


@pytest.fixture(scope="session", autouse=True)
def quiet():
    transformers.logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Model, Path]]:
    root = tmp_path_factory.mktemp("exports")
    return {name: (model, exported(model, root / name)) for name, model in models().items()}
