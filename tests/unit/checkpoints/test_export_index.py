"""A model that reads an n-gram index leaves with it: what was exported needs nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch
from click.testing import CliRunner

import spider
from spider import files
from spider.checkpoints import inventory
from spider.checkpoints.export import export
from spider.checkpoints.load import Checkpoint
from spider.cli import cli
from spider.errors import CheckpointError
from spider.evaluation.generate import generate
from spider.ngram import store
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG, make_spec, results, shards  # noqa: F401 (fixtures)

PROMPT = "the cat sat on a mat and then "


@pytest.fixture
def exported(results, tmp_path):  # noqa: F811
    """An exported folder, and nothing else of the results."""
    export(results.root / "runs/r/a", tmp_path / "out")
    return tmp_path / "out"


def content(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def written(model):
    return list(generate(model, PROMPT, max_bytes=20, temperature=0.0, seed=0))


def copied(exported, tmp_path):
    """The folder on another machine."""
    return shutil.copytree(exported, tmp_path / "elsewhere/out")


def test_an_export_writes_what_the_checkpoint_writes_from_its_folder_alone(results, exported, tmp_path):  # noqa: F811
    there = copied(exported, tmp_path)
    shutil.rmtree(exported)
    model, config = spider.load_model(there)
    before, _ = spider.load_model(results.root / "runs/r/a")
    assert config.ngram == CONFIG and model.lookup.index.folder == there / "ngram"
    assert written(model) == written(before) != []
    ids = BYTES.encode(PROMPT)[None]
    proposed = torch.from_numpy(model.lookup.after(ids[0], 0, ids.shape[1]))[None]
    tokens = torch.from_numpy(ids.astype("int64"))
    with torch.no_grad():
        logits = [one(tokens, candidates_BTW=proposed).logits for one in (model, before)]
    assert torch.equal(*logits)
    full = results.ngram("toy", CONFIG.counted)
    assert content(there / "ngram") == content(full)
    card = files.read_json(there / "config.json")
    assert card["full_index"] == files.read_json(full / "index.json")["digest"]


def test_on_one_disk_an_index_is_there_once(results, exported):  # noqa: F811
    full = results.ngram("toy", CONFIG.counted)
    assert (exported / "ngram/text.npy").samefile(full / "text.npy")


def test_without_links_it_is_copied(results, tmp_path, monkeypatch):  # noqa: F811
    def refused(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(store.os, "link", refused)
    export(results.root / "runs/r/a", tmp_path / "out")
    full = results.ngram("toy", CONFIG.counted)
    assert not (tmp_path / "out/ngram/text.npy").samefile(full / "text.npy")
    assert content(tmp_path / "out/ngram") == content(full)


def test_what_was_exported_is_exported_again_with_the_same_bytes(exported, tmp_path):
    export(exported, tmp_path / "second")
    whole = content(exported)
    assert content(tmp_path / "second") == whole
    export(exported, exported)
    assert content(exported) == whole and len(whole) == 6 + 2 * len(CONFIG.contexts) + 3
    assert not list(tmp_path.glob(".*"))


def test_an_export_with_an_index_may_be_replaced_but_not_what_someone_put_there(results, exported):  # noqa: F811
    stage = results.root / "runs/r/a"
    export(stage, exported)
    for strange in ("notes.txt", "ngram/notes.txt"):
        (exported / strange).write_text("mine")
        with pytest.raises(
            CheckpointError, match=f"holds {strange}, which no export wrote; name another folder"
        ):
            export(stage, exported)
        assert (exported / strange).read_text() == "mine"
        (exported / strange).unlink()
    shutil.rmtree(exported / "ngram")
    export(stage, exported)
    assert written(spider.load_model(exported)[0])


def test_an_export_whose_index_is_missing_says_so(exported, tmp_path):
    there = copied(exported, tmp_path)
    shutil.rmtree(there / "ngram")
    says = f"{there}: the model reads an index. It is missing, {there / 'ngram'}: copy the exported folder"
    for use in (spider.load_model, lambda path: export(path, tmp_path / "again")):
        with pytest.raises(CheckpointError) as error:
            use(there)
        assert str(error.value) == says + " whole, or export again"
    assert not (tmp_path / "again").exists()


def test_an_export_with_another_index_or_half_of_one_says_so(results, exported, tmp_path):  # noqa: F811
    there = copied(exported, tmp_path)
    (there / "ngram/5.rows.npy").unlink()
    with pytest.raises(CheckpointError, match=r"the model reads an index\. .*ngram/5\.rows\.npy: missing"):
        spider.load_model(there)
    shutil.rmtree(there / "ngram")
    shutil.copytree(results.ngram("toy", CONFIG.counted, "split"), there / "ngram")
    with pytest.raises(
        CheckpointError, match=r"another n-gram index .* copy the exported folder whole, or export again"
    ):
        spider.load_model(there)
    (problem,) = inventory.examine(there)["problems"]
    assert "another n-gram index than" in problem


def test_a_flipped_byte_of_the_index_keeps_it_from_being_exported_and_is_found_by_verify(exported, tmp_path):
    there = copied(exported, tmp_path)
    with (there / "ngram/text.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"\x01")
    with pytest.raises(
        CheckpointError, match=r"the n-gram index that the model reads is damaged: .*text\.npy: SHA-256"
    ):
        export(there, tmp_path / "again")
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*"))
    said = CliRunner().invoke(cli, ["checkpoint", "verify", str(there)])
    assert said.exit_code == 1 and "text.npy: SHA-256 differs" in said.output
    assert CliRunner().invoke(cli, ["checkpoint", "verify", str(exported)]).exit_code == 0
    assert Checkpoint.at(there).exported
