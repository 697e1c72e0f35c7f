import os
import signal
import subprocess
import sys

import pytest

from spider import files


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), files.replacing(path) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert files.read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_writer_killed_in_the_middle_leaves_nothing_under_the_final_name(tmp_path):
    script = f"""
import os, signal, pathlib
from spider.files import replacing
with replacing(pathlib.Path({str(tmp_path / "a")!r})) as beside:
    beside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()


def test_malformed_json_names_the_file(tmp_path):
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ValueError, match=r"m\.json: not valid JSON"):
        files.read_json(tmp_path / "m.json")
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        files.read_json(tmp_path / "none.json")


def test_digest_ignores_key_order_and_sees_values():
    assert files.digest({"a": 1, "b": 2}) == files.digest({"b": 2, "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})
