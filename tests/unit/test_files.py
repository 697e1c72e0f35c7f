import os
import signal
import subprocess
import sys
import tarfile

import pytest

from spider.common import files


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
from spider.common.files import replacing
with replacing(pathlib.Path({str(tmp_path / "a")!r})) as beside:
    beside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()


def test_digest_ignores_key_order_and_sees_values():
    assert files.digest({"a": 1, "b": 2}) == files.digest({"b": 2, "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})


@pytest.mark.parametrize("filtered", [True, False])
def test_an_archive_is_unpacked_inside_its_folder_alone_by_any_python(filtered, tmp_path, monkeypatch):
    if not filtered:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "a").write_text("text")
    for name, fits in (("a", True), ("b/c", True), ("../d", False), ("b/../../d", False)):
        with tarfile.open(tmp_path / "one.tar", "w") as tar:
            tar.add(tmp_path / "a", name)
        with tarfile.open(tmp_path / "one.tar") as tar:
            if fits:
                files.unpack(tar, tmp_path / "folder")
                assert (tmp_path / "folder" / name).read_text() == "text"
            else:
                with pytest.raises(tarfile.TarError):
                    files.unpack(tar, tmp_path / "folder")
    assert not (tmp_path / "d").exists()


def test_two_processes_of_one_number_do_not_share_a_temporary_name(tmp_path, monkeypatch):
    """As two containers on one disk: each counts its processes from one."""
    monkeypatch.setattr(os, "getpid", lambda: 17)
    path = tmp_path / "a.json"
    with files.replacing(path) as first, files.replacing(path) as second:
        first.write_text("first")
        second.write_text("second, longer")
        assert first != second and first.read_text() == "first"
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.json"]
