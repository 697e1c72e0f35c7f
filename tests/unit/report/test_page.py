"""Test the page of a run: numbers, digests, missing files and hostile text."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from spider_trust.traces import Place, Read, Stretch, Trace

from spider.common.files import read_json, write_json
from spider.common.formatting import quantity
from spider.common.results import Results
from spider.config import load_config
from spider.report.page import draw_stage, render, settings_of
from spider.report.provenance import chain, read_datasets
from spider.report.stages import read_stages
from spider.training.metrics import read_rows
from tests.unit.report.finished import config_of, encode_text, finished_run, train_stage, write_job_files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("report") / "results")


@pytest.fixture
def copied(made, tmp_path):
    """The configuration and a copy of the results, to be damaged."""
    shutil.copytree(made[1].root, tmp_path / "results")
    return made[0], Results(tmp_path / "results")


def problems(config, results):
    stages = read_stages(config, results, "small")
    return [link.problem for link in chain(stages, read_datasets(results, stages)) if link.problem]


def section(page: str, name: str) -> str:
    return page.split(f'<h2 id="{name}">')[1].split("<h2 ")[0]


def test_the_page_shows_the_numbers_of_the_files(made):
    config, results = made
    page = render(config, results, "small")
    for stage in ("first", "second"):
        found = read_json(results.stage("small", stage).evaluation)
        adapted = found["results"]["adapt"]["rows"][0]["carried"]["value"]
        for bits in (found["bpb"], found["bpb_carried"], adapted):
            assert f"{bits:.4f}" in section(page, "scores")
    scores = section(page, "scores")
    assert "Each document alone: <strong>" in page and "With what came before: <strong>" in page
    rates = read_json(results.stage("small", "second").baselines)
    best = min(rates["results"]["baselines"]["rows"], key=lambda row: row["value"] or 99)
    assert f"<th>{best['label']}</th>" in scores and f"{best['value']:.4f}" in scores
    assert f"probabilities of all ids sum to one within {found['deviation']:.1g}" in section(page, "scores")
    assert "not finished" not in page and "digest" not in section(page, "costs")
    assert section(page, "training").count("<figure") == 4
    assert section(page, "training").count("<svg") == 4
    for stage, steps in (("first", (5, 10, 15, 20)), ("second", (25, 30))):
        rows = {
            row.step: row.metrics.get("val/bpb") for row in read_rows(results.stage("small", stage).metrics)
        }
        assert tuple(step for step, bpb in rows.items() if bpb is not None) == steps
        lowest = min(steps, key=rows.__getitem__)
        assert f"{stage} <b>{rows[lowest]:.4f}</b> after step {lowest}" in section(page, "training")
    for title in ("Bytes per patch", "Expert load"):
        assert title in section(page, "inside"), title
    assert f"<dd>{quantity(found['parameters'], '')}<small>parameters" in page
    work = sum(
        read_json(results.stage("small", stage).receipt)["tokens"] * found["flops_per_token"]
        for stage in ("first", "second")
    )
    assert f"<dd>{quantity(work, 'FLOP')}<small>forward" in page


def test_scores_on_decoded_text_are_marked(copied):
    config, results = copied
    assert "†" not in render(config, results, "small")
    paths = [results.stage("small", stage).evaluation for stage in ("first", "second")]
    for path in paths:
        write_json(path, read_json(path) | {"lossless": False})
    page, found = render(config, results, "small"), read_json(paths[1])
    for path in paths:
        assert f">{read_json(path)['bpb']:.4f}†<" in section(page, "scores")
    assert f"<strong>{found['bpb']:.3f}†</strong>" in page
    assert "† of decoded text: the tokenizer does not keep newlines" in section(page, "scores")


def test_the_page_has_every_digest_from_the_raw_file_to_the_checkpoint(made):
    config, results = made
    shown = section(render(config, results, "small"), "provenance")
    metadata = read_json(results.shards("text") / "metadata.json")
    digests = [metadata["digest"], metadata["source"]["files"][0]["sha256"]]
    digests += [shard["sha256"] for split in metadata["splits"].values() for shard in split["shards"]]
    for stage in ("first", "second"):
        receipt = read_json(results.stage("small", stage).receipt)
        manifest = read_json(results.stage("small", stage).path / receipt["checkpoint"] / "manifest.json")
        digests += [receipt["identity"], manifest["digest"], receipt["weights"]]
        digests += [file["sha256"] for file in manifest["files"].values()]
    assert all(digest in shown for digest in digests)
    assert problems(config, results) == [] and "broken" not in shown


def test_a_broken_link_is_named(copied):
    config, results = copied
    metadata = read_json(results.shards("text") / "metadata.json")
    write_json(results.shards("text") / "metadata.json", metadata | {"digest": "another"})
    first = results.stage("small", "first").receipt
    write_json(first, read_json(first) | {"weights": "changed"})
    found = "\n".join(problems(config, results))
    assert f"dataset text was {metadata['digest']}, now it is another" in found
    assert "stage first now ends with weights changed" in found
    assert "the receipt names weights changed" in found
    assert 'class="stage broken"' in render(config, results, "small")


def test_text_of_users_is_escaped(made):
    page = render(*made, "small")
    assert "<script>window.hacked" not in page and "<img" not in page
    assert "&lt;script&gt;window.hacked" in page
    assert "\x1b" not in page and "\u202e" not in page
    assert "<script" not in page


def test_the_page_of_an_unfinished_run_names_what_is_missing(tmp_path):
    plain = config_of(tmp_path / "results")
    config, results = load_config(plain), Results(tmp_path / "results")
    page = render(config, results, "small")
    assert (
        "Stage first has not begun: <code>spider train small/first</code>" in page
        and "No step was logged" in page
    )
    encode_text(results)
    train_stage(config, results, "first", evaluated=False)
    page = render(config, results, "small")
    assert "trained and not evaluated: <code>spider evaluate small/first</code>" in page
    assert "Stage second has not begun" in page and "This run is not finished" in page
    # A killed training leaves rows and checkpoints, but no receipt.
    (results.stage("small", "first").receipt).unlink()
    page = render(config, results, "small")
    assert "Stage first is not finished: step 20 of 20, logged" in page
    assert section(page, "training").count("<figure") == 4 and "No stage is evaluated yet" in page


def test_notes_replace_the_figures_of_parts_that_a_model_does_not_have(copied):
    config, results = copied
    path = results.stage("small", "second").evaluation
    evaluation = read_json(path)
    experts = {"kind": "note", "title": "Experts", "text": "experts are switched off"}
    off = {"kind": "note", "title": "Loops", "text": "no curve was measured"}
    inside = evaluation["results"]["segments"]
    changed = evaluation["results"] | {
        "loops": evaluation["results"]["loops"] | {"figures": [off]},
        "segments": inside | {"figures": [*inside["figures"][:2], experts]},
    }
    write_json(path, evaluation | {"results": changed})
    sample = path.with_name("sample.json")
    write_json(sample, read_json(sample) | {"text": ""})
    write_json(
        path.parent.parent / "first/evaluation.json",
        evaluation | {"stage": "first", "results": changed},
    )
    page = render(config, results, "small")
    for note in ("no curve was measured", "experts are switched off"):
        assert f'<p class="none">{note}' in section(page, "inside"), note
    assert "Held-out text in patches" not in page and "after stage first" in section(page, "text")


def test_a_missing_sample_and_one_of_other_weights_are_named(copied):
    config, results = copied
    folder = results.stage("small", "second")
    write_json(folder.sample, read_json(folder.sample) | {"weights": "others"})
    page = render(config, results, "small")
    assert "sample of stage second is of other weights: <code>spider sample small/second</code>" in page
    folder.sample.unlink()
    page = render(config, results, "small")
    assert "Stage second has written no sample: <code>spider sample small/second</code>" in page
    assert "after stage second" not in section(page, "text")


def traced(results, text, *spans):
    """Give the second stage a sample and a trace with these stretches: bytes and number of occurrences."""
    folder = results.stage("small", "second")
    write_json(folder.sample, read_json(folder.sample) | {"text": text})
    place = Place(
        dataset="text",
        split="train",
        part="000",
        document=4,
        tokens=(10, 40),
        row=1700,
        id="<img src=x>",
        file="<script>raw</script>",
        sha256="5a" * 32,
        reads=tuple(Read("first", step, step, 0) for step in range(1, 12)),
    )
    raw = text.encode()
    stretches = [
        Stretch(
            begin=begin,
            end=end,
            text=raw[begin:end].decode(errors="replace"),
            count=count,
            places=(place,),
        )
        for begin, end, count in spans
    ]
    Trace(
        format=Trace.FORMAT,
        run="small",
        stage="second",
        datasets=("text",),
        text=text,
        least=5,
        share=0.5,
        stretches=tuple(stretches),
    ).write(folder.path / "trace.json")
    return folder


def test_traced_stretches_of_the_sample_lead_to_their_documents(copied):
    config, results = copied
    assert "Stretches in the training text" not in render(config, results, "small")
    traced(results, "A<script>evil</script> and more", (1, 22, 1), (26, 31, 7))
    page = render(config, results, "small")
    shown = section(page, "text")
    marked = '<span class="t3" title="stretch 1: 21 bytes, once">&lt;script&gt;evil&lt;/script&gt;</span>'
    assert marked in shown and '<span class="t0" title="stretch 2: 5 bytes, 7 times"> more</span>' in shown
    assert "50% of this text stands in the training text, in stretches of at least 5 bytes" in shown
    table = section(page, "scores").split("Stretches in the training text")[1]
    entry, other = table.split("<tr class")[1:3]
    assert "text/000:1700, id &lt;img src=x&gt;, raw file &lt;script&gt;raw" in entry
    assert "5a" * 32 in entry and "first 1, first 2, " in entry
    assert "first 8 and 3 more" in entry and "first 9" not in entry
    assert "spider seen text/000:1700 --run small" in entry and "<td>7</td>" in other
    assert "<script>" not in page and "<img" not in page


def test_the_longest_of_overlapping_stretches_has_the_text_and_may_end_inside_a_character(copied):
    config, results = copied
    # Bytes: each ä has two. The first stretch begins and ends inside one, and the third is hidden.
    traced(results, "xäabcdefgäyz12", (2, 11, 2), (8, 15, 2), (4, 9, 2))
    shown = section(render(config, results, "small"), "text").split("repeats the training text")[1]
    text = shown.split('<pre class="segments">')[1].split("</pre>")[0]
    words = re.findall(r'<span class="t\d" title="stretch (\d)[^>]*>(.*?)</span>', text)
    assert words == [("1", "abcdefgä"), ("2", "yz1")]
    assert re.sub(r"<[^>]*>", "", text) == "xäabcdefgäyz12"


def test_changed_settings_are_named_and_the_trained_ones_are_shown(copied):
    results = copied[1]
    plain = config_of(results.root)
    plain["runs"]["small"]["stages"][0]["lr"] = 5e-3
    page = render(load_config(plain), results, "small")
    assert "Stage first was trained with other settings than the current configuration has" in page
    assert "5e-3" not in section(page, "training") and "1e-3, constant" in section(page, "training")


def test_a_run_that_was_trained_by_hand_is_found_by_its_folder(copied):
    config, results = copied
    shutil.move(results.run("small"), results.run("small-abc"))
    page = render(config, results, "small-abc")
    assert "trained by hand, with settings" in page and "run.yaml" not in page
    with pytest.raises(ValueError, match=r"no run 'smal-abc' in .*; did you mean \"small-abc\"\?"):
        render(config, results, "smal-abc")


def test_the_configuration_on_the_page_trains_the_same_run(made):
    import html

    config, results = made
    page = render(config, results, "small")
    shown = html.unescape(re.findall(r'<pre class="code">(results:.*?)</pre>', page, re.S)[0])
    again = load_config(yaml.safe_load(shown))
    assert again.results == config.results  # the commands name it
    for stage in ("first", "second"):
        assert again.stage("small", stage).identity == config.stage("small", stage).identity
        assert again.stage("small", stage).evaluation == config.stage("small", stage).evaluation


def test_settings_include_the_datasets_of_like_and_of_the_tokenizer():
    source = {"source": {"kind": "mock"}}
    run = {"data": "cut", "model": "gpt-cpu", "stages": [{"name": "a", "max_steps": 1}]}
    plain = {
        "datasets": {"text": source, "other": source, "cut": {"like": "text", "tokenizer": "t"}},
        "tokenizers": {"t": {"data": "text", "vocab_size": 300}},
        "runs": {"small": run},
    }
    config = load_config(plain)
    again = load_config(yaml.safe_load(settings_of(config, "small", ["cut"])))
    assert again.datasets.keys() == {"text", "cut"}
    assert again.stage("small", "a").identity == config.stage("small", "a").identity


def test_the_page_has_the_costs_of_each_rule(copied):
    config, results = copied
    write_job_files(results, "train", "other/main", 12.5)
    costs = section(render(config, results, "small"), "costs")
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in costs.split("<tr")]
    assert ["train", "2", "25 s", "12 s", "100 MB"] in rows and rows[-1][:3] == ["all", "4", "30 s"]


def test_the_page_has_the_commands_of_the_jobs(copied):
    config, results = copied
    page = section(render(config, results, "small"), "again")
    assert "The commands of the jobs are unknown" in page
    assert "--forceall --printshellcmds -- runs/small" in page
    write_job_files(results, "train", "small/second", 12.5, command="train small/second --threads 3 --wait")
    write_job_files(results, "train", "other/second", 12.5, command="train other/second")
    page = section(render(config, results, "small"), "again")
    assert "spider --config run.yaml train small/second --threads 3 --wait" in page
    assert "train other" not in page and "are unknown" not in page


def test_other_runs_on_the_same_text_are_compared(copied):
    plain = config_of(copied[1].root)
    plain["runs"]["twin"] = plain["runs"]["small"]
    plain["runs"]["news"] = plain["runs"]["small"]
    results = copied[1]
    for name, changed in (("twin", {"bpb": 1.25, "intervals": {}}), ("news", {"text_sha256": "another"})):
        found = read_json(results.stage("small", "second").evaluation)
        write_json(results.stage(name, "second").evaluation, found | {"run": name} | changed)
    scores = section(render(load_config(plain), results, "small"), "scores")
    assert re.search(r"<th>twin</th><td[^>]*>1\.2500", scores) and "<th>news</th>" not in scores


def test_the_page_of_a_long_run_stays_small(copied):
    config, results = copied
    path = results.stage("small", "second").metrics
    row = json.loads(path.read_text().splitlines()[0])
    receipt = results.stage("small", "second").receipt
    write_json(receipt, read_json(receipt) | {"steps": 20_000, "global_step": 20_020})
    path.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(21, 20_021)))
    assert len(render(config, results, "small")) < 400_000


def test_the_page_of_a_stage_that_learned_answers_shows_their_score_first(copied):
    config, results = copied
    path = results.stage("small", "second").evaluation
    write_json(path, read_json(path) | {"learn": "assistant", "bpb_assistant": 1.524, "bpb": 1.824})
    verdict = " ".join(render(config, results, "small").split('class="verdict">')[1].split("</p>")[0].split())
    assert "<strong>1.524</strong> bits per byte of the assistant&#39;s answers" in verdict
    assert "1.824 of all of that text" in verdict and "above" not in verdict


def test_runs_that_learned_answers_are_sorted_by_their_answers(copied):
    _, results = copied
    plain = config_of(results.root)
    plain["runs"]["twin"] = plain["runs"]["small"]
    path = results.stage("small", "second").evaluation
    measured = read_json(path) | {"learn": "assistant", "bpb_assistant": 1.5, "bpb": 1.8}
    write_json(path, measured)
    better = {"run": "twin", "bpb_assistant": 1.25, "bpb": 1.9}
    write_json(results.stage("twin", "second").evaluation, measured | better)
    scores = section(render(load_config(plain), results, "small"), "scores")
    others = scores.split("All runs on the same text")[1]
    ranked = re.findall(r"<th>(twin|small)</th><td[^>]*>([\d.]+)", others)
    assert ranked == [("twin", "1.2500"), ("small", "1.5000")]


def test_an_evaluation_of_another_format_is_refused(copied):
    config, results = copied
    path = results.stage("small", "second").evaluation
    write_json(path, read_json(path) | {"format": 1})
    with pytest.raises(ValueError, match=r"an evaluation of format 1, this Spider reads 3; delete it"):
        render(config, results, "small")


def test_all_of_a_finished_run_is_shown_without_a_model_or_torch(copied):
    """Make the figures, the comparison, the page and the terminal summary."""
    results = copied[1]
    folders = [results.stage("small", stage) for stage in ("first", "second")]
    before = {path: path.read_bytes() for folder in folders for path in draw_stage(folder)}
    for path in before:
        path.unlink()
    code = """
import json, sys
from pathlib import Path
from spider.config import load_config
from spider.report.tables import compare
from spider.report.page import draw_stage, write_report
from spider.report.tables import terminal_summary
from spider.common.results import Results, StageFolder
plain, stages = json.loads(sys.argv[1]), [Path(one) for one in sys.argv[2:]]
results = Results(Path(plain["results"]))
for stage in stages:
    draw_stage(StageFolder(stage))
compare([stage / "evaluation.json" for stage in stages], benchmarks=None, output=results.report)
write_report(load_config(plain), results, "small", results.page("small"))
terminal_summary(results.report / "summary.json")
print([name for name in ("torch", "mlflow", "datasets") if name in sys.modules])
"""
    arguments = [json.dumps(config_of(results.root)), *(str(folder.path) for folder in folders)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert {path: path.read_bytes() for path in before} == before
