"""The schema of ``config.yaml``: one pydantic model a block, and the only home of defaults.

    block      what a block is, what its digests are made of, and errors in words
    data       datasets          run    runs and stages       model    families of models
    spec       a stage, resolved: what a job reads
    settings   a setting by its path; grids, which make many runs of one block
    names      what is imported from here
    schema     all of it, from a file and settings given beside it to a checked `Config`

A configuration names datasets and runs. A run trains one model through a list of stages; settings shared by
its stages stand in ``defaults`` and any stage may override any of them. ``Config.stage`` resolves that into a
`StageSpec`. Nothing here imports torch: the Snakefile loads it at every parse. The package's own names
(`names`) are found when they are asked for: whoever reads a model needs a family's block, not the schema.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spider.config.names import *


def __getattr__(name: str) -> Any:
    return getattr(import_module("spider.config.names"), name)
