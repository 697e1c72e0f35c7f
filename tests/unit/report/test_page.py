"""Test the page of a run: numbers, digests, missing files and hostile text."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from spider.checkpoints.metrics import read_rows
from spider.common.files import read_json, sha256, write_json
from spider.common.formatting import quantity
from spider.common.results import Results
from spider.config import load_config
from spider.report.page import FIGURES, render
from tests.unit.report.finished import config_of, encode_text, finished_run, train_stage


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("report") / "results")


@pytest.fixture
def copied(made, tmp_path):
    """The configuration and a copy of the results, to be damaged."""
    shutil.copytree(made[1].root, tmp_path / "results")
    return made[0], Results(tmp_path / "results")


def section(page: str, name: str) -> str:
    return page.split(f'<h2 id="{name}">')[1].split("<h2 ")[0]


def test_the_page_shows_the_numbers_of_the_files(made):
    config, results = made
    page = render(config, results, "small")
    scores, training = section(page, "scores"), section(page, "training")
    found = read_json(results.stage("small", "second").evaluation)
    adapted = found["results"]["adapt"]["rows"][0]["carried"]["value"]
    assert all(f"{bits:.4f}" in scores for bits in (found["bpb"], found["bpb_carried"], adapted))
    assert "Each document alone: <strong>" in page and "With what came before: <strong>" in page
    rates = read_json(results.stage("small", "second").baselines)
    best = min(rates["results"]["baselines"]["rows"], key=lambda row: row["value"] or 99)
    assert f"<th>{best['label']}</th>" in scores and f"{best['value']:.4f}" in scores
    assert f"probabilities of all ids sum to one within {found['deviation']:.1g}" in scores
    assert "not finished" not in page
    assert training.count("<figure") == training.count("<svg") == 4
    rows = {
        row.step: row.metrics.get("val/bpb") for row in read_rows(results.stage("small", "first").metrics)
    }
    lowest = min((step for step, bpb in rows.items() if bpb), key=rows.__getitem__)
    assert f"first <b>{rows[lowest]:.4f}</b> after step {lowest}" in training
    assert "Bytes per patch" in section(page, "inside") and "Expert load" in section(page, "inside")
    assert f"<dd>{quantity(found['parameters'], '')}<small>parameters" in page
    tokens = [read_json(results.stage("small", one).receipt)["tokens"] for one in ("first", "second")]
    assert f"<dd>{quantity(sum(tokens) * found['flops_per_token'], 'FLOP')}<small>forward" in page


def test_the_page_has_the_chain_from_the_raw_file_to_the_scores(made):
    config, results = made
    shown = section(render(config, results, "small"), "provenance")
    metadata = results.shards("text") / "metadata.json"
    files = [results.raw("text", "000"), metadata]
    digests = [read_json(metadata)["digest"]]
    for stage in ("first", "second"):
        folder = results.stage("small", stage)
        files += [folder.receipt, folder.evaluation]
        digests += [read_json(folder.receipt)["weights"]]
    assert all(digest in shown for digest in (*digests, *map(sha256, files)))
    assert "broken" not in shown and "files are those that the jobs read and wrote" in shown


def test_a_broken_link_is_named(copied):
    config, results = copied
    first = results.stage("small", "first").receipt
    write_json(first, read_json(first) | {"weights": "changed"})
    shown = section(render(config, results, "small"), "provenance")
    named = re.findall(r'<b>([^<]*)</b>(?:(?!<li).)*?<div class="problem">([^<]*)', shown, re.S)
    assert [where for where, _ in named] == ["small/first"]
    assert "runs/small/first/train.json is not the one that `" in named[0][1]


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
    assert "Stage first has not begun: <code>spider train small/first</code>" in page
    encode_text(results)
    train_stage(config, results, "first", evaluated=False)
    page = render(config, results, "small")
    assert "trained and not evaluated: <code>spider evaluate small/first</code>" in page
    assert "Stage second has not begun" in page and "This run is not finished" in page
    # A killed training leaves rows and checkpoints, but no receipt.
    (results.stage("small", "first").receipt).unlink()
    page = render(config, results, "small")
    assert (
        "Stage first is not finished: step 20 of 20, logged" in page and "No stage is evaluated yet" in page
    )


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


#: A module that is None in `sys.modules` cannot be imported.
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("torch", "mlflow", "datasets"))
from spider.cli import cli
for words in (["draw", "small/second"], ["page", "small"]):
    cli(["--log", "report.log", "report", *words], standalone_mode=False)
"""


def test_figures_and_page_are_made_without_a_model_or_torch_and_a_job_notes_its_code(copied, tmp_path):
    results = copied[1]
    folder = results.stage("small", "second")
    before = {folder.path / name: (folder.path / name).read_bytes() for name in FIGURES}
    for path in before:
        path.unlink()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(results.root)))
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in before} == before and results.page("small").is_file()
    noted = read_json(tmp_path / "report.json")
    code = read_json(results.root / f"code/{noted['code']}.json")
    assert "spider/report/figures.py" in code["modules"] and "spider/model/layers.py" not in code["modules"]
