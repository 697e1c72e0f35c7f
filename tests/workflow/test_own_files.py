"""Jobs that read the user's own files run again after an edit, and name a missing file."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def later(path, text):
    """Write a file that is newer than all outputs."""
    path.write_text(text)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**10))


@pytest.fixture
def own(workflow):
    """Return a workflow with indexed datasets of a jsonl file, a parquet file and a folder of texts."""
    rows = [{"text": f"Text {i}.", "id": str(i), "url": f"site{i % 9}/{i}"} for i in range(60)]
    (workflow.folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), workflow.folder / "a.parquet")
    (workflow.folder / "notes/deep").mkdir(parents=True)
    for i in range(40):
        (workflow.folder / f"notes/deep/a note {i}.txt").write_text(f"Note {i}.")
    (workflow.folder / "notes/{braces}.txt").write_text("Snakemake has wildcards in braces.")
    workflow.config["datasets"] |= {
        name: {"source": {"kind": "local", "files": [file]}, "validation": 0.3}
        for name, file in (("lines", "a.jsonl"), ("rows", "a.parquet"), ("notes", "notes"))
    }
    workflow("datasets/lines", "datasets/rows", "datasets/notes")
    return workflow


def test_other_columns_are_imported_and_an_edited_text_is_read_again(own):
    for name in ("lines", "rows"):
        own.config["datasets"][name]["id_column"] = "url"
    assert own.planned("datasets/lines", "datasets/rows", "datasets/notes") == {
        "download": 1,  # The jsonl file only: a parquet file is a link and has all its columns.
        "encode": 2,
        "index": 2,
    }
    later(own.folder / "notes/deep/a note 7.txt", "An edited note, which is longer than it was.")
    assert own.planned("datasets/notes") == {"download": 1, "encode": 1, "index": 1}


def test_an_edit_of_any_file_of_a_bundle_of_questions_scores_again(trained):
    bundle = trained.folder / "bundle"
    (bundle / "eval_data").mkdir(parents=True)
    entry = "{label: one, dataset_uri: one.jsonl, num_fewshot: [0]}"
    (bundle / "core.yaml").write_text(f"icl_tasks: [{entry}]")
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\none,50\n")
    (bundle / "eval_data/one.jsonl").write_text('{"query": "Document", "choices": ["1", "2"], "gold": 0}')
    trained.run["evaluation"]["tasks"] = {"core": {"kind": "core", "folder": "bundle"}}
    evaluation = "results/runs/small/first/evaluation.json"
    trained(evaluation)
    assert trained.planned(evaluation) == {}
    later(bundle / "eval_data/one.jsonl", '{"query": "Document", "choices": ["11", "2"], "gold": 0}')
    assert trained.planned(evaluation) == {"evaluate": 1}


def test_a_source_without_files_is_named_without_a_traceback(workflow):
    workflow.config["datasets"]["text"]["source"]["files"] = ["nowhere/*.jsonl"]
    output = workflow("--dry-run", fails=True)
    assert "error: datasets.text.source.files: no file matches 'nowhere/*.jsonl'" in output
    assert "Traceback" not in output and "Exception" not in output
