"""The schema of ``config.yaml``: one pydantic model for each block. Every default is defined here.

    block      base class of all blocks; digests and error messages
    data       datasets, their sources and cleaning
    model      families of models, and the n-gram index that any of them may read
    run        runs and stages, with `tasks`
    spec       the resolved specification of a stage, which a job reads
    settings   settings by their path, and grids that make several runs from one block
    checks     the data that runs may read
    schema     the whole `Config`, read from a file and validated
    reference  all keys, for editors and for people
    names      the names that ``from spider.config import ...`` finds

A configuration names datasets and runs. A run trains one model through a list of stages. Its ``defaults``
hold the settings that the stages share, and any stage may override any of them. `Config.stage` resolves both
into a `StageSpec`. This package imports no torch, because the Snakefile loads it at every parse. `names` is
imported on first use, so that reading a model imports only the schema of its family.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spider.config.names import *


def __getattr__(name: str) -> Any:
    return getattr(import_module("spider.config.names"), name)
