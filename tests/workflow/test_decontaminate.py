"""Training documents with text that models are measured with are removed, with evidence, before encoding."""

import json
import random
import subprocess

import pyarrow.parquet as pq
import pytest

from spider.common.files import read_json
from tests import forkserver
from tests.unit.small_datasets import is_validation

HELD_OUT = 0.2
QUESTION = "Which of the rivers of this country has the most bridges of stone, and who built them?"
SHORT = "Which river has the most bridges of stone?"
NOTE = "a note about the harbor that nobody should train on because a benchmark has the very same words in it"


def sentence(seed, count=40):
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(count))


def ids(prefix, held_out, count):
    """Return ids of documents that are held out, or are not."""
    names = (f"{prefix}{number}" for number in range(1000))
    return [name for name in names if is_validation(name.encode(), HELD_OUT) == held_out][:count]


def write(path, rows):
    path.write_text("\n".join(json.dumps({"id": id, "text": text}) for id, text in rows.items()))


@pytest.fixture
def web(workflow):
    """Return a workflow with two datasets, a task and a folder, and some of their texts in one dataset.

    `expected` has the source of the text in each planted document.
    """
    folder = workflow.folder
    held = {name: {id: sentence(id) for id in ids(name, True, 8)} for name in ("web", "other")}
    for name in held:
        held[name] |= {id: sentence(id) for id in ids(name, False, 8)}
    own, other = ids("web", True, 1)[0], ids("other", True, 1)[0]
    start, *plants = ids("plant", False, 9)
    shared = held["web"][own].split()
    texts = {
        "upper": f"{sentence(1)} {QUESTION.upper().replace(' ', ', ')}",
        "short": f"{sentence(2)}\n{SHORT}\n{sentence(3)}",
        "own": f"{sentence(4)} {' '.join(shared[5:25])} {sentence(5)}",
        "other": f"{' '.join(held['other'][other].split()[:13])} {sentence(6)}",
        "note": f"{sentence(7)} {NOTE}",
        "twelve": f"{sentence(8)} {' '.join(shared[5:17])} {sentence(9)}",
        "trained": f"{sentence(10)} {sentence(ids('other', False, 1)[0])}",
    }
    planted = dict(zip(plants, texts.values(), strict=False))
    named = dict(zip(texts, plants, strict=False))
    copied = ids("copy", True, 1)[0]  # A held-out document may hold what it likes.
    write(folder / "a.jsonl", held["web"] | {start: sentence(start)})
    write(folder / "b.jsonl", planted | {copied: QUESTION})
    write(folder / "other.jsonl", held["other"])
    rows = [{"question": QUESTION, "choices": ["Danube", "Rhine"], "answer": 1}]
    rows += [{"question": SHORT, "choices": ["Po", "Inn"], "answer": 0}]
    rows += [{"question": "Which river?", "choices": ["Po", "Inn"], "answer": 0}]
    (folder / "quiz.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "bench/deep").mkdir(parents=True)
    (folder / "bench/deep/notes.csv").write_text(f"number,note\n1,{NOTE}\n")
    local = {"validation": HELD_OUT, "source": {"kind": "local"}}
    workflow.config["datasets"] = {
        "web": local
        | {"source": {"kind": "local", "files": ["a.jsonl", "b.jsonl"]}}
        | {"cleaning": {"decontaminate": ["bench"]}},
        "other": local | {"source": {"kind": "local", "files": ["other.jsonl"]}},
    }
    workflow.run["data"] = "web"
    tasks = {"quiz": {"file": "quiz.jsonl"}}
    workflow.run["evaluation"] |= {"data": "other", "tasks": tasks}
    workflow.expected = {
        named["upper"]: ("tasks/quiz", "quiz.jsonl, line 1"),
        named["short"]: ("tasks/quiz", "quiz.jsonl, line 2"),
        named["own"]: ("web", own),
        named["other"]: ("other", other),
        named["note"]: ("bench/deep/notes.csv", "line 2"),
    }
    workflow.texts = planted
    return workflow


def evidence(workflow, part="001"):
    return pq.read_table(workflow.results / f"cleaning/web/removed/{part}.parquet").to_pylist()


def spider(workflow, *words):
    command = [forkserver.spider(), "--config", "config.yaml", "data", *words]
    return subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True)


def test_planted_documents_are_removed_with_their_source_and_shown(web):
    printed = web("datasets/web")
    found = {row["id"]: (row["kept_dataset"], row["kept_id"]) for row in evidence(web)}
    assert found == web.expected
    assert evidence(web, "000") == []
    rows = {row["kept_dataset"]: row for row in evidence(web)}
    assert rows["web"]["matches"] == 8 and rows["web"]["reason"] == "contaminated"
    assert rows["web"]["words"] in web.texts[rows["web"]["id"]]
    assert rows["tasks/quiz"]["words"] == SHORT[:-1] and rows["tasks/quiz"]["containment"] == 1.0
    log = (web.results / "logs/protect/web.log").read_text()
    assert "tasks/quiz: 3 documents or questions, 1 with fewer than 8 words cannot be protected" in log
    record = read_json(web.results / "shards/web/train/001.json")
    assert record["documents"] == len(web.texts) - len(found), printed
    assert read_json(web.results / "shards/web/validation/001.json")["documents"] == 1
    listed = spider(web, "removed", "web").stdout
    assert "contaminated: 5 removed" in listed and "line 2 of bench/deep/notes.csv" in listed
    (by_note,) = (id for id, (source, _) in found.items() if source.startswith("bench"))
    assert NOTE[:20] in spider(web, "removed", "web", by_note).stdout

    # An edited question is compared again.
    question = {"context": "Other words", "continuation": QUESTION}
    (web.folder / "quiz.jsonl").write_text(json.dumps(question))
    assert web.planned("datasets/web").keys() == {
        "protect",
        "contaminated",
        "drop_web_001",
        "encode",
        "index",
    }
