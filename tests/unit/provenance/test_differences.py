"""Two results that differ in one thing: `spider diff` names this thing and no other."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from spider.cli import cli
from spider.common.files import digest, write_json
from spider.common.results import Results
from spider.provenance.codefiles import short_digest
from spider.provenance.differences import Comparison
from spider.provenance.lineage import Lineage, by_rule, other_code
from tests.unit.records import write_job, write_workflow

#: The settings of the jobs of a small workflow, by rule.
SETTINGS = {
    "download": {"kind": "hub", "item": "a.parquet"},
    "encode": {"validation": 0.1, "split_by": {"column": "url", "salt": 0}},
    "index": {"validation": 0.1},
    "warmup": {"model": {"hidden": 8}, "seq_len": 32},
    "train": {"model": {"hidden": 8}, "run": "a", "settings": {"lr": 0.1, "seq_len": 32}, "seed": 0},
    "evaluate": {"data": "web", "overlap": 0.5},
}


def changed(settings, rule, key, value):
    """Return the settings with one value changed."""
    *outer, last = key.split(".")
    whole = json.loads(json.dumps(settings))
    inner = whole[rule]
    for name in outer:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return whole


def workflow(root, *, settings=SETTINGS, text="text", modules=None, packages=(), threads=1, extra=0):
    """Record the jobs of a workflow whose outputs are functions of their settings and inputs.

    The outputs also have the time of the job, as real receipts have.
    """
    root.mkdir(exist_ok=True)
    modules = {"spider/a.py": "1", "spider/b.py": "1"} | (modules or {})
    code = {"version": "1", "commit": "c", "modules": modules}
    write_json(root / "code" / f"{digest(code)}.json", code)
    listed = {"Python": "3.11", "numpy": "1", **dict.fromkeys(packages, "2")}
    (root / "spider.json").write_text("{}")
    write_workflow(root, packages=listed)

    def run(rule, inputs, output):
        made = [settings[rule], modules, threads, listed, [meaning(root / one) for one in inputs]]
        write_json(root / output, {"digest": digest(made), "seconds": len(str(root)) + extra})
        own = {"rule": rule, "wildcards": {"run": "a"}, "code": digest(code), "threads": threads}
        write_job(root, output, inputs, params={"identity": settings[rule]}, **own)

    (root / "own.txt").write_text(text)
    run("download", ["own.txt"], "raw/web/000.json")
    run("encode", ["raw/web/000.json"], "shards/web/train/000.json")
    run("index", ["shards/web/train/000.json"], "shards/web/metadata.json")
    run("warmup", [], "runs/a/warmup.json")
    run("train", ["shards/web/metadata.json", "runs/a/warmup.json"], "runs/a/main/train.json")
    run("evaluate", ["runs/a/main/train.json", "shards/web/metadata.json"], "runs/a/main/evaluation.json")
    return Results(root).stage("a", "main").evaluation


def meaning(path):
    return json.loads(path.read_text())["digest"] if path.suffix == ".json" else path.read_text()


def causes(one, other):
    lineages = [Lineage(path.parents[3]) for path in (one, other)]
    found = Comparison(*lineages).causes(
        *(line.of(path) for line, path in zip(lineages, (one, other), strict=True))
    )
    return [(cause.kind, cause.what) for cause in found], found


ENCODED_AGAIN = changed(changed(SETTINGS, "encode", "validation", 0.2), "index", "validation", 0.2)
LONGER = changed(changed(SETTINGS, "warmup", "seq_len", 64), "train", "settings.seq_len", 64)
SEED = changed(SETTINGS, "train", "seed", 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"settings": changed(SETTINGS, "download", "item", "b.parquet")}, [("setting", "item")]),
        ({"settings": changed(SETTINGS, "encode", "split_by.salt", 1)}, [("setting", "split_by.salt")]),
        ({"settings": changed(SETTINGS, "train", "settings.schedule", "cosine")}, [("setting", "schedule")]),
        ({"settings": ENCODED_AGAIN}, [("setting", "validation")]),  # of two rules
        ({"settings": LONGER}, [("setting", "seq_len")]),
        ({"text": "other text"}, [("file", "own.txt")]),
        ({"modules": {"spider/b.py": "2", "spider/new.py": "1"}}, [("module", "spider/b.py")]),
        ({"threads": 2}, [("threads", "")]),
        ({"packages": ["torch"]}, [("package", "torch")]),
        ({"settings": SEED, "text": "other"}, [("file", "own.txt"), ("setting", "seed")]),
    ],
    ids=lambda one: " ".join(" ".join(words) for words in one) if isinstance(one, list) else "",
)
def test_what_was_changed_is_the_only_cause(tmp_path, changes, expected):
    one, other = workflow(tmp_path / "one"), workflow(tmp_path / "other", extra=1, **changes)
    found, causes_ = causes(one, other)
    assert found == expected
    if expected == [("file", "own.txt")]:
        assert causes_[0].rules == ("download", "encode", "index", "train", "evaluate")


def test_an_edited_module_of_the_user_is_named(tmp_path):
    own = tmp_path / "family.py"
    own.write_text("A = 1")
    root = tmp_path / "results"
    workflow(root, modules={str(own): short_digest(own)})
    assert str(own) not in {name for _, names in other_code(root).values() for name in names}
    own.write_text("A = 2")
    assert all(str(own) in names for _, names in other_code(root).values())


def test_commands_print_the_causes_and_the_lineage(tmp_path):
    seeds = {"one": SETTINGS, "other": changed(SETTINGS, "train", "seed", 1)}
    results = [workflow(tmp_path / name, settings=settings) for name, settings in seeds.items()]
    run = CliRunner().invoke
    printed = run(cli, ["diff", *(str(path.parent) for path in results)], catch_exceptions=False).output
    assert printed == "setting seed: 0 / 1  (can explain train -> evaluate)\n"
    lines = run(cli, ["why", str(results[0])], catch_exceptions=False).output
    assert "raw/web/000.json  (download a)" in lines and "no input and no module" in lines
    (tmp_path / "one/own.txt").write_text("edited")
    assert "Updated input file: own.txt" in run(cli, ["why", str(results[0])]).output
    results[0].write_text("{}")
    assert isinstance(run(cli, ["why", str(results[0])]).exception, (ValueError, SystemExit))


def test_a_line_of_other_code_has_at_most_three_modules():
    made = [("train", ["a.py", "b.py"]), ("train", ["b.py", "c.py", "d.py", "e.py"]), ("draw", ["a.py"])]
    assert by_rule(made) == [
        "train: made by other code (a.py, b.py, c.py, ...)",
        "draw: made by other code (a.py)",
    ]
