"""Jobs that read the user's own files run again after an edit, and name a missing file."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FILES = {"lines": "a.jsonl", "rows": "a.parquet", "notes": "notes", "braces": "d{1}"}
TARGETS = [f"datasets/{name}" for name in FILES]
EDITED = "notes/deep/a note 7.txt: was edited since it was read; `snakemake datasets/notes` reads it again"
#: The jobs of a dataset whose text is read again.
AGAIN = {"download": 1, "encode": 1, "index": 1}


def later(path, text):
    """Write a file that is newer than all outputs."""
    path.write_text(text)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**10))


def older(path, content):
    """Replace a file as `mv` and `cp -p` do: the new one has an older time, and here also the same size."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**12))
    assert path.stat().st_size == stat.st_size


def verified(workflow, dataset):
    """Return what `spider data verify` prints."""
    command = [sys.executable, "-m", "spider.cli", "data", "verify", f"results/shards/{dataset}"]
    return subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True, check=True).stdout


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
    (workflow.folder / "d{1}").mkdir()
    shutil.copy(workflow.folder / "a.jsonl", workflow.folder / "d{1}/b [v].jsonl")
    workflow.config["tracking"] = {"enabled": True}
    workflow.config["datasets"] |= {
        name: {"source": {"kind": "local", "files": [file]}, "validation": 0.3}
        for name, file in FILES.items()
    }
    workflow(*TARGETS)
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
    assert own.planned("datasets/notes") == AGAIN


def test_a_file_with_an_older_time_and_the_same_size_is_read_again(own):
    lines, note = own.folder / "a.jsonl", own.folder / "notes/deep/a note 7.txt"
    before, kept = lines.read_bytes(), lines.stat()
    older(lines, before.replace(b"Text 5.", b"Text X."))
    rows = pq.read_table(own.folder / "a.parquet").to_pylist()
    swapped = own.folder / "swapped.parquet"
    pq.write_table(
        pa.Table.from_pylist([row | {"text": row["text"].replace("t", "T")} for row in rows]), swapped
    )
    older(own.folder / "a.parquet", swapped.read_bytes())
    older(note, b"Mute 7.")
    for name in ("lines", "rows", "notes"):
        assert own.planned(f"datasets/{name}") == AGAIN
    # The same content is read once to compare digests, and is the same file.
    older(lines, before)
    assert own.planned("datasets/lines") == {}
    os.utime(lines, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    shutil.rmtree(own.folder / ".snakemake")
    assert own.planned("datasets/lines") == {} and own.planned("datasets/notes") == AGAIN
    assert EDITED in verified(own, "notes")
    own("datasets/notes")
    assert own.planned("datasets/notes") == {} and EDITED not in verified(own, "notes")


def test_a_path_with_braces_and_brackets_is_read_again_after_an_edit_in_place(own):
    assert own.planned(*TARGETS) == {}
    later(own.folder / "notes/{braces}.txt", "Snakemake still has wildcards in braces.")
    assert own.planned(*TARGETS) == AGAIN
    file = own.folder / "d{1}/b [v].jsonl"
    later(file, file.read_text().replace("Text 5.", "Text X."))
    assert own.planned("datasets/braces") == AGAIN
    own(*TARGETS)
    assert own.planned(*TARGETS) == {}


def test_a_file_from_the_future_is_named_before_the_first_job(own):
    note = own.folder / "notes/deep/a note 7.txt"
    later(note, "An edited note.")
    os.utime(note, (2**32, 2**32))
    line = "notes/deep/a note 7.txt: its time (2106-02-07"
    advice = "`touch 'notes/deep/a note 7.txt'` sets it to now"
    assert line in (said := own("--dry-run", "datasets/notes")) and advice in said
    said = own("datasets/notes", fails=True)
    assert line in said and advice in said and "Nothing was started" in said
    os.utime(note)
    own("datasets/notes")


def test_an_edit_of_any_file_of_a_bundle_of_questions_scores_again(trained):
    bundle = trained.folder / "bundle"
    (bundle / "eval_data").mkdir(parents=True)
    entry = "{label: one, dataset_uri: one.jsonl, num_fewshot: [0]}"
    (bundle / "core.yaml").write_text(f"icl_tasks: [{entry}]")
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\none,50\n")
    (bundle / "eval_data/one.jsonl").write_text('{"query": "Document", "choices": ["1", "2"], "gold": 0}')
    trained.run["evaluation"]["tasks"] = {"core": {"folder": "bundle"}}
    evaluation = "results/runs/small/first/evaluation.json"
    trained(evaluation)
    assert trained.planned(evaluation) == {}
    later(bundle / "eval_data/one.jsonl", '{"query": "Document", "choices": ["11", "2"], "gold": 0}')
    assert trained.planned(evaluation) == {"evaluate": 1}


def test_planning_says_which_own_files_are_read(workflow):
    """Once, by the process that plans, whether it is a dry run or not."""
    (folder := workflow.folder / "g").mkdir()
    text = (workflow.folder / "text.jsonl").rename(folder / "text.jsonl")
    for name in ("README.md", ".hidden.jsonl", "empty.jsonl"):
        (folder / name).touch()
    workflow.config["datasets"]["text"]["source"]["files"] = ["g", "g/text.jsonl"]
    left_out = [
        "1 hidden (g/.hidden.jsonl)",
        "1 named again (g/text.jsonl)",
        "1 of another kind (g/README.md)",
        "1 empty (g/empty.jsonl)",
    ]
    for arguments, documents in ((["--dry-run"], ""), ([], ""), (["--dry-run"], ", 200 documents")):
        output = workflow("datasets/text", *arguments)
        size = f"{text.stat().st_size / 1000:.3g} kB"
        said = f"datasets.text: 2 files, {size}{documents}; left out: {', '.join(left_out)}"
        assert [line for line in output.splitlines() if line.startswith("datasets.")] == [said]


def test_a_source_without_files_is_named_without_a_traceback(workflow):
    workflow.config["datasets"]["text"]["source"]["files"] = ["nowhere/*.jsonl"]
    output = workflow("--dry-run", fails=True)
    assert "error: datasets.text.source.files: no file matches 'nowhere/*.jsonl'" in output
    assert "Traceback" not in output and "Exception" not in output
