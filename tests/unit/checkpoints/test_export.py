"""Weights that leave and come back: equal to the last bit, and no file can make the import run code."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import sys
import types
import zipfile

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import spider
from spider import files
from spider.checkpoints import export as exporting
from spider.checkpoints.export import export, import_file
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Exported
from spider.cli import cli
from spider.errors import CheckpointError
from spider.model import build_model
from spider.model.spider.config import SpiderConfig
from spider.model.weights import model_tensors, weights_digest
from spider.training.stage import train


@pytest.fixture(scope="module")
def stage(tmp_path_factory, shards, make_spec):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("r") / "a"
    train(make_spec(max_steps=2), folder, shards)
    return folder


@pytest.fixture(scope="module")
def config(stage) -> SpiderConfig:
    return spider.load_model(stage)[1]


def digest(path):
    return weights_digest(model_tensors(spider.load_model(path)[0]))


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("given", ["checkpoints/step-00000002", "", "train.json"])
def test_an_exported_model_loads_with_the_weights_it_had(stage, tmp_path, given):
    export(stage / given, tmp_path / "new/out")
    model, config = spider.load_model(tmp_path / "new/out")
    before, before_config = spider.load_model(stage)
    assert config == before_config and not model.training
    assert digest(tmp_path / "new/out") == files.read_json(stage / "train.json")["weights"]
    tokens_BT = torch.randint(0, 256, (2, 32))
    assert torch.equal(model(tokens_BT).logits, before(tokens_BT).logits)
    assert {f.name for f in (tmp_path / "new").iterdir()} == {"out"}


def test_exporting_what_was_exported_gives_the_same_bytes(stage, tmp_path):
    export(stage, tmp_path / "first")
    export(tmp_path / "first", tmp_path / "second")
    import_file(tmp_path / "first", tmp_path / "third")
    import_file(tmp_path / "first/model.safetensors", tmp_path / "fourth")
    assert content(tmp_path / "first").keys() == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "spider_hf.py",
        "tokenizer_config.json",
    }
    assert (
        content(tmp_path / "first")
        == content(tmp_path / "second")
        == content(tmp_path / "third")
        == content(tmp_path / "fourth")
    )


def test_an_export_of_before_transformers_could_read_it_is_read_and_becomes_one_of_now(stage, tmp_path):
    export(stage, tmp_path / "now")
    old = shutil.copytree(tmp_path / "now", tmp_path / "old")
    card = files.read_json(old / "config.json")
    for name in list(card["files"].keys() - {"model.safetensors"}):
        del card["files"][name]
        (old / name).unlink()
    known = {*Exported.model_fields}
    files.write_json(old / "config.json", {key: value for key, value in card.items() if key in known})
    assert digest(old) == digest(tmp_path / "now")
    export(old, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "now")
    export(tmp_path / "now", old)
    assert content(old) == content(tmp_path / "now")


def test_an_export_needs_no_spider_to_be_read_and_says_where_it_comes_from(stage, tmp_path, config):
    export(stage, tmp_path / "out")
    named = load_file(tmp_path / "out/model.safetensors")
    build_model(config).load_state_dict(named, strict=True)
    card, receipt = files.read_json(tmp_path / "out/config.json"), files.read_json(stage / "train.json")
    assert SpiderConfig.model_validate(card["model"]) == config
    for key in ("run", "stage", "global_step", "bytes", "best_loss", "data_digest", "identity", "weights"):
        assert card[key] == receipt[key], key
    assert "folded" not in card, "it reads no memory"
    assert (card["format"], card["spider"], card["window"]) == (2, spider.__version__, 32)
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # whoever may read the one may read the other


def test_settings_of_training_that_no_longer_exist_do_not_keep_a_model_in(stage, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(stage, old)
    path = next(old.glob("checkpoints/*/manifest.json"))
    manifest = files.read_json(path)
    manifest["spec"]["optimizer"]["forgotten"] = 1
    del manifest["digest"]
    manifest["digest"] = files.digest(manifest)
    files.write_json(path, manifest)
    export(old, tmp_path / "out")
    assert digest(tmp_path / "out") == digest(stage)


def test_large_models_are_cut_into_shards_and_are_the_same_model(stage, tmp_path, monkeypatch):
    export(stage, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_SHARD_BYTES", 20_000)
        export(stage, tmp_path / "cut")
    index = files.read_json(tmp_path / "cut/model.safetensors.index.json")
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 20_000
        assert {name for name, at in index["weight_map"].items() if at == shard.name} == held.keys()
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    export(tmp_path / "cut", tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_an_earlier_export_is_replaced_and_nothing_else_is(stage, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export(stage, out)
    export(stage, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out: holds notes.txt, which no export wrote"):
        export(stage, out)
    with pytest.raises(CheckpointError, match="is not empty and not an exported folder"):
        export(stage, stage)
    with pytest.raises(CheckpointError, match=r"notes.txt: is a file"):
        export(stage, out / "notes.txt")
    (out / "config.json").write_text('{"architectures": ["GPT2"]}')
    with pytest.raises(CheckpointError, match=r"format None.*name another folder"):
        export(stage, out)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_disk_that_refuses_leaves_the_earlier_export_as_it_was(stage, tmp_path):
    export(stage, tmp_path / "out")
    before = content(tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"out: cannot be written: .*it needs [\d,]+ bytes"
        ) as caught:
            export(stage, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Nothing was left there or changed" in str(caught.value)
    assert content(tmp_path / "out") == before
    assert {f.name for f in tmp_path.iterdir()} == {"out"}


def test_a_changed_export_is_not_loaded(stage, tmp_path):
    out = tmp_path / "out"
    export(stage, out)
    file = out / "model.safetensors"
    named = load_file(file)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model.safetensors: its contents do not match"):
        spider.load_model(out)
    named["other"] = named.pop("final_norm.weight")
    save_file(named, file)
    card = files.read_json(out / "config.json")
    card["files"][file.name] = {"size": file.stat().st_size, "sha256": files.sha256(file)}
    files.write_json(out / "config.json", card)
    with pytest.raises(CheckpointError, match=r"it has no final_norm.weight; this model has no other"):
        spider.load_model(out)
    card["model"]["hidden"] = "wide"
    files.write_json(out / "config.json", card)
    with pytest.raises(CheckpointError, match=r"another version of Spider \(model.hidden: "):
        spider.load_model(out)


# ------------------------------------------------------------------------------------------------- import


def layout(state, cfg, **changes):
    """What the first Spider saves."""
    return {
        "step": 2650,
        "epoch": 1,
        "model_state_dict": state,
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(2650.0), "exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "params": [0]}],
        },
        "cfg": cfg,
        "best_loss": 1.9,
        **changes,
    }


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.module."])
def test_one_of_our_models_in_a_pt_file_comes_in_whole(stage, tmp_path, config, wrapper):
    model, _ = spider.load_model(stage)
    state = {wrapper + name: tensor for name, tensor in model.state_dict().items()}
    torch.save(layout(state, config.model_dump(mode="json")), tmp_path / "spider-step2650.pt")
    made = import_file(tmp_path / "spider-step2650.pt", tmp_path / "out")
    assert digest(tmp_path / "out") == digest(stage)
    kept = {name: getattr(made.manifest, name) for name in ("run", "step", "epoch", "best_loss")}
    assert kept == {"run": "spider-step2650.pt", "step": 2650, "epoch": 1, "best_loss": 1.9}
    export(stage, tmp_path / "direct")
    assert content(tmp_path / "out")["model.safetensors"] == content(tmp_path / "direct")["model.safetensors"]


def test_tensors_that_share_their_memory_in_the_file_are_each_written(tmp_path, config):
    state = build_model(config).state_dict()
    one, other = [name for name, t in state.items() if name.endswith("norm.weight") and t.shape == (32,)][:2]
    state[one] = state[other] = torch.randn(32)
    torch.save(layout(state, config.model_dump()), tmp_path / "a.pt")
    import_file(tmp_path / "a.pt", tmp_path / "out")
    loaded = spider.load_model(tmp_path / "out")[0].state_dict()
    assert torch.equal(loaded[one], state[one]) and torch.equal(loaded[other], state[one])


def test_narrow_weights_are_widened_exactly_and_odd_numbers_are_left_out(tmp_path, config):
    narrow = build_model(config).bfloat16().state_dict()
    given = layout(narrow, config.model_dump(), best_loss=float("inf"), step=torch.tensor(7))
    torch.save(given, tmp_path / "a.pt")
    made = import_file(tmp_path / "a.pt", tmp_path / "out")
    assert (made.manifest.step, made.manifest.best_loss) == (7, None)
    loaded = spider.load_model(tmp_path / "out")[0].state_dict()
    for name, tensor in build_model(config).state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], narrow[name].to(tensor.dtype)), name


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A file as the first Spider would save it: another model, its configuration an object of a script's."""
    script = types.ModuleType("tk-spider")

    class SpiderConfig:
        def __setstate__(self, state):
            raise AssertionError("the file's class was used")

    SpiderConfig.__module__, SpiderConfig.__qualname__ = "tk-spider", "SpiderConfig"
    script.SpiderConfig = SpiderConfig
    cfg = SpiderConfig()
    vars(cfg).update(hidden_size=2048, vocab_size=272, dtype=torch.bfloat16, sizes=(1, 2), rope=float("nan"))
    embedding = torch.randn(272, 8)
    state = {
        "embed_tokens": torch.randn(272, 2048).bfloat16(),
        "final_norm.weight": torch.randn(8),
        "model.embed.weight": embedding,
        "lm_head.weight": embedding,
        "steps": torch.tensor(3),
    }
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tk-spider", script)
        torch.save(layout(state, cfg), tmp_path / "spider-step2650.pt")
    return tmp_path / "spider-step2650.pt"


