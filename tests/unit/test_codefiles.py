"""The files of the code, and which edits change what is trained."""

import pytest

from spider.config.imports import allow_import
from spider.provenance import codefiles


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Return a function that writes a file of a project, or of the user, and returns the deciding code."""
    monkeypatch.setattr(codefiles, "ROOT", tmp_path / "project")
    monkeypatch.setattr("spider.config.imports._allowed", set())
    monkeypatch.syspath_prepend(tmp_path)

    def edited(name, text="A = 1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        codefiles.code_files.cache_clear()
        return codefiles.deciding_code()

    yield edited
    codefiles.code_files.cache_clear()


def test_only_code_that_decides_bytes_counts(code):
    first = code("project/spider/training/loop.py")
    assert code("project/spider/training/loop.py", "A = 2") != first
    assert code("project/spider/training/loop.py") == first
    for name in (
        "spider/report/page.py",
        "spider/cli/train.py",
        "rules/train.smk",
        "docs/a.py",
        "spider/data/a.md",
    ):
        assert code(f"project/{name}") == first
    assert code("project/kernels/a.py") != first


def test_an_edit_of_an_extra_is_seen_and_changes_no_bytes_of_the_core(code):
    first = code("project/extras/lab/spider_lab/fit.py")
    before = codefiles.code_files()["extras/lab/spider_lab/fit.py"]
    assert code("project/extras/lab/spider_lab/fit.py", "A = 2") == first
    assert codefiles.code_files()["extras/lab/spider_lab/fit.py"] != before


def test_all_files_of_the_users_packages_and_modules_count(code):
    code("family_of_mine/__init__.py")
    first = code("source_of_mine.py")
    allow_import("family_of_mine")
    allow_import("source_of_mine")
    own = code("family_of_mine/model.py")
    assert own != first
    assert code("family_of_mine/model.py", "A = 2") != own
    code("family_of_mine/model.py")
    assert code("source_of_mine.py", "A = 2") != own
