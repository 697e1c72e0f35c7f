import json
from collections import OrderedDict

import pytest
import yaml

from spider.common.files import write_json
from spider.common.results import check_root, snapshot, write_config


def test_a_folder_of_another_version_is_refused_with_the_remedy(tmp_path):
    write_config(tmp_path, {"runs": {}})
    check_root(tmp_path)
    write_json(tmp_path / "spider.json", {"format": 99, "spider": "9.0"})
    with pytest.raises(ValueError, match=r"written by Spider 9\.0 in format 99.*move this one away"):
        check_root(tmp_path)


def test_jobs_that_hand_over_the_same_configuration_write_it_once(tmp_path):
    root, config = tmp_path / "results", {"runs": {"ü": [1, 2.5, None]}}
    kept = write_config(root, config)
    files = [kept, root / "config.yaml", root / "spider.json"]
    written = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files]
    assert write_config(root, config) == kept
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files] == written


def test_each_configuration_has_a_file_that_never_changes_beside_the_newest_one(tmp_path):
    first = write_config(tmp_path, {"runs": {"a": 1, "b": 2}})
    second = write_config(tmp_path, {"runs": {"b": 2, "a": 1}})  # the order of runs is that of the reports
    assert first != second and first.parent == second.parent == tmp_path / "configs"
    assert first.read_text() == "runs:\n  a: 1\n  b: 2\n"
    assert second.read_text() == (tmp_path / "config.yaml").read_text() == "runs:\n  b: 2\n  a: 1\n"
    assert write_config(tmp_path, yaml.safe_load(first.read_text())) == first
    assert (tmp_path / "config.yaml").read_text() == first.read_text()


def test_a_configuration_in_json_is_kept_as_one_in_yaml(tmp_path):
    """Snakemake reads JSON into ordered mappings, also within lists."""
    plain = {"runs": {"r": {"stages": [{"name": "a", "tokens": 1}]}}}
    ordered = json.loads(json.dumps(plain), object_pairs_hook=OrderedDict)
    assert snapshot(tmp_path, ordered) == snapshot(tmp_path, plain) == write_config(tmp_path, ordered)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == plain
