"""Cleaning in the real workflow: increments, kills, any number of jobs."""

import json

from spider.common.files import read_json

from .conftest import Workflow, wait_for

LONG = " ".join(f"word{i}" for i in range(60))


def three_parts(workflow: Workflow) -> Workflow:
    """Configure a dataset of two parts that is compared with another, and write the file of a third part.

    Each part has a copy of one long document with another last word.
    """
    for name, numbers in {"other": range(5), "a": range(60), "b": range(40, 90), "c": range(80, 120)}.items():
        rows = [{"id": f"{name}{i}", "text": f"Document {i}. " * 9, "score": i % 10} for i in numbers]
        rows += [{"id": f"{name}-long", "text": f"{LONG} {name}", "score": 5}] if name != "other" else []
        (workflow.folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"filters": ["score >= 1"], "exact": True, "near": 0.8, "against": ["other"]}
    workflow.config["datasets"] = {
        "other": {"source": {"kind": "local", "files": ["other.jsonl"]}},
        "text": {
            "source": {"kind": "local", "files": ["a.jsonl", "b.jsonl"]},
            "validation": 0.1,
            "cleaning": own,
        },
    }
    return workflow


def made(workflow: Workflow) -> dict[str, bytes]:
    """Return the content of all evidence and shards, by path."""
    folders = [
        workflow.results / name for name in ("cleaning", "shards/text/train", "shards/text/validation")
    ]
    assert not [*workflow.results.glob("cleaning/text/buckets/*")], "what was found in all parts is temporary"
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files = [file for file in files if file.parent.name != "decided"]
    return {str(file.relative_to(workflow.results)): file.read_bytes() for file in files}


def test_new_parts_run_no_earlier_job_again_and_a_kill_changes_nothing(workflow, tmp_path_factory):
    killed = three_parts(workflow)
    process = killed.start("datasets/text", "--cores", "1")
    pairs = killed.results / "cleaning/text/pairs/000.parquet"
    wait_for(pairs.exists, process)
    process.kill()
    process.communicate()
    for child in killed.results.rglob("*.tmp"):
        child.unlink()
    killed("datasets/text", "--nolock")
    first = made(killed)
    metadata = read_json(killed.results / "shards/text/metadata.json")
    # 36 and 18 documents of the two parts have a score; `other` and part 000 have some of them.
    assert metadata["left_out"] == {"score >= 1": 11, "exact": 4 + 18, "near": 1}

    killed.config["datasets"]["text"]["source"]["files"] += ["c.jsonl"]
    steps = ("download", "signatures", "buckets", "pairs", "drop_text_002", "encode", "index")
    assert killed.planned("datasets/text") == dict.fromkeys(steps, 1)
    killed("datasets/text", "--cores", "1")
    assert {path: content for path, content in made(killed).items() if path in first} == first

    fresh = Workflow(tmp_path_factory.mktemp("fresh"))
    three_parts(fresh).config |= {"tracking": {"enabled": False}}
    fresh.config["datasets"]["text"]["source"]["files"] += ["c.jsonl"]
    fresh("datasets/text")
    assert made(fresh) == made(killed)

    # A tokenizer is learned from what cleaning keeps.
    fresh.config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe"}
    fresh.config["tokenizers"] = {"bpe": {"data": "text-bpe", "vocab_size": 300}}
    fresh("results/tokenizers/bpe/tokenizer.json")
    learned = read_json(fresh.results / "tokenizers/bpe/tokenizer.json")["learned_from"]["documents"]
    kept = read_json(fresh.results / "shards/text/metadata.json")["splits"]["train"]
    assert learned == kept["documents"]

    # Another filter reads other documents.
    fresh.config["datasets"]["text"]["cleaning"]["filters"] = ["score >= 2"]
    once = dict.fromkeys(("buckets", "drop_text_002", "index"), 1)
    steps = ("signatures", "pairs", "encode")
    assert fresh.planned("datasets/text") == dict.fromkeys(steps, 3) | once
    fresh("datasets/text")

    # Other text of a part cleans those again that were cleaned with it or later, and encodes no earlier one.
    b = killed.folder / "b.jsonl"
    b.write_text(b.read_text().replace("Document 85", "Document 86"))
    edited = dict.fromkeys(("download", "signatures", "drop_text_001", "drop_text_002", "index"), 1)
    assert killed.planned("datasets/text") == edited | {"buckets": 2, "pairs": 3, "encode": 3}
