"""Which files a user's own tasks are read from: an edit of any of them asks the model again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from spider.config.tasks import CoreTask
from spider.evaluation.questions import tasks


def bundle(folder: Path) -> Path:
    """An evaluation bundle with two tasks, one of them in a folder of its own."""
    entries = [
        {"label": label, "dataset_uri": uri, "num_fewshot": [0], "icl_task_type": "multiple_choice"}
        for label, uri in (("first", "a/first.jsonl"), ("second", "second.jsonl"))
    ]
    (folder / "eval_data/a").mkdir(parents=True)
    row = json.dumps({"query": "q", "choices": ["x", "y"], "gold": 0})
    for name in ("a/first.jsonl", "second.jsonl", "unused.jsonl"):
        (folder / "eval_data" / name).write_text(row)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nfirst,50\nsecond,50\n")
    return folder


def test_a_bundle_is_all_files_that_its_questions_are_read_from(tmp_path, monkeypatch):
    task = CoreTask(folder=str(bundle(tmp_path)))
    read = set()
    for name in ("open", "read_text"):
        before = getattr(Path, name)

        def note(path, *args, before=before, **options):
            read.add(str(path))
            return before(path, *args, **options)

        monkeypatch.setattr(Path, name, note)
    assert [one.name for one in tasks("core", task)] == ["core/first", "core/second"]
    assert {str(tmp_path / "core.yaml"), str(tmp_path / "eval_data/second.jsonl")} < read
    assert set(task.files()) == read | {str(tmp_path / "eval_meta_data.csv")}


def test_a_zip_of_a_bundle_is_read_as_it_is(tmp_path):
    folder = bundle(tmp_path / "packed/eval_bundle")
    zipped = shutil.make_archive(str(tmp_path / "bundle"), "zip", tmp_path / "packed")
    task = CoreTask(folder=zipped)
    assert task.files() == [zipped]
    assert [*tasks("core", task)] == [*tasks("core", CoreTask(folder=str(folder)))]
    Path(zipped).write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"bundle.zip: must be a zip with core.yaml in it"):
        next(tasks("core", task))
