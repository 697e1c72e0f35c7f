"""A small dataset with an n-gram index split, both of its indexes, and a training that reads one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.common.results import Results, write_config
from spider.config import StageSpec, load_config
from spider.config.model import NgramConfig
from spider.data.encode import encode_part
from spider.data.ngram.lookup import NgramLookup
from spider.data.ngram.store import build, count_part, open_index
from spider.data.shards import build_metadata, load_metadata
from spider.tokens import BYTES
from spider.training.stage import train
from tests.unit.ngram.texts import documents
from tests.unit.small_datasets import dataset
from tests.unit.small_training import DEFAULTS, MODEL, one_thread  # noqa: F401 (a fixture)

PARTS = ["000", "001", "002"]
SETTINGS = {"contexts": [1, 2, 3, 5, 9, "words0", "words2"], "matches": ["column", 2, 3, "words1", 6, 11]}
SETTINGS |= {"counts": [1, 3], "hidden": 8, "state": 12}
CONFIG = NgramConfig.model_validate(SETTINGS)
SPLITS = {"split": ["ngram"], "full": ["ngram", "train"]}


def make_shards(root: Path, texts: dict[str, list[str]], share: float = 0.4, validation: float = 0.1) -> Path:
    """Encode and describe a dataset of parts; return the folder of its shards."""
    settings = dataset(validation=validation, ngram=share)
    for part, part_texts in texts.items():
        names = pa.array([f"{part}/{i}" for i in range(len(part_texts))], pa.string())
        table = pa.table({"text": pa.array(part_texts, pa.string()), "id": names})
        pq.write_table(table, root / f"{part}.parquet")
        encode_part(root / f"{part}.parquet", root / "shards", part, settings)
    source = {"kind": "local", "files": [f"{part}.parquet" for part in texts]}
    build_metadata(root / "shards", "toy", settings, source=source, parts=list(texts))
    return root / "shards"


def build_indexes(
    shards: Path, output: Path, config: NgramConfig = CONFIG, threads: int = 1
) -> dict[str, Path]:
    """Count a dataset's parts, and build the n-gram index for training and the full one."""
    described = load_metadata(shards)
    parts = [shard.part for shard in described.splits["train"].shards]
    for part in parts:
        count_part(shards, described, part, config, output / "counts" / part)
    for name, splits in SPLITS.items():
        build([output / "counts" / part for part in parts], described, splits, config, output / name, threads)
    return {name: output / name for name in SPLITS}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a hundred documents in three parts; the second part is nearly empty."""
    texts = {part: [t.decode() for t in documents(60, seed=i)] for i, part in enumerate(PARTS)}
    return make_shards(tmp_path_factory.mktemp("data"), texts | {"001": texts["001"][:8]})


@pytest.fixture(scope="session")
def indexes(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the n-gram index for training and of the full one."""
    return build_indexes(shards, tmp_path_factory.mktemp("ngram"))


@pytest.fixture(scope="session")
def lookup(indexes: dict[str, Path]) -> NgramLookup:
    return NgramLookup(open_index(indexes["split"]), CONFIG, BYTES)


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., StageSpec]:
    def make(**changes: Any) -> StageSpec:
        """Return a stage whose model reads an n-gram index; ``changes`` are settings of the stage."""
        run = {
            "data": "toy",
            "model": {**MODEL, "ngram": SETTINGS},
            "precision": "fp32",
            "defaults": {**DEFAULTS, **changes},
            "stages": [{"name": "a"}],
        }
        data = {"toy": {"source": {"kind": "pydocs"}, "ngram": 0.4}}
        return load_config({"datasets": data, "runs": {"r": run}}).stage("r", "a")

    return make


@pytest.fixture(scope="session")
def results(
    tmp_path_factory: pytest.TempPathFactory, shards: Path, make_spec: Callable[..., StageSpec]
) -> Results:
    """A results folder like the workflow's, with a trained stage and its indexes."""
    root = tmp_path_factory.mktemp("results") / "results"
    root.mkdir()
    write_config(root, {})
    folders = build_indexes(shards, root / "ngram/toy" / CONFIG.counted)
    train(
        make_spec(max_steps=2, val_every=1, val_bytes=10**6),
        root / "runs/r/a",
        shards,
        indexes=(folders["split"], folders["full"]),
    )
    return Results(root)
