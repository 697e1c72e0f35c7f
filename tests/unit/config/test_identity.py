"""A new key at its default changes no digest, and a changed default is noticed."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from spider import config
from spider.config import FORMAT, Block, load_config
from spider.config.block import identity
from spider.config.data import kinds, source_class
from spider.config.imports import measurement
from spider.evaluation.noise import recipe

ROOT = Path(__file__).parents[3]
PINNED = Path(__file__).with_name("pinned.json")
PIN = "pin again with python tests/unit/config/test_identity.py"


def digests() -> dict[str, Any]:
    """Return the identity and the shape of each stage of the presets, and the digest of each dataset."""
    known: dict[str, Any] = {}
    for path in ("config.yaml", "presets/ngram-cpu.yaml", "presets/smoke.yaml", "presets/spider-1b.yaml"):
        found = load_config(ROOT / path)
        for name, dataset in found.datasets.items():
            known[f"{path} {name}"] = identity(dataset.changed())
        for run in found.runs:
            for stage in found.runs[run].stages:
                spec = found.stage(run, stage.name)
                known[f"{path} {run}/{stage.name}"] = [spec.identity, spec.shape]
    return known


def defaults() -> dict[str, Any]:
    """Return all defaults of the schema, by block and key."""
    blocks: dict[str, Any] = {}

    def walk(block: type[Block]) -> None:
        for one in block.__subclasses__():
            if one.__module__.startswith("spider."):
                blocks[f"{one.__module__}.{one.__name__}"] = {
                    name: json.loads(json.dumps(field.default, default=lambda v: v.model_dump(mode="json")))
                    for name, field in one.model_fields.items()
                    if not field.is_required() and field.default_factory is None
                }
            walk(one)

    config.family_config("spider")
    measurement("spider.evaluation.golf_bytes")
    for kind in kinds():
        source_class(kind)
    walk(Block)
    return dict(sorted(blocks.items()))


def pinned() -> dict[str, Any]:
    return json.loads(PINNED.read_text())


def test_the_digests_of_the_presets_do_not_change():
    assert digests() == pinned()["digests"], (
        "a digest changed, so every finished stage of it would be trained again. Give a new key a default "
        f"that changes nothing; if the training has to change: {PIN}"
    )


def test_a_changed_default_raises_the_format():
    before, now = pinned()["defaults"], defaults()
    moved = {
        f"{block}.{key}": (value, now[block][key])
        for block, keys in before.items()
        for key, value in keys.items()
        if key in now.get(block, {}) and now[block][key] != value
    }
    assert not moved or pinned()["format"] != FORMAT, (
        f"defaults changed without a new FORMAT in spider/config/block.py: {moved}"
    )
    assert pinned()["format"] == FORMAT and now == before, PIN


def test_the_windows_of_a_step_decide_and_not_how_they_are_cut():
    """Earlier versions gave each cut a digest of its own. Their stages are known by all of these."""

    def spec(**settings: int) -> config.StageSpec:
        run = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 2, **settings}]}
        return load_config({"datasets": {"d": {"source": {"kind": "pydocs"}}}, "runs": {"r": run}}).stage(
            "r", "a"
        )

    whole, cut = spec(micro_batch=24), spec(micro_batch=6, grad_accum=4)
    assert whole.identity == cut.identity == identity(whole.recorded()) != spec(micro_batch=12).identity
    assert whole.shape != cut.shape and whole.recorded() != cut.recorded()
    assert whole.identities == cut.identities and len(set(cut.identities)) == 8
    assert cut.identities[0] == cut.identity and identity(cut.recorded()) in cut.identities
    assert recipe([cut.recorded()]) == recipe([whole.deciding()]) != recipe([spec().deciding()])
    assert spec(micro_batch=32, grad_accum=2).deciding() == spec().deciding() == spec().recorded()


CHANGED_BLOCKS = ["OptimizerConfig", "StageSettings", "Dataset", "PydocsSource", "EvaluationConfig"]


@pytest.mark.parametrize("name", CHANGED_BLOCKS)
def test_a_new_key_at_its_default_changes_no_digest(name):
    block = source_class("pydocs") if name == "PydocsSource" else getattr(config, name)
    grown = create_model(name, __base__=block, new_key=(int, 3))
    required = {"kind": "pydocs"} if name == "PydocsSource" else {}
    required |= {"source": {"kind": "pydocs"}} if name == "Dataset" else {}
    assert grown(**required).changed() == block(**required).changed()
    assert grown(**required, new_key=4).changed() != block(**required).changed()


def test_license_language_and_temp_are_in_no_digest():
    """They do not decide the text. A stream is tested too, because the stage contains its dataset."""
    source = {"kind": "stream", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}
    for_card = {"license": "mit", "language": "en"}
    plain = {"datasets": {"d": {"source": source}, "held": {"source": {"kind": "pydocs"}}}}
    stages = [{"name": "a", "max_steps": 2}]
    run = {"data": "d", "model": "tiny", "stages": stages, "evaluation": {"data": "held"}}
    plain["runs"] = {"r": run}
    changed = {**plain, "datasets": {name: one | for_card for name, one in plain["datasets"].items()}}
    changed["datasets"]["held"]["temp"] = True
    before = load_config(plain)
    after = load_config(changed)
    assert after.datasets["d"].license == "mit"
    assert before.stage("r", "a").identity == after.stage("r", "a").identity
    for name in ("d", "held"):
        assert before.datasets[name].changed() == after.datasets[name].changed()
        assert before.datasets[name].encoding() == after.datasets[name].encoding()


if __name__ == "__main__":
    PINNED.write_text(
        json.dumps({"format": FORMAT, "digests": digests(), "defaults": defaults()}, indent=1) + "\n"
    )
