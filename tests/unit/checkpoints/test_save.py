import os
import pickle
import shutil

import pytest
import torch

import spider
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import steps
from spider.checkpoints.save import clean, retain, save
from spider.common import files
from spider.common.errors import CheckpointError
from spider.model.interface import model_tensors, weights_digest
from spider.training.stage import train
from tests.unit.records import saved


def write(root, step, value=0.0):
    tensors = {"model.w": torch.full((3, 2), value), "optimizer.w.momentum": torch.zeros(3, 2)}
    return save(root, tensors, saved(step))


def test_a_saved_checkpoint_verifies_and_loads_without_change(tmp_path):
    given = {"model.w": torch.randn(5, 3), "model.n": torch.tensor(7), "optimizer.w.step": torch.tensor(2.0)}
    given |= {
        "model.t": torch.randn(3, 5).T,
        "model.e": torch.zeros(2, 0),
        "model.b": torch.ones(2).bfloat16(),
    }
    good, again = save(tmp_path, given, saved()), save(tmp_path / "again", given, saved())
    assert good.manifest.files == again.manifest.files and good.manifest.weights == again.manifest.weights
    loaded = {name: torch.zeros_like(t) for name, t in given.items()}
    Checkpoint.at(good.path).load_into(loaded)
    assert all(torch.equal(loaded[name], given[name]) for name in given)
    index = files.read_json(good.path / "model.safetensors.index.json")["weight_map"]
    assert index["model.w"] != index["optimizer.w.step"], "weights can be taken without the optimizer"
    replaced = save(tmp_path, given | {"model.w": torch.ones(5, 3)}, saved()).manifest
    assert replaced == Checkpoint.at(good.path).manifest and replaced.weights != good.manifest.weights


def test_retention_keeps_the_newest_and_other_files(tmp_path):
    for step in (7, 12, 32, 1037):
        write(tmp_path, step)
        (tmp_path / "notes").mkdir(exist_ok=True)
        retain(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000032", "step-00001037"]


def test_the_newest_checkpoint_has_the_highest_number(tmp_path):
    for step in (99_999_999, 100_000_000, 950):
        write(tmp_path, step)
    assert [int(p.name[5:]) for p in steps(tmp_path)] == [950, 99_999_999, 100_000_000]
    good, _ = Checkpoint.newest_good(tmp_path)
    assert good is not None and good.manifest.step == 100_000_000


def test_clean_removes_only_the_folders_of_a_killed_process(tmp_path):
    write(tmp_path, 5)
    for name in (".step-00000010.123.tmp", ".step-00000001.123.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", "step-00000005"]


def test_a_tensor_of_another_shape_or_name_is_refused_by_name(tmp_path):
    good = write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"model.w has shape \[3, 2\], and \[4\] in this model"):
        good.load_into({"model.w": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"another architecture: it has no model\.other"):
        good.load_into({"model.other": torch.zeros(4)})


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    """torch's reader runs the pickle ``.metadata`` of its format; Spider does not read it."""
    proof = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(proof),)

    good = write(tmp_path / "checkpoints", 1)
    (good.path / ".metadata").write_bytes(pickle.dumps(Payload()))
    Checkpoint.at(good.path).load_into({"model.w": torch.zeros(3, 2)})
    assert not proof.exists()
    with pytest.raises(FileExistsError):  # the payload does work
        proof.mkdir()
        pickle.loads((good.path / ".metadata").read_bytes())


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    write(tmp_path, 1)
    # A version that did not look for diverged weights could save them.
    tensors = {"model.w": torch.tensor([1.0, float("inf")]), "optimizer.w.momentum": torch.zeros(2)}
    bad = save(tmp_path, tensors, saved(2)).path
    message = (
        r"model-00001-of-00002\.safetensors: not finite: model\.w; the training diverged; use an earlier"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.at(bad).load_into({"model.w": torch.zeros(2)})
    good, passed_over = Checkpoint.newest_good(tmp_path)
    assert good is not None and good.manifest.step == 1 and passed_over == [bad]


def test_a_damaged_file_is_refused_when_it_is_opened(tmp_path):
    path = write(tmp_path, 1).path
    momentum = path / "model-00002-of-00002.safetensors"
    content = bytearray(momentum.read_bytes())
    content[-1] ^= 1
    momentum.write_bytes(content)
    checkpoint = Checkpoint.at(path)
    checkpoint.load_into({"model.w": torch.zeros(3, 2)})
    with pytest.raises(CheckpointError, match=rf"{momentum.name}: SHA-256 differs from the manifest"):
        checkpoint.load_into({"model.w": torch.zeros(3, 2), "optimizer.w.momentum": torch.zeros(3, 2)})
    with pytest.raises(CheckpointError, match=momentum.name):
        Checkpoint.at(path, whole=True)


@pytest.fixture(scope="module")
def stage(tmp_path_factory, make_spec, shards):
    spec, folder = make_spec(max_steps=2), tmp_path_factory.mktemp("stages") / "a stage"
    torch.set_num_threads(1)
    return spec, folder, train(spec, folder, shards)


@pytest.mark.parametrize("given", ["checkpoints/step-00000002", "", "train.json"])
def test_load_model_takes_a_checkpoint_a_stage_or_a_receipt(stage, given):
    spec, folder, receipt = stage
    model, config = spider.load_model(str(folder / given))
    assert config == spec.model and not model.training
    assert weights_digest(model_tensors(model)) == receipt.weights


def test_load_model_names_a_missing_or_damaged_file(stage, tmp_path):
    _, given, receipt = stage
    folder = shutil.copytree(given, tmp_path / "a stage")
    with pytest.raises(ValueError, match="neither a checkpoint, nor a stage folder"):
        spider.load_model(tmp_path / "nothing")
    (tmp_path / "model.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ValueError, match=r"model.pt: not a training receipt; give a checkpoint"):
        spider.load_model(tmp_path / "model.pt")
    file = folder / receipt.checkpoint / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: [\d,]+ bytes instead of"):
        spider.load_model(folder / "train.json")
    with pytest.raises(ValueError, match="no usable checkpoint"):
        spider.load_model(folder)
