import json
from collections import OrderedDict

import pytest
import yaml

from spider.files import write_json
from spider.results import check_root, write_config


def test_a_folder_of_another_version_is_refused_with_the_remedy(tmp_path):
    write_config(tmp_path / "config.yaml", {"runs": {}})
    check_root(tmp_path)
    write_json(tmp_path / "spider.json", {"format": 99, "spider": "9.0"})
    with pytest.raises(ValueError, match=r"written by Spider 9\.0 in format 99.*move this one away"):
        check_root(tmp_path)


def test_a_mark_that_says_nothing_is_refused_too(tmp_path):
    write_json(tmp_path / "spider.json", [])
    with pytest.raises(ValueError, match=r"written by Spider \(unknown\) in format None.*move this one away"):
        check_root(tmp_path)


def test_jobs_that_hand_over_the_same_configuration_write_it_once(tmp_path):
    path = tmp_path / "results/config.yaml"
    write_config(path, {"runs": {"ü": [1, 2.5, None]}})
    written = path.stat().st_mtime_ns, path.stat().st_ino
    write_config(path, {"runs": {"ü": [1, 2.5, None]}})
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    write_config(path, {"runs": {}})
    assert path.read_text() == "runs: {}\n" and (tmp_path / "results/spider.json").exists()


def test_a_configuration_in_json_is_kept_as_one_in_yaml(tmp_path):
    """Snakemake reads JSON into ordered mappings, also within lists."""
    plain = {"runs": {"r": {"stages": [{"name": "a", "tokens": 1}]}}}
    ordered = json.loads(json.dumps(plain), object_pairs_hook=OrderedDict)
    write_config(tmp_path / "config.yaml", ordered)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == plain
