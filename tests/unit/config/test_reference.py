"""The JSON schema for editors accepts valid configurations and refuses wrong keys and values."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from spider.cli import cli

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "config.yaml", *sorted((ROOT / "presets").glob("*.yaml"))]
SCHEMA = json.loads(CliRunner().invoke(cli, ["config", "schema"]).output)
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_reference_has_every_key_once_with_its_meaning():
    page = CliRunner().invoke(cli, ["config", "reference"]).output
    titles = re.findall("^## `(.*)`$", page, re.M)
    assert len(titles) == len(set(titles))
    assert {"runs.NAME.optimizer.groups.NAME", "datasets.NAME.source, kind: hub"} <= {*titles}
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", page, re.M)
    inner = [one for block in SCHEMA["$defs"].values() for one in block.get("anyOf", ()) if "title" in one]
    blocks = [SCHEMA, *SCHEMA["$defs"].values(), *inner]
    assert {key for key, *_ in rows} == {key for block in blocks for key in block.get("properties", {})}
    assert [key for key, type, *_ in rows if "any" in type] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_configurations_name_the_schema_and_match_it(path):
    text = path.read_text()
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named and (path.parent / named[1]).resolve() == ROOT / "build/config.schema.json"
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))] == []


def problems(**changes):
    plain = yaml.safe_load((ROOT / "config.yaml").read_text())
    plain["runs"]["spider-ngram"] |= changes
    return [error.message for error in VALIDATOR.iter_errors(plain)]


def test_wrong_keys_and_values_are_refused():
    assert problems() == []
    assert "'modle' was unexpected" in problems(modle="tiny")[0]
    assert problems(model="tinny") and problems(model={"preset": "tiny", "hiden": 3})
    assert problems(seed=-1) and problems(seed="many") and problems(precision="fp9")


def test_numbers_that_an_editor_reads_as_text_and_modules_of_the_user_are_accepted():
    assert problems(seed="100_000") == problems(defaults={"tokens": "6e5"}) == []
    assert problems(model={"family": "my_package.my_family", "width": 3}) == []
