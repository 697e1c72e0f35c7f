"""Name the texts that stages are scored on, and what is computed of them without a model.

A name is a digest of all that decides the text: the datasets without their encoding, and the settings. So
stages on one text share the jobs that read it, also if their models read other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spider.common.files import digest
from spider.config.block import ConfigError
from spider.config.schema import Config
from spider.config.spec import StageSpec

#: Version of the settings of compressors, which are no keys. A new one runs them again, and scores nothing.
COMPRESSORS = 4


def learned_splits(config: Config, spec: StageSpec) -> list[tuple[str, str]]:
    """Return the splits that a run may learn from by the end of a stage: pairs of a dataset and a split.

    The counted text of an n-gram index comes first. A stream is not stored, so nothing is known with one.
    """
    run, names = config.run(spec.run), config.learned(spec.run, spec.stage)
    if any(config.dataset(name).source.STREAMED for name in names):
        return []
    found = [(run.dataset, "ngram")] if run.model.ngram else []
    for name in names:
        found += [(name, split) for split in ("ngram", "train") if split in config.dataset(name).splits]
    return list(dict.fromkeys(found))


def overlap_name(config: Config, spec: StageSpec) -> str:
    """Return the name of the overlap of a stage's held-out text with all text that it may learn from."""
    return digest(_text(config, spec))


def baselines_name(config: Config, spec: StageSpec) -> str:
    """Return the name of the rates of compressors on a stage's held-out text."""
    settings = spec.evaluation.changed(include={"training_bytes", "zpaq"})
    return digest([_text(config, spec), settings, COMPRESSORS])


def stage_with(config: Config, name: str, name_of: Callable[[Config, StageSpec], str]) -> StageSpec:
    """Return the first stage whose overlap or baselines have this name.

    Raises:
        ConfigError: there is none.
    """
    specs = (config.stage(run, stage.name) for run, block in config.runs.items() for stage in block.stages)
    for spec in specs:
        if name_of(config, spec) == name:
            return spec
    raise ConfigError(f"{name}: no stage of the configuration has a text of this name; name RUN/STAGE")


def _text(config: Config, spec: StageSpec) -> dict[str, Any]:
    def documents(name: str) -> list[Any]:
        return [config.raw(name), config.dataset(name).changed(exclude={"like", "tokenizer"})]

    return {
        "scored": documents(spec.evaluation.data or spec.data),
        "settings": spec.evaluation.changed(include={"max_bytes", "largest_group"}),
        "learned": [(*documents(name), split) for name, split in learned_splits(config, spec)]
        if spec.evaluation.training_bytes != 0
        else None,
    }
