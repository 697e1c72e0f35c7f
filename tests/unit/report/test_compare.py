"""Test the comparison of evaluations: summary.json, tables and figures."""

import json

import pytest

from spider.common.files import sha256
from spider.evaluation.result import BITS, SHARE, Result, Row
from spider.report.summary import Summary
from spider.report.tables import compare
from tests.unit.evaluation.stages import COMPRESSORS, demo, write_benchmark, write_stage


def rates_of(stage):
    """Return the rates of the baselines of a compared stage."""
    return {row.label: row.value for row in stage.results["baselines"].rows}


def test_the_summary_and_the_table_hold_scores_costs_and_baselines(tmp_path):
    write_benchmark(tmp_path / "benchmarks", "train", "demo-main", 10.5, 2.0)
    paths = demo(tmp_path / "runs")[::-1]  # stages are in the order of training for any order of the files
    summary = compare(paths, benchmarks=tmp_path / "benchmarks", output=tmp_path / "report")
    assert {p.name for p in (tmp_path / "report").iterdir()} == {"summary.json", "table.md"}
    plain = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert plain == summary.plain() and Summary.read(tmp_path / "report" / "summary.json") == summary
    run = plain["runs"]["demo"]
    assert run["order"] == ["warmup", "main", "anneal"]
    shown = {"bpb": 2.21, "steps": 400, "bytes": 1_600_000, "seconds": 12.5, "global_step": 500}
    assert shown.items() <= run["stages"]["main"].items()
    assert rates_of(summary.runs["demo"].stages["main"]) == COMPRESSORS
    assert plain["seconds_by_rule"] == {"train": 12.5}
    table = (tmp_path / "report" / "table.md").read_text().partition("## Wall time")[0]
    lines = [ln for ln in table.splitlines() if ln.startswith("|")]
    assert len({ln.count("|") for ln in lines}) == 1
    scores = "|  | each document alone | with what came before |"
    assert lines[0].startswith(f"{scores} parameters | trained on | time | steps | context | strict, each ")
    facts = "1.00 k | 2.80 MB | 38 s | 700 | 128 to 256 ids"
    assert f"| **demo / anneal** | **2.0500** | 1.9500 | {facts} | 2.0600 | 1.9600 |" in lines
    assert "| demo / warmup | 3.0200 | 2.9200 | 1.00 k | 400 kB | 12 s |" in "\n".join(lines)
    assert "| xz -9 | 2.3900 | 2.3400 |  |  |  |  | the document, or all before |  |  |" in lines
    names = [ln.split("|")[1].strip() for ln in lines[-4:]]
    assert names == ["bzip2 -9", "xz -9", "zstd --ultra -22", "zlib -9"]


def test_runs_on_different_texts_keep_their_own_compressors_and_tables(tmp_path):
    other = {"zlib": 1.7, "bz2": 1.3, "xz": 1.4, "zstd": 1.45}
    paths = demo(tmp_path / "runs")
    paths += demo(tmp_path / "runs", "news", -0.9, data="news", sha="b" * 64, compressors=other)
    summary = compare(paths, output=tmp_path / "report")
    assert {run: rates_of(one.last) for run, one in summary.runs.items()} == {
        "demo": COMPRESSORS,
        "news": other,
    }
    markdown = (tmp_path / "report" / "table.md").read_text()
    first, second = markdown.split("## Held-out text of news")
    assert "demo / anneal" in first and "news / anneal" not in first and "1.4000" not in first
    assert "news / anneal" in second and "demo / anneal" not in second and "1.4000" in second


def test_a_foreign_model_has_a_row_and_one_with_a_lossy_tokenizer_a_table_of_its_own(tmp_path):
    runs, others = demo(tmp_path / "runs"), tmp_path / "foreign"
    none = {"training": {"steps": 0, "global_step": 0, "tokens": 0, "bytes": 0, "seconds": 0}}
    keeps = write_stage(others, "gpt2", "foreign", 0, 1.5, global_step=0, steps=0, compressors={}, **none)
    none |= {"lossless": False, "sha": "c" * 64}
    lossy = write_stage(others, "bert", "foreign", 0, 1.2, global_step=0, steps=0, compressors={}, **none)
    summary = compare(runs, foreign=[keeps, lossy], output=tmp_path / "report")
    assert [*summary.runs] == ["demo"] and [*summary.foreign] == ["gpt2", "bert"]
    markdown = (tmp_path / "report/table.md").read_text()
    same, decoded = markdown.split("## Held-out text of pydocs†")
    own = next(line for line in same.splitlines() if line.startswith("| gpt2 (lossless tokenizer"))
    assert "1.5000" in own and "bert" not in same
    assert "| bert (lossy tokenizer of its own) | 1.2000†" in decoded and "gpt2" not in decoded
    assert ", for demo" not in markdown, "only runs have baselines"