def test_a_foreign_model_is_refused_with_what_has_no_place_and_what_is_missing(foreign, tmp_path):
    expected = {name.removeprefix("model.") for name in model_tensors(meta(SpiderConfig()))}
    with pytest.raises(CheckpointError, match=r"spider-step2650\.pt: not a model of family spider") as caught:
        import_file(foreign, tmp_path / "out")
    said = str(caught.value)
    # One of its five tensors is a Spider's by name and shape.
    assert "4 of its 5 tensors have no place in one (final_norm.weight [8]; " in said
    assert "lm_head.weight [272, 8]; and 1 more)" in said
    assert f"and {len(expected) - 1} are missing (" in said and f"; and {len(expected) - 4} more)" in said
    assert {f.name for f in tmp_path.iterdir()} == {foreign.name}


def meta(config):
    with torch.device("meta"):
        return build_model(config)


def test_a_tensor_of_another_kind_has_no_place(tmp_path, config):
    state = build_model(config).state_dict()
    state["final_norm.weight"] = torch.ones(32, dtype=torch.int64)
    state["embed_tokens"] = state["embed_tokens"][:-1]
    torch.save(layout(state, config.model_dump()), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"are missing \(embed_tokens; final_norm\.weight\)"):
        import_file(tmp_path / "a.pt", tmp_path / "out")


