"""Test the contract of families on the smallest one, and the errors for packages that break it."""

import sys

import pytest
import torch

from spider.config import ConfigError, load_config
from spider.model import build_model
from spider.model.interface import Reader

TOY = "tests.families.toy"
TOYS = f"from {TOY}.config import Config"


def configuration(model, **stage):
    return load_config(
        {
            "datasets": {"d": {"source": {"kind": "pydocs"}}},
            "runs": {"r": {"data": "d", "model": model, "stages": [{"name": "s", "max_steps": 3, **stage}]}},
        }
    )


def build(**changes):
    torch.manual_seed(0)
    return build_model(configuration({"family": TOY, **changes}).run("r").model)


def test_one_seed_gives_one_model_also_by_way_of_the_meta_device():
    config = configuration({"family": TOY}).run("r").model
    with torch.device("meta"):
        late = build_model(config)
    late.to_empty(device="cpu")
    models = []
    for made in (lambda: build_model(config), lambda: late.reset_parameters() or late):
        torch.manual_seed(1)
        models.append(made().state_dict())
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), name


def test_a_stream_without_a_cache_gives_the_logits_of_one_pass_and_keeps_its_context():
    model, ids = build().eval(), [257, *b"abcdef"]
    whole = model(torch.tensor([ids])).logits[0]
    reader = model.incremental(len(ids))
    assert type(reader) is Reader
    pieces = torch.cat([reader.extend(ids[:3]), reader.extend(ids[3:4]), reader.extend(ids[4:])])
    torch.testing.assert_close(pieces, whole)
    with pytest.raises(ValueError, match=r"cannot read 1 ids after 7 with a context of 7"):
        reader.extend([0])


def test_a_family_without_loops_takes_no_n_loops():
    with pytest.raises(ConfigError, match=rf"n_loops: this model of family {TOY} has no loops; leave it out"):
        configuration({"family": TOY}, n_loops=2)
    assert configuration({"family": TOY}, n_loops=1).stage("r", "s").loops == 1
    with pytest.raises(ValueError, match=rf"n_loops: this model of family {TOY} has no loops \(got 3\)"):
        build().loops(3)
    with pytest.raises(ValueError, match=r"n_loops: must be at least 1 \(got 0\)"):
        build().loops(0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "spidr"}, r"runs\.r\.model\.family: no family 'spidr'.*did you mean \"spider\"\?"),
        ({"family": "no.such.package"}, r"runs\.r\.model\.family: no family 'no\.such\.package'.* imported"),
        ({"family": TOY, "widht": 8}, r"runs\.r\.model\.widht: unknown key.*width"),
        ({"family": TOY, "preset": "tiny"}, r"runs\.r\.model\.preset: no preset 'tiny'"),
    ],
)
def test_a_wrong_family_or_key_is_named_with_the_nearest(model, message):
    with pytest.raises(ConfigError, match=message):
        configuration(model)


@pytest.mark.parametrize(
    ("config", "module", "message"),
    [
        ("import no_such_module", "", r"broken\.config cannot be imported \(ModuleNotFoundError: .*no_such"),
        ("", "", r"family 'broken': its config\.py defines no Config, a spider\.config\.ModelConfig"),
        (None, "", r"broken\.config cannot be imported \(ModuleNotFoundError"),
        (TOYS, "1 / 0", r"broken\.model cannot be imported \(ZeroDivisionError: division by zero\)"),
        (TOYS, "", r"family 'broken': its model\.py defines no Model"),
    ],
)
def test_a_family_that_cannot_be_imported_says_why(tmp_path, monkeypatch, config, module, message):
    folder = tmp_path / "broken"
    folder.mkdir()
    for name, text in (("__init__", ""), ("config", config), ("model", module)):
        if text is not None:
            (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "broken"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=message):
        build_model(configuration({"family": "broken"}).run("r").model)
