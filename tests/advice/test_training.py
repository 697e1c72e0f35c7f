"""Advice about trainings, checkpoints and datasets: a training is refused, changed as advised, and runs."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spider import load_model
from spider.checkpoints.inventory import below
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.metrics import read_rows
from spider.checkpoints.records import steps
from spider.checkpoints.save import hold
from spider.config import TokenizerConfig, load_config
from spider.data.encode import encode_part
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards, build_metadata, load_metadata
from spider.data.tokenizer import learn
from spider.evaluation.generate import generate
from spider.tokens.stored import read_tokens
from spider.training.compilation import unpack
from spider.training.stage import Places, plan, train
from tests.unit.records import saved_again
from tests.unit.small_datasets import dataset, encoded
from tests.unit.small_training import MODEL

from .conftest import SHORT
from .followed import changed, refused


class Stop(Exception):
    pass


def stop_at(last: int) -> Any:
    def on_step(step: int) -> None:
        if step == last:
            raise Stop

    return on_step


def test_a_trainer_waits_for_another_and_writes_into_a_folder_that_it_can(tmp_path):
    (tmp_path / "file").touch()
    with ExitStack() as other:
        other.enter_context(hold(tmp_path / "a"))
        with refused("checkpoints/save.py", "{}; wait for it, or stop it, and run again"):
            other.enter_context(hold(tmp_path / "a"))
    with refused("checkpoints/save.py", "cannot be written: {}; free some space or name another folder"):
        ExitStack().enter_context(hold(tmp_path / "file/a"))
    with hold(tmp_path / "a"):
        pass


def test_an_unfinished_training_goes_on_with_its_settings_or_starts_in_another_folder(
    tmp_path, make_spec, shards
):
    folder = tmp_path / "a"
    with pytest.raises(Stop):
        train(make_spec(max_steps=8, val_every=0), folder, shards, on_step=stop_at(6))
    other = make_spec(max_steps=8, val_every=0, lr=1e-3)
    with refused("checkpoints/save.py", "move {} away to start again, or train in another folder"):
        train(other, folder, shards)
    assert train(other, tmp_path / "b", shards).steps == 8
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    assert train(make_spec(max_steps=8, val_every=0), folder, shards).steps == 8
    folder.rename(tmp_path / "aside")
    assert train(other, folder, shards).steps == 8


@pytest.mark.parametrize("damage", [None, "{", '{"format": 7}'])
def test_checkpoints_of_an_unknown_training_are_moved_away(stage, make_spec, shards, damage):
    stage.origin.unlink() if damage is None else stage.origin.write_text(damage)
    if damage is None:
        with refused("checkpoints/save.py", "so their training is unknown; move the folder away"):
            train(make_spec(**SHORT), stage.path, shards)
        stage.checkpoints.rename(stage.path.with_name("aside"))
    else:
        with refused("checkpoints/records.py", "move its folder away, or use the version that made it"):
            train(make_spec(**SHORT), stage.path, shards)
        stage.path.rename(stage.path.with_name("aside"))
    assert train(make_spec(**SHORT), stage.path, shards).steps == 6


def test_a_lost_or_damaged_checkpoint_is_trained_again(stage, make_spec, shards):
    (checkpoint,) = steps(stage.checkpoints)[-1:]
    aside = checkpoint.rename(stage.path / "aside")
    for one in steps(stage.checkpoints):
        shutil.rmtree(one)
    with refused("checkpoints/load.py", "and {} names it. Put it back, or delete {} and run {}"):
        Checkpoint.at(stage.path)
    aside.rename(checkpoint)
    Checkpoint.at(stage.path)
    for file in checkpoint.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with refused("common/record.py", "delete it and run {command}, which makes it again"):
        Checkpoint.at(stage.path)
    stage.receipt.unlink()
    weights = train(make_spec(**SHORT), stage.path, shards).weights
    assert Checkpoint.at(stage.path).weights == weights


def test_a_path_of_a_checkpoint_is_named(stage, tmp_path):
    with refused("checkpoints/load.py", "give a checkpoint, a stage folder, or its train.json"):
        Checkpoint.at(stage.origin)
    for path in (steps(stage.checkpoints)[-1], stage.path, stage.receipt):
        Checkpoint.at(path)
    with refused("checkpoints/inventory.py", "name a checkpoint, a stage, a run or a results folder"):
        below(tmp_path / "nothing")
    for path in (steps(stage.checkpoints)[-1], stage.path, tmp_path):
        assert below(path)


BASE: dict[str, Any] = {
    "datasets": {"toy": {"source": {"kind": "pydocs"}}},
    "tokenizers": {"t": {"data": "toy", "vocab_size": 300}},
    "runs": {
        "r": {
            "data": "toy",
            "model": MODEL,
            "precision": "fp32",
            "defaults": {"seq_len": 32, "micro_batch": 4, "max_steps": 6, "val_every": 0},
            "stages": [{"name": "a"}, {"name": "b"}],
        }
    },
}


def test_the_options_of_a_training_are_changed(stage, tmp_path, shards, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(BASE)

    def planned(stage: str = "a", config: Any = config, **places: Any) -> Any:
        return plan(config, config, "r", stage, Places(**places))

    with refused("training/stage.py", "give --mock-data or --data-dir, not both"):
        planned(mock_data=True, data_dir=shards)
    planned(data_dir=shards)
    with refused("training/stage.py", "train that first, or name a checkpoint to start from with --resume"):
        planned("b")
    planned("b", resume=stage.path)
    own = Path("results/runs/r/a")
    shutil.copytree(stage.path, own, symlinks=True)
    planned("b")
    with refused("training/stage.py", "{}. Leave --resume out to continue that"):
        planned(resume=own, ckpt_dir=own)
    planned(ckpt_dir=own)
    planned(resume=own, ckpt_dir=Path("other"))
    tokens = changed(BASE, {"datasets.toy.tokenizer": "t", "runs.r.model": "gpt-cpu"})
    with refused("training/stage.py", "but this run has a tokenizer; train it on its own data"):
        planned(config=load_config(tokens), mock_data=True)
    planned(config=load_config(tokens))


def test_a_parent_that_is_past_the_end_gives_its_weights_or_the_stage_gets_more_steps(
    stage, tmp_path, make_spec, shards
):
    with refused("training/state.py", "tokens), or take its weights only (--reset-steps)"):
        train(make_spec(max_steps=3, val_every=0), tmp_path / "b", shards, resume=stage.path)
    assert (
        train(make_spec(max_steps=7, val_every=0), tmp_path / "c", shards, resume=stage.path).global_step == 7
    )
    short = make_spec(max_steps=3, val_every=0)
    assert train(short, tmp_path / "d", shards, resume=stage.path, reset_steps=True).steps == 3


def test_a_parent_goes_on_with_its_own_tokenizer(tmp_path, talk, talk_spec):
    def encoded_with(folder: Path, tokenizer: Path) -> Path:
        settings = dataset(validation=0.1, format="chat")
        encode_part(talk.parent / "000.parquet", folder, "000", settings, read_tokens(tokenizer))
        build_metadata(folder, "talk", settings, source={}, parts=["000"], tokenizer=tokenizer)
        pack(folder, 32)
        return folder

    settings = talk_spec.settings.model_copy(update={"max_steps": 1, "ckpt_every": 1})
    first, spec = (
        talk_spec.model_copy(
            update={"settings": settings.model_copy(update={"max_steps": n}), "stage": stage}
        )
        for n, stage in ((1, "a"), (2, "b"))
    )
    train(first, tmp_path / "a", talk)
    config = TokenizerConfig(data="text", vocab_size=300)
    learn([talk.parent / "000.parquet"], other := tmp_path / "other.json", "t", config, dataset())
    with refused("training/state.py", "{}); train it on data that is encoded with its own tokenizer"):
        train(spec, tmp_path / "b", encoded_with(tmp_path / "other", other), resume=tmp_path / "a")
    own = steps(tmp_path / "a/checkpoints")[-1] / "tokenizer.json"
    assert train(spec, tmp_path / "b", encoded_with(tmp_path / "own", own), resume=tmp_path / "a").steps


def test_another_window_or_more_text_is_trained_on(tmp_path, make_spec):
    little = encoded(tmp_path / "little", ["one two"], validation=0)
    with refused("data/loader.py", "lower seq_len or encode more text"):
        train(make_spec(**SHORT), tmp_path / "a", little)
    train(make_spec(**SHORT, seq_len=8), tmp_path / "a", little)
    train(make_spec(**SHORT), tmp_path / "b", encoded(tmp_path / "more", ["one two"] * 9, validation=0))


def test_a_position_of_another_order_is_left_or_its_settings_restored(tmp_path, shards):
    from spider.data.loader import Loader

    view = Shards(shards, "train")
    order = {"rows": 2, "seq_len": 16}
    position = next(Loader(view, seed=0, **order)).position
    with refused("data/loader.py", "their orders differ, so start again or restore the old value"):
        Loader(view, seed=1, **order, position=position)
    next(Loader(view, seed=1, **order))
    next(Loader(view, seed=0, **order, position=position))


def test_diverged_weights_are_left_for_earlier_ones_or_trained_again(stage, make_spec, shards):
    earlier, last = steps(stage.checkpoints)

    def generated(path: Path) -> list[int]:
        return [*generate(load_model(path)[0], "the ", max_bytes=9, temperature=0, seed=0, context=32)]

    saved_again(last, lambda name: 1e30 if name.startswith("model.") else 1)
    with refused("evaluation/generate.py", "its weights have diverged; use an earlier checkpoint"):
        generated(last)
    saved_again(last, lambda name: float("inf") if name.startswith("model.") else 1)
    with refused("checkpoints/load.py", "use an earlier checkpoint, or train again with a lower lr"):
        generated(last)
    assert generated(earlier)
    train(make_spec(**SHORT, lr=1e-3), stage.path, shards)
    assert generated(stage.path)


def test_a_damaged_line_of_a_curve_is_restored_or_removed(tmp_path, make_spec, shards):
    folder, spec = tmp_path / "a", make_spec(**SHORT, log_every=1)
    with pytest.raises(Stop):
        train(spec, folder, shards, on_step=stop_at(5))
    copied = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    whole = (folder / "metrics.jsonl").read_text()
    for place in (folder, copied):
        (place / "metrics.jsonl").write_text(whole.replace('"step"', "step", 1))
        with refused("checkpoints/metrics.py", "or remove this line, which the curve then lacks"):
            train(spec, place, shards)
    (folder / "metrics.jsonl").write_text(whole)
    (copied / "metrics.jsonl").write_text(whole.split("\n", 1)[1])
    lengths = [len(read_rows(place / "metrics.jsonl")) for place in (folder, copied)]
    assert all(train(spec, place, shards).steps == 6 for place in (folder, copied))
    rows, lacking = (read_rows(place / "metrics.jsonl") for place in (folder, copied))
    assert lengths == [5, 4] and [row.step for row in rows[1:]] == [row.step for row in lacking]


def test_held_out_text_of_a_window_is_validated(tmp_path, make_spec):
    texts = ["one two three four"] * 30
    folder = encoded(tmp_path / "few", texts, validation=0.04)
    asked = {"max_steps": 5, "ckpt_every": 5, "val_every": 5, "seq_len": 64}
    with refused(
        "training/validation.py",
        "val_every: {}; or leave val_every out, or name other data",
        "ids, less than one window of {}; hold more out, or shorten the window",
    ):
        train(make_spec(**asked), tmp_path / "a", folder)
    train(make_spec(**asked | {"seq_len": 8}), tmp_path / "b", folder)
    train(make_spec(**{k: v for k, v in asked.items() if k != "val_every"}), tmp_path / "c", folder)
    train(make_spec(**asked), tmp_path / "d", encoded(tmp_path / "more", texts, validation=0.5))


def test_packed_rows_are_made_by_the_command(tmp_path, shards):
    folder = shutil.copytree(shards, tmp_path / "toy")
    with refused("data/packing.py", "run `spider data pack {} {}`"):
        PackedRows.open(folder, Shards(folder, "train"), 32)
    pack(folder, 32)
    PackedRows.open(folder, Shards(folder, "train"), 32)
    texts = ["one two three"] * 30
    held = encoded(tmp_path / "held", texts, validation=0.999)
    with refused("data/packing.py", "holds no text to pack; lower `validation` and encode again"):
        pack(held, 32)
    pack(encoded(tmp_path / "less", texts, validation=0.5), 32)


def test_a_damaged_archive_of_compiled_code_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (archive := tmp_path / "warmup.compile-cache").write_bytes(b"damaged")
    with refused("training/compilation.py", "{}: damaged ({}); delete it and warm up again"):
        unpack(archive)


def test_a_dataset_that_is_not_encoded_is_encoded(tmp_path):
    with refused("data/shards.py", "the dataset is not encoded; run `snakemake datasets/{}`"):
        load_metadata(tmp_path)
    folder = encoded(tmp_path / "toy", ["one"], validation=0)
    (folder / "train/000.json").rename(tmp_path / "aside")
    with refused("data/shards.py", "part {} of the {} split is missing; encode it first"):
        build_metadata(folder, "toy", dataset(validation=0), source={}, parts=["000"])
    (tmp_path / "aside").rename(folder / "train/000.json")
    again = dataset(validation=0, max_document_bytes=4)
    with refused("data/shards.py", "was encoded with {} = {}, not {}; encode it again"):
        build_metadata(folder, "toy", again, source={}, parts=["000"])
    encode_part(folder.parent / "raw.parquet", folder, "000", again)
    build_metadata(folder, "toy", again, source={}, parts=["000"])