def test_what_an_earlier_version_imported_to_look_at_is_refused_as_a_model(stage, tmp_path):
    export(stage, tmp_path / "a")
    card = files.read_json(tmp_path / "a/config.json")
    files.write_json(tmp_path / "a/config.json", card | {"model": None, "cfg": {}, "tensors": {}})
    assert Checkpoint.at(tmp_path / "a").label
    for use in (spider.load_model, lambda path: export(path, tmp_path / "b")):
        with pytest.raises(CheckpointError, match="tensors of another program"):
            use(tmp_path / "a")


class Payload:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["cfg", "model_state_dict", "step"])
def test_a_file_that_carries_code_is_refused_and_does_not_run_it(tmp_path, where, protocol):
    proof, file = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save(layout({}, None) | {where: Payload(proof)}, file, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"evil.pt: refused") as caught:
        import_file(file, tmp_path / "out")
    if protocol == 2:
        assert "nothing of it was run" in str(caught.value) and "mkdir" in str(caught.value)
    assert {f.name for f in tmp_path.iterdir()} == {"evil.pt"}
    torch.load(file, weights_only=False)
    assert proof.exists()  # the payload does work


def test_a_plain_pickle_is_not_read_at_all(tmp_path):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(layout({}, Payload(tmp_path / "ran"))))
    with pytest.raises(CheckpointError, match=r"not a whole file written by torch.save.*plain pickles"):
        import_file(tmp_path / "evil.pt", tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def compressed(path):
    """A small archive that unpacks to much more."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 50_000_000)


def inflated(path):
    """One stored number that claims to be four terabytes."""
    torch.save(layout({"w": torch.zeros(1).expand(10**12)}, None), path)


def quantized(path):
    torch.save(layout({"w": torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)}, None), path)


def repeated(path):
    w = torch.zeros(100_000)
    torch.save(layout({f"w{i}": w for i in range(1000)}, None), path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b""), "not a whole file"),
        (lambda path: path.write_bytes(random.Random(0).randbytes(5000)), "not a whole file"),
        (lambda path: path.mkdir(), "neither a checkpoint, nor a stage folder"),
        (compressed, "a compressed archive"),
        (inflated, "w in its model_state_dict is not a plain tensor"),
        (repeated, "claims 400,000,000 bytes of tensors"),
        (lambda path: torch.save(layout({}, None), path), "claims 0 bytes"),
        (lambda path: torch.save(layout({"w": 3}, None), path), "w in its model_state_dict is not a plain"),
        (
            lambda path: torch.save(layout({"w": torch.zeros(3).to_sparse()}, None), path),
            "not a plain tensor",
        ),
        (lambda path: torch.save(layout({"w": torch.empty(3, device="meta")}, None), path), "not a plain"),
        (
            lambda path: torch.save({"w": torch.zeros(3)}, path),
            "model_state_dict is needed, it holds the keys w",
        ),
        pytest.param(
            quantized,
            "w in its model_state_dict is not a plain tensor",
            marks=pytest.mark.filterwarnings("ignore:torch.quantize"),
        ),
        (lambda path: torch.save([1], path), "model_state_dict is needed, it holds list"),
        (lambda path: torch.save(layout([1], None), path), "model_state_dict is needed"),
    ],
)
def test_a_file_it_cannot_use_is_one_clear_message(tmp_path, make, message):
    make(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        import_file(tmp_path / "a.pt", tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: ") and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_safetensors_alone_say_too_little(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="must lie in an exported folder"):
        import_file(tmp_path / "w.safetensors", tmp_path / "out")


def test_wherever_a_file_is_cut_or_changed_it_is_refused(tmp_path, config):
    whole = tmp_path / "whole.pt"
    torch.save(layout(build_model(config).state_dict(), config.model_dump()), whole)
    good, draw = whole.read_bytes(), random.Random(1)
    for _ in range(60):
        at = draw.randrange(len(good))
        (tmp_path / "a.pt").write_bytes(good[:at])
        with pytest.raises(CheckpointError):
            import_file(tmp_path / "a.pt", tmp_path / "out")
    expected = digest(import_file(whole, tmp_path / "good").path)
    for _ in range(60):
        at = draw.randrange(len(good))
        (tmp_path / "a.pt").write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        try:
            import_file(tmp_path / "a.pt", tmp_path / "out")
        except CheckpointError:
            continue
        assert digest(tmp_path / "out") == expected  # a bit of padding


# ------------------------------------------------------------------------------------------- command line


def say(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


def test_an_exported_and_an_imported_model_generate_and_show_patches_like_the_checkpoint(
    stage, tmp_path, config
):
    assert say("checkpoint", "export", stage, tmp_path / "out").exit_code == 0
    torch.save(layout(spider.load_model(stage)[0].state_dict(), config.model_dump()), tmp_path / "a.pt")
    assert say("checkpoint", "import", tmp_path / "a.pt", tmp_path / "in").exit_code == 0
    (tmp_path / "text").write_text("the quick brown fox")
    for verb in (["generate", "--bytes", 40, "--context", 64], ["boundaries", tmp_path / "text"]):
        first, *rest = [say(verb[0], path, *verb[1:]) for path in (stage, tmp_path / "out", tmp_path / "in")]
        assert first.exit_code == 0 and first.output
        assert [said.stdout for said in rest] == [first.stdout] * 2
    assert say("generate", tmp_path / "in", "--bytes", 3).exit_code == 0  # with no window known


def test_the_import_of_a_foreign_model_ends_with_its_reason(foreign, tmp_path):
    said = say("checkpoint", "import", foreign, tmp_path / "out")
    assert isinstance(said.exception, CheckpointError) and "are missing" in str(said.exception)


def test_verify_finds_a_damaged_export(stage, tmp_path):
    export(stage, tmp_path / "out")
    assert say("checkpoint", "verify", tmp_path / "out").output == f"{tmp_path / 'out'}: good\n"
    shutil.copy(stage / "train.json", tmp_path / "out/model.safetensors")
    said = say("checkpoint", "verify", tmp_path / "out")
    assert said.exit_code == 1 and f"{tmp_path / 'out/model.safetensors'}: " in said.output
    export(stage, tmp_path / "edited")
    (tmp_path / "edited/spider_hf.py").write_text("import os")
    said = say("checkpoint", "verify", tmp_path / "edited")
    assert said.exit_code == 1 and "spider_hf.py: " in said.output
