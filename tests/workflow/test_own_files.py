"""Jobs that read the user's own files run again after an edit, and name a missing file."""

import json
import os
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forkserver import spider

FILES = {"lines": "a.jsonl", "rows": "a.parquet", "notes": "notes", "braces": "d{1}"}
TARGETS = [f"datasets/{name}" for name in FILES]
NOTE = "notes/deep/a note 7.txt"
EDITED = f"{NOTE}: was edited since it was read; `snakemake datasets/notes` reads it again"


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
    command = [spider(), "data", "verify", f"results/shards/{dataset}"]
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
    workflow.config["datasets"] |= {
        name: {"source": {"kind": "local", "files": [file]}, "validation": 0.3}
        for name, file in FILES.items()
    }
    workflow(*TARGETS)
    return workflow


def test_an_edited_file_is_read_again_whatever_its_name_its_time_and_its_size(own):
    """Braces in a path are no wildcard. A column of the text that is read otherwise is imported."""
    assert own.planned(*TARGETS) == {}
    for name in ("lines", "rows"):
        own.config["datasets"][name]["id_column"] = "url"
    # A parquet file is a link and has all its columns.
    assert own.planned(*TARGETS) == {"download": 1, "encode": 2, "index": 2}
    for name in ("lines", "rows"):
        del own.config["datasets"][name]["id_column"]

    lines, note, braces = (own.folder / name for name in ("a.jsonl", NOTE, "d{1}/b [v].jsonl"))
    before = lines.read_bytes()
    older(lines, before.replace(b"Text 5.", b"Text X."))
    rows = pq.read_table(own.folder / "a.parquet").to_pylist()
    swapped = own.folder / "swapped.parquet"
    table = pa.Table.from_pylist([row | {"text": row["text"].replace("t", "T")} for row in rows])
    pq.write_table(table, swapped)
    older(own.folder / "a.parquet", swapped.read_bytes())
    older(note, b"Mute 7.")
    later(braces, braces.read_text().replace("Text 5.", "Text X."))
    assert own.planned(*TARGETS) == {"download": 4, "encode": 4, "index": 4}
    # The same content is read once to compare digests, and is the same file.
    older(lines, before)
    later(own.folder / "notes/{braces}.txt", "Snakemake still has wildcards in braces.")
    shutil.rmtree(own.folder / ".snakemake")
    assert own.planned(*TARGETS) == {"download": 3, "encode": 3, "index": 3}
    assert EDITED in verified(own, "notes")
    own(*TARGETS)
    assert own.planned(*TARGETS) == {} and EDITED not in verified(own, "notes")


def test_a_file_from_the_future_is_named_before_the_first_job(workflow):
    text = workflow.folder / "text.jsonl"
    os.utime(text, (2**32, 2**32))
    for arguments in (["--dry-run"], []):
        said = workflow("datasets/text", *arguments, fails=not arguments)
        assert "text.jsonl: its time (2106-02-07" in said and "`touch text.jsonl` sets it to now" in said
    assert "Nothing was started" in said
    os.utime(text)
    assert workflow.planned("datasets/text")["download"] == 1


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
    kinds = ("hidden (g/.hidden.jsonl)", "named again (g/text.jsonl)", "of another kind (g/README.md)")
    left_out = [f"1 {kind}" for kind in (*kinds, "empty (g/empty.jsonl)")]
    for arguments, documents in (([], ""), (["--dry-run"], ", 200 documents")):
        output = workflow("datasets/text", *arguments)
        size = f"{text.stat().st_size / 1000:.3g} kB"
        said = f"datasets.text: 2 files, {size}{documents}; left out: {', '.join(left_out)}"
        assert [line for line in output.splitlines() if line.startswith("datasets.")] == [said]