def test_only_scores_on_decoded_text_are_marked(tmp_path):
    row = Row(name="overlap/bpb_outside", label="outside overlap", value=1.31, unit=BITS)
    copies = {"overlap": Result(title="Overlap", rows=[row])}
    plain = demo(tmp_path / "runs")
    paths = [*plain, *demo(tmp_path / "runs", "sp", -0.9, sha="b" * 64, lossless=False, results=copies)]
    summary = compare(paths, output=tmp_path / "report")
    texts = [one.last.text for one in summary.runs.values()]
    assert texts == ["pydocs (500,000 bytes)", "pydocs† (500,000 bytes)"]
    table = (tmp_path / "report/table.md").read_text()
    first, second = table.split("## Held-out text of pydocs†")
    assert "| **sp / anneal** | **1.1500†** | 1.0500† |" in second
    assert "| 1.1600† | 1.0600† | 1.3100† |" in second
    assert "| xz -9 | 2.3900† |" in second and "| xz -9 | 2.3900 |" in first and "†" not in first
    assert "† of decoded text: the tokenizer does not keep newlines and runs of spaces" in second
    compare(plain, output=tmp_path / "plain")
    assert not [path for path in (tmp_path / "plain").iterdir() if "†" in path.read_text()]


def test_a_file_with_results_beside_the_evaluation_is_shown_without_being_named_anywhere(tmp_path):
    """A column, a badge, a table of its own, and its text in the page; of other weights, nothing."""
    runs = demo(tmp_path / "runs")
    rows = [
        Row(name="tidy", label="tidiness", value=3, column=True),
        Row(name="seal", label="seal", value=None, text="broken", tone="bad", column=True, note="it leaks"),
        Row(name="own", label="own number", value=0.25, unit=SHARE),
    ]
    told = {"weights": "w", "result": Result(title="Tidying", rows=rows).model_dump()}
    path = runs[-1].with_name("tidy.json")
    path.write_text(json.dumps(told))
    summary = compare(runs, output=tmp_path / "report")
    table = (tmp_path / "report/table.md").read_text()
    assert "| context | tidiness | seal |" in table and "| 128 to 256 ids | 3 | broken |" in table
    assert "## Tidying" in table and "| demo / anneal | 25.0% |" in table
    assert "demo / anneal, seal: broken. it leaks." in table
    assert [row.text for row in summary.runs["demo"].last.badges] == ["broken"]
    path.write_text(json.dumps(told | {"weights": "others"}))
    compare(runs, output=tmp_path / "report")
    assert "tidiness" not in (tmp_path / "report/table.md").read_text()
    path.write_text(json.dumps({"result": {"title": 3}}))
    with pytest.raises(ValueError, match=r"tidy.json: not a result \(tidy.title: .*delete it and run"):
        compare(runs, output=tmp_path / "report")


def test_a_badge_of_another_evaluation_is_stale(tmp_path):
    runs = demo(tmp_path / "runs")
    badge = Row(name="seal", label="seal", value=None, text="good", tone="good", column=True, note="dry")
    found = {"evaluation": sha256(runs[-1]), "result": Result(title="Seal", rows=[badge]).model_dump()}
    runs[-1].with_name("seal.json").write_text(json.dumps(found))
    shown = [compare(runs, output=tmp_path / "report").runs["demo"].last.badges[0]]
    runs[-1].write_text(runs[-1].read_text() + "\n")
    shown += [compare(runs, output=tmp_path / "report").runs["demo"].last.badges[0]]
    assert [(one.text, one.tone) for one in shown] == [("good", "good"), ("stale", "bad")]
    assert shown[1].note == "dry; it is of another evaluation than the one of today"


def test_missing_repeated_and_old_evaluations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([], output=tmp_path)
    path = write_stage(tmp_path, "a", "s", 0, 2.0, global_step=100)
    with pytest.raises(ValueError, match="a/s was already given"):
        compare([path, path], output=tmp_path)
    old = write_stage(tmp_path, "b", "s", 0, 2.0, global_step=100, format=7)
    with pytest.raises(ValueError, match=r"b/s/evaluation\.json: an evaluation of format 7.*delete it"):
        compare([old], output=tmp_path)
    with pytest.raises(ValueError, match=r"absent\.json: no such file"):
        compare([tmp_path / "absent.json"], output=tmp_path)


@pytest.mark.parametrize(
    "stages, best",
    [
        ([(2.0, {}), (1.5, {}), (1.6, {})], "1"),
        ([(1.2, {"sha": "b" * 64}), (1.6, {}), (1.7, {})], "1"),  # the first was scored on another text
        ([(1.2, {}), (1.1, {"sha": "b" * 64, "lossless": False})], None),
    ],
)
def test_the_best_stage_is_one_that_was_scored_on_the_text_of_the_last(tmp_path, stages, best):
    paths = [
        write_stage(tmp_path / "runs", "a", str(index), index, bpb, global_step=100, **more)
        for index, (bpb, more) in enumerate(stages)
    ]
    assert compare(paths, output=tmp_path / "report").runs["a"].best == best
