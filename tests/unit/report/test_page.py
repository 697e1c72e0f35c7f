"""Test the page of a run: numbers, digests, missing files and hostile text."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from spider.config import load_config
from spider.files import read_json, write_json
from spider.provenance.traces import Place, Read, Stretch, Trace
from spider.report.figures import draw_stage
from spider.report.formatting import quantity
from spider.report.page import render, settings_of
from spider.report.provenance import chain, read_datasets
from spider.report.stages import read_stages
from spider.results import Results
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
    alone, carried = section(page, "scores").split('<ul class="ranking">')[1:]
    for context, shown in (
        ("Each document alone", alone),
        ("With what came before", carried.split("</ul>")[0]),
    ):
        assert f"<h3>{context}</h3>" in page and f"{context}: <strong>" in page
        rates = read_json(results.stage("small", "second").baselines)
        for row in rates["results"]["baselines"]["rows"]:
            value = (row if shown is alone else row["carried"])["value"]
            name = f'<span class="name">{row["label"]}</span>'
            assert (name in shown) == (value is not None)
            assert value is None or f"{value:.3f}" in shown
    assert f"probabilities of all ids sum to one within {found['deviation']:.1g}" in section(page, "scores")
    assert "not finished" not in page and "digest" not in section(page, "costs")
    assert section(page, "training").count("<figure") == 4
    for stage, steps in (("first", (5, 10, 15, 20)), ("second", (25, 30))):
        rows = {
            row.step: row.metrics.get("val/bpb") for row in read_rows(results.stage("small", stage).metrics)
        }
        assert tuple(step for step, bpb in rows.items() if bpb is not None) == steps
        lowest = min(steps, key=rows.__getitem__)
        assert f"{stage} <b>{rows[lowest]:.4f}</b> after step {lowest}" in section(page, "training")
        assert f"{rows[steps[0]]:.3f} bits per byte at" in section(page, "training")
    experts = found["results"]["segments"]["figures"][2]["values"]
    assert section(page, "inside").count('<rect class="cell"') == sum(len(row) for row in experts)
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
        assert re.search(rf"<b>{read_json(path)['bpb']:.4f} \(.*\)†</b>", section(page, "scores"))
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
    assert len(re.findall(r"<script", page)) == 1


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
        assert note in section(page, "inside"), note
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
    ).write(folder.trace)
    return folder


def test_traced_stretches_of_the_sample_lead_to_their_documents(copied):
    config, results = copied
    before = render(config, results, "small")
    assert "Underlined stretches" not in before and 'class="traced' not in before
    traced(results, "A<script>evil</script> and more", (1, 22, 1), (26, 31, 7))
    shown = section(render(config, results, "small"), "text")
    linked = (
        '<a class="traced s4" id="second-text-1" href="#second-stretch-1" title="stretch 1: 21 bytes, once'
    )
    assert f'A{linked} in the training text">&lt;script&gt;evil&lt;/script&gt;<sup>1</sup></a>' in shown
    assert '<a class="traced s1" id="second-text-2"' in shown and "> more<sup>2</sup></a>" in shown
    entry, other = shown.split('<li id="second-stretch-')[1:3]
    assert "<b>text/000:1700</b>, id &lt;img src=x&gt;" in entry and "5a" * 32 in entry
    assert "raw file &lt;script&gt;raw&lt;/script&gt;, row 1,700" in entry
    assert "first 1, first 2, " in entry and "first 8 and 3 more" in entry and "first 9" not in entry
    assert "<code>spider seen text/000:1700 --run small</code>" in entry
    assert "5 bytes, 7 times; the first 1:" in other
    assert "<script>" not in shown and "<img" not in shown


def test_the_longest_of_overlapping_stretches_has_the_text_and_may_end_inside_a_character(copied):
    config, results = copied
    # Bytes: each ä has two. The first stretch begins and ends inside one, and the third is hidden.
    traced(results, "xäabcdefgäyz12", (2, 11, 2), (8, 15, 2), (4, 9, 2))
    shown = section(render(config, results, "small"), "text")
    text = shown.split("<blockquote>")[1].split("</b>", 1)[1].split("</blockquote>")[0]
    words = re.findall(r"<a [^>]*>(.*?)<sup>(\d)</sup></a>", text)
    assert words == [("abcdefgä", "1"), ("yz1", "2")]
    assert re.sub(r"<sup>\d</sup>|<[^>]*>", "", text) == "xäabcdefgäyz12"
    assert shown.count('<li id="second-stretch-') == 2


def test_a_trace_of_another_sample_is_named(copied):
    config, results = copied
    folder = traced(results, "Document and more", (0, 8, 1))
    write_json(folder.sample, read_json(folder.sample) | {"text": "another text"})
    page = render(config, results, "small")
    assert "The trace of stage second is of another sample" in page and 'class="traced' not in page


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


def test_energy_is_shown_only_for_jobs_whose_gpus_counted_it(copied):
    config, results = copied
    assert "Energy was not measured" in render(config, results, "small")
    write_job_files(results, "train", "small/second", 12.5, joules=7200)
    write_job_files(results, "train", "other/main", 12.5, joules=36e6)
    costs = section(render(config, results, "small"), "costs")
    rows = {
        row[0]: row[1:]
        for row in (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in costs.split("<tr>"))
        if row
    }
    assert rows["train"] == ["2", "25 s", "12 s", "100 MB", "2 Wh"]
    assert rows["evaluate"][-1] == "not measured" and rows["all"][-1] == "2 Wh"


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
    assert '<th>twin</th><td class="text"><b>1.2500</b>' in scores and "<th>news</th>" not in scores


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
    assert verdict.startswith("<strong>1.524</strong> bits per byte of the assistant's answers")
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
    others = scores.split("Other runs")[1]
    assert others.index('<th>twin</th><td class="text"><b>1.2500</b>') < others.index(
        '<th>small</th><td class="text"><b>1.5000</b>'
    )


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
from spider.report.compare import compare
from spider.report.figures import draw_stage
from spider.report.page import write_report
from spider.report.terminal import terminal_summary
from spider.results import Results, StageFolder
plain, stages = json.loads(sys.argv[1]), [Path(one) for one in sys.argv[2:]]
results = Results(Path(plain["results"]))
for stage in stages:
    draw_stage(StageFolder(stage))
compare([stage / "evaluation.json" for stage in stages], benchmarks=None, output=results.report)
write_report(load_config(plain), results, "small", results.page("small"))
terminal_summary(results.report / "summary.json")
print([name for name in ("torch", "matplotlib", "mlflow", "datasets") if name in sys.modules])
"""
    arguments = [json.dumps(config_of(results.root)), *(str(folder.path) for folder in folders)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert {path: path.read_bytes() for path in before} == before
