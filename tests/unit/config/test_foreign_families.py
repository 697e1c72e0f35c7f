"""Code of a family that is not Spider's own runs only where the user named that family."""

from __future__ import annotations

import json
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
from click.testing import CliRunner

import spider
from spider.cli import cli
from spider.common.errors import CheckpointError
from spider.config import CompressConfig, imports, load_config
from spider.config.block import ConfigError
from spider.config.imports import allow_import
from spider.config.model import family_block
from spider.model import build_model
from spider.model.interface import model_tensors
from tests.unit.hf.small_exports import exported

ROOT = Path(__file__).parents[3]
REFUSED = (
    r"'foreign_code\.family' is not one of Spider's \(gpt, spider\) and not registered .*--family-module"
)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A family on Python's path whose packages each leave a file where they were imported."""
    folder = tmp_path / "path" / "foreign_code" / "family"
    folder.mkdir(parents=True)
    leave = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
    (folder.parent / "__init__.py").write_text(leave)
    (folder / "__init__.py").write_text(leave)
    (folder / "config.py").write_text(leave + "from tests.families.toy.config import Config\n")
    (folder / "model.py").write_text(leave + "from tests.families.toy.model import Model\n")
    monkeypatch.syspath_prepend(folder.parents[1])
    monkeypatch.setattr(imports, "_allowed", set())
    for name in [name for name in sys.modules if name.split(".")[0] == "foreign_code"]:
        monkeypatch.delitem(sys.modules, name)
    invalidate_caches()
    return folder.parent


def ran(foreign):
    return sorted(file.relative_to(foreign).as_posix() for file in foreign.rglob("*.ran"))


@pytest.fixture
def downloaded(foreign, tmp_path):
    """An exported folder whose ``config.json`` names that family."""
    allow_import("tests.families.toy")
    model = build_model(family_block({"family": "tests.families.toy"}))
    folder = exported(model, tmp_path / "downloaded")
    plain = json.loads((folder / "config.json").read_text())
    plain["model"]["family"] = "foreign_code.family"
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def test_a_downloaded_model_imports_no_family_that_its_user_did_not_name(downloaded, foreign):
    with pytest.raises(CheckpointError, match=REFUSED):
        spider.load_model(downloaded)
    assert ran(foreign) == []
    model, config = spider.load_model(downloaded, family_module="foreign_code.family")
    assert config.family == "foreign_code.family" and type(model).__name__ == "Toy"
    assert "family/model.ran" in ran(foreign)


def test_transformers_imports_one_with_trust_remote_code_alone(downloaded, foreign):
    transformers = pytest.importorskip("transformers")
    import_module("spider.hf")  # registers Spider's classes
    auto = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(downloaded)
    assert config.vocab_size == 272
    for make in (lambda: auto.from_pretrained(downloaded), lambda: auto.from_config(config)):
        with pytest.raises(ValueError, match=REFUSED):
            make()
    assert ran(foreign) == []
    model = auto.from_pretrained(downloaded, trust_remote_code=True)
    assert type(model.model).__name__ == "Toy" and "family/model.ran" in ran(foreign)


def configuration(folder, family):
    run = {"data": "d", "model": {"family": family}, "stages": [{"name": "s", "max_steps": 3}]}
    path = folder / "own.yaml"
    path.write_text(json.dumps({"datasets": {"d": {"source": {"kind": "pydocs"}}}, "runs": {"r": run}}))
    return path


def test_ones_own_configuration_names_a_family(foreign, tmp_path):
    path = configuration(tmp_path, "foreign_code.family")
    with pytest.raises(ConfigError, match=REFUSED):
        load_config(path, allow_imports=False)
    assert ran(foreign) == []
    assert load_config(path).run("r").model.family == "foreign_code.family"
    assert "family/config.ran" in ran(foreign)


@pytest.mark.parametrize("way", ["nothing", "option", "configuration"])
def test_on_the_command_line_an_option_or_the_configuration_names_it(downloaded, foreign, tmp_path, way):
    named = "foreign_code.family" if way == "configuration" else "gpt"
    words = ["--config", str(configuration(tmp_path, named))]
    if way == "option":
        words = ["--family-module", "foreign_code.family"]
    done = CliRunner().invoke(cli, [*words, "generate", str(downloaded), "--bytes", "4"])
    if way == "nothing":
        assert isinstance(done.exception, CheckpointError) and ran(foreign) == [], done.output
    else:
        assert done.exit_code == 0 and "family/model.ran" in ran(foreign), done.output


def test_an_installed_package_registers_its_family(downloaded, foreign):
    """The entry point is what pip writes beside an installed package."""
    about = foreign.parent / "foreign_code-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-code\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[spider.families]\nany-name = foreign_code.family\n")
    assert spider.load_model(downloaded)[1].family == "foreign_code.family"


def test_the_source_of_ones_own_family_is_counted_in_a_fresh_process(foreign, monkeypatch, tmp_path):
    """The process that counts what reading a compressed model imports takes over what was named here."""
    monkeypatch.setenv("PYTHONPATH", f"{foreign.parent}:{ROOT}")
    pipeline = import_module("spider.checkpoints.compress.pipeline")
    allow_import("foreign_code.family")
    model = build_model(family_block({"family": "foreign_code.family"}))
    tensors = model_tensors(model, "")
    parts, exact = pipeline.split(model, CompressConfig())
    about = {"model": model.config.model_dump(mode="json"), "window": 8}
    quantized = {part.name: part.nearest(12.0) for part in parts}
    content, _ = pipeline.compressed(about, b"", tensors, quantized, exact)
    (tmp_path / "model.spider").write_bytes(content)
    assert "foreign_code.family.model" in pipeline.needed_modules(tmp_path / "model.spider")
