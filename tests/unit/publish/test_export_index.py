"""An exported model that reads an n-gram index takes the index along and needs nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch
from click.testing import CliRunner

import spider
from spider.checkpoints import inventory
from spider.cli import cli
from spider.common import files
from spider.common.errors import CheckpointError
from spider.evaluation.generate import generate
from spider.publish.export import export
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG, make_spec, results, shards  # noqa: F401 (fixtures)

PROMPT = "the cat sat on a mat and then "


@pytest.fixture
def exported(results, tmp_path):  # noqa: F811
    """Return an exported folder outside of the results."""
    export(results.root / "runs/r/a", tmp_path / "out")
    return tmp_path / "out"


def content(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def written(model):
    return list(generate(model, PROMPT, max_bytes=20, temperature=0.0, seed=0))


def copied(exported, tmp_path):
    """Return a copy of the folder at another path."""
    return shutil.copytree(exported, tmp_path / "elsewhere/out")


def test_an_export_generates_like_its_checkpoint_without_the_results(results, exported, tmp_path):  # noqa: F811
    full = results.ngram("toy", CONFIG.counted)
    assert (exported / "ngram/text.npy").samefile(full / "text.npy"), "a link on the same disk"
    moved = copied(exported, tmp_path)
    shutil.rmtree(exported)
    model, config = spider.load_model(moved)
    before, _ = spider.load_model(results.root / "runs/r/a")
    assert config.ngram == CONFIG and model.lookup.index.folder == moved / "ngram"
    assert written(model) == written(before) != []
    ids = BYTES.encode(PROMPT)[None]
    proposed = torch.from_numpy(model.lookup.after(ids[0], 0, ids.shape[1]))[None]
    tokens = torch.from_numpy(ids.astype("int64"))
    with torch.no_grad():
        logits = [one(tokens, candidates_BTW=proposed).logits for one in (model, before)]
    assert torch.equal(*logits)
    assert content(moved / "ngram") == content(full)
    card = files.read_json(moved / "config.json")
    assert card["full_index"] == files.read_json(full / "index.json")["digest"]


def test_an_export_of_an_export_has_the_same_bytes(exported, tmp_path):
    export(exported, tmp_path / "second")
    whole = content(exported)
    assert content(tmp_path / "second") == whole
    export(exported, exported)
    assert content(exported) == whole and len(whole) == 6 + 2 * len(CONFIG.contexts) + 3
    assert not list(tmp_path.glob(".*"))


def test_an_export_replaces_an_export_with_an_index_but_no_foreign_file(results, exported):  # noqa: F811
    stage = results.root / "runs/r/a"
    export(stage, exported)
    (foreign := exported / "ngram/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds ngram/notes\.txt, which no export wrote; name another"):
        export(stage, exported)
    assert foreign.read_text() == "mine"
    foreign.unlink()
    shutil.rmtree(exported / "ngram")
    export(stage, exported)
    assert written(spider.load_model(exported)[0])


def test_a_missing_damaged_or_other_index_of_an_export_is_named(results, exported, tmp_path):  # noqa: F811
    moved = copied(exported, tmp_path)
    with (moved / "ngram/text.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match=r"index that the model reads is damaged: .*text\.npy: SHA-256"):
        export(moved, tmp_path / "again")
    result = CliRunner().invoke(cli, ["checkpoint", "verify", str(moved)])
    assert result.exit_code == 1 and "text.npy: SHA-256 differs" in result.output
    assert CliRunner().invoke(cli, ["checkpoint", "verify", str(exported)]).exit_code == 0

    (moved / "ngram/5.rows.npy").unlink()
    with pytest.raises(CheckpointError, match=r"the model reads an n-gram index\. .*5\.rows\.npy: missing"):
        spider.load_model(moved)
    shutil.rmtree(moved / "ngram")
    remedy = "copy the exported folder whole, or export again"
    for use in (spider.load_model, lambda path: export(path, tmp_path / "again")):
        with pytest.raises(CheckpointError, match=rf"no n-gram index lies there \(no index.json\); {remedy}"):
            use(moved)
    shutil.copytree(results.ngram("toy", CONFIG.counted, "split"), moved / "ngram")
    with pytest.raises(CheckpointError, match=rf"another n-gram index .* {remedy}"):
        spider.load_model(moved)
    (problem,) = inventory.examine(moved)["problems"]
    assert "another n-gram index than" in problem
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*"))
