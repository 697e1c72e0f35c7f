"""The card in an export: what it says and does not say, that a hub takes it, that a person's words stay."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.repocard_data import model_index_to_eval_results

from spider.checkpoints.inventory import examine
from spider.common import files
from spider.common.results import Results
from spider.config import load_config
from spider.evaluation.result import BITS, SHARE, Number, Result, Row
from spider.publish.export import export
from spider.publish.push import push
from spider.training.stage import train
from tests.unit.data.model_hub import TOKEN, problems_of_card, serving_models
from tests.unit.evaluation.stages import write_stage
from tests.unit.records import write_job
from tests.unit.small_training import DEFAULTS, MODEL

HOSTILE = "</table><img src=x> | `a` \\ \x1b[31m\nline"


def config_of(results):
    """Two stages on two datasets, one from a hub, as a person writes it."""
    hub = {"kind": "hub", "repo": "acme/texts", "revision": "r1"}
    hub["files"] = ["https://me:pass_word_1@host/a.parquet"]
    toy = {"source": {"kind": "local", "files": ["000.parquet"]}, "validation": 0.1}
    run = {
        "data": "toy",
        "model": MODEL,
        "precision": "fp32",
        "defaults": {**DEFAULTS, "max_steps": 2},
        "stages": [{"name": "a"}, {"name": "b", "data": "web"}],
    }
    datasets = {
        "toy": {**toy, "license": "cc-by-4.0", "language": "en"},
        "web": {"source": hub, "license": "odc-by", "language": "en"},
        "unused": {"source": {"kind": "pydocs"}, "license": "mit"},
    }
    return {"results": str(results), "datasets": datasets, "runs": {"small": run, "other": run}}


@pytest.fixture(scope="module")
def made(tmp_path_factory, shards):
    """A results folder with both stages, scored: the scores are written here, the training is real."""
    torch.set_num_threads(1)
    results = Results(tmp_path_factory.mktemp("card") / "results")
    config = load_config(plain := config_of(results.root))
    files.write_json(results.root / "spider.json", {"format": 1, "spider": "0"})
    files.write_text(results.root / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    before = None
    for name in ("a", "b"):
        folder = results.stage("small", name)
        train(config.stage("small", name), folder.path, shards, previous=before)
        before = folder.receipt
        score(results, name)
    write_job(results.root, "runs/small/b/train.json", rule="train", commit="0123abc-dirty")
    return results


def score(results, stage, **changed):
    """Write an evaluation.json of a stage's own weights."""
    folder = results.stage("small", stage)
    receipt, scratch = files.read_json(folder.receipt), results.root.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    columns = {"questions": Number(value=40), "by guessing": Number(value=0.25, unit=SHARE)}
    hub = {"hub_metric": "accuracy", "hub_dataset": "cloze"}
    task = Row(name="tasks/cloze", label="cloze", value=0.425, unit=SHARE, error=0.08, columns=columns, **hub)
    copies = Row(name="overlap/bpb_outside", label="outside overlap", value=2.5, unit=BITS)
    measured = {"overlap": Result(title="Overlap", rows=[copies])}
    measured["tasks"] = Result(title="Tasks", head="task", value="right", rows=[task])
    told = {"data": "web", "weights": receipt["weights"], "flops_per_token": 1e6, "results": measured}
    told |= changed
    path = write_stage(scratch, "small", stage, 0, 2.125, global_step=receipt["global_step"], **told)
    shutil.copy(path, folder.evaluation)
    shutil.copy(path.with_name("baselines.json"), folder.baselines)


@pytest.fixture
def results(made, tmp_path):
    return Results(shutil.copytree(made.root, tmp_path / "results"))


def stage(results, name="b"):
    return results.stage("small", name).path


def text(folder):
    return (folder / "README.md").read_bytes().decode()


def sections(card):
    return re.findall(r"^#+ (.*)", re.sub(r"(?s)```.*?```", "", card.partition("\n---\n")[2]), re.M)


# ------------------------------------------------------------------------------------------- what it says


def test_it_says_what_the_run_knows(made, tmp_path):
    export(stage(made), tmp_path / "out")
    card, receipt = text(tmp_path / "out"), files.read_json(made.stage("small", "b").receipt)
    first = files.read_json(made.stage("small", "a").receipt)
    for said in (
        "# small, stage b",
        "parameters over bytes, family `spider`, trained on",
        "It reads up to 32 ids at a time.",
        "AutoModelForCausalLM.from_pretrained(REPO, trust_remote_code=True)",
        "pip install -e '.[hf]'",
        'spider.load_model("FOLDER")',
        f"| toy | local files | cc-by-4.0 | en | `{first['data_digest']}` |",
        f"| web | acme/texts at r1 | odc-by | en | `{receipt['data_digest']}` |",
        "On 500,000 bytes of held-out text of web (90 documents):",
        "| **this model** | **2.1250** | 2.0250 | 1.00 k |",
        "| 128 to 256 ids | 2.1350 | 2.0350 | 2.5000 |",
        "| bzip2 -9 | 2.3100 | 2.2600 |  |  |  |  | the document, or all before |  |  |  |",
        "the probabilities of all ids sum to one within 3e-07.",
        "| cloze | 42.5% ± 8.0 | 40 | 25.0% |",
        f"| weights | `{receipt['weights']}` |",
        "at commit `0123abc` with changes that are not committed.",
        "snakemake --cores all --configfile run.yaml runs/small",
    ):
        assert said in card, said
    assert f"| all | 4 | {receipt['bytes'] + first['bytes']} B |" in card and "| 2.56e+08" not in card
    assert str(made.root) not in card and "pass_word_1" not in card and "not in this folder" not in card
    assert sections(card) == ["small, stage b", "Use", "Data", "Scores", "Tasks", "Costs", "Digests",
                              "Reproduce it", "Limits"]  # fmt: skip


def test_a_hub_takes_its_front_matter_and_reads_the_scores(made, results, tmp_path, monkeypatch):
    export(stage(made), tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    with serving_models() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        card.validate()
        assert hub.validated == [str(card)]
    data = yaml.safe_load(text(tmp_path / "out").split("---\n")[1])
    assert data["license"] == "other" and data["license_name"] == "cc-by-4.0-and-odc-by"
    assert data["language"] == ["en"] and data["datasets"] == ["acme/texts"]
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert data["tags"] == ["spider", "byte-level"]
    name, (bits, cloze) = model_index_to_eval_results(data["model-index"])
    assert name == "small" and (bits.metric_type, bits.metric_value) == ("bits_per_byte", 2.125)
    assert (bits.dataset_type, bits.dataset_name) == ("acme/texts", "web, held out")
    assert (cloze.dataset_type, cloze.metric_type, cloze.metric_value) == ("cloze", "accuracy", 0.425)


@pytest.mark.parametrize(
    ("of_toy", "of_web", "said"),
    [
        ("mit", None, {}),
        ("other", "mit", {"license": "other", "license_name": "other-and-mit"}),
    ],
)
def test_the_licence_is_that_of_all_its_data_or_none(results, tmp_path, of_toy, of_web, said):
    plain = config_of(results.root)
    plain["datasets"]["toy"]["license"], plain["datasets"]["web"]["license"] = of_toy, of_web
    files.write_text(results.root / "config.yaml", yaml.safe_dump(plain))
    export(stage(results), tmp_path / "out")
    data = yaml.safe_load(text(tmp_path / "out").split("---\n")[1])
    assert {k: v for k, v in data.items() if "license" in k} == said
    assert ("not specified" in text(tmp_path / "out")) == (of_web is None)


def test_scores_of_other_weights_do_not_stand_in_it(results, tmp_path):
    score(results, "b", weights="another")
    export(stage(results), tmp_path / "out")
    card = text(tmp_path / "out")
    assert "There are no scores of these weights." in card and "model-index" not in card
    assert not {"Scores", "Tasks"} & {*sections(card)} and "2.1250" not in card


def test_decoded_text_and_other_results_and_names_that_would_be_markup(results, tmp_path):
    score(results, "b", lossless=False, names={"zlib": HOSTILE})
    weights = files.read_json(results.stage("small", "b").receipt)["weights"]
    columns, hub = {"items": Number(value=7)}, {"hub_metric": "acc", "hub_dataset": HOSTILE}
    row = Row(name="mine/x", label=f"{HOSTILE}, acc", value=0.5, error=0.1, columns=columns, **hub)
    found = Result(title="Standard tasks", rows=[row], notes=["Run on `x`."])
    plain = {"weights": weights, "result": found.model_dump()}
    files.write_json(results.stage("small", "b").path / "mine.json", plain)
    export(stage(results), tmp_path / "out")
    card = text(tmp_path / "out")
    assert "| **this model** | **2.1250†** | 2.0250† |" in card and "† of decoded text" in card
    shown = "&lt;/table>&lt;img src=x> \\| 'a' \\\\ �[31m line"
    assert f"| {shown}, acc | 0.5000 ± 0.1000 | 7 |" in card and f"| {shown} | 2.7000†" in card
    assert "Run on 'x'." in card
    results_read = model_index_to_eval_results(yaml.safe_load(card.split("---\n")[1])["model-index"])[1]
    assert results_read[-1].metric_type == "acc" and not problems_of_card(card)


# -------------------------------------------------------------------------------------------- whose words


def test_an_edited_card_is_kept_verified_and_carried_along(made, tmp_path, caplog):
    out = tmp_path / "out"
    export(stage(made, "a"), out)
    export(stage(made), out)
    assert "# small, stage b" in text(out) and "edited" not in caplog.text, "nobody's words, written anew"
    mine = text(out).replace("## Limits", "## My thoughts\r\n\r\nÜber.\n\n## Limits")
    (out / "README.md").write_bytes(mine.encode())
    assert examine(out)["good"]
    export(stage(made, "a"), out)
    assert text(out) == mine and f"{out / 'README.md'}: was edited and is kept" in caplog.text
    assert json.loads((out / "config.json").read_text())["stage"] == "a", "the model was replaced"
    export(out, tmp_path / "again")
    assert text(tmp_path / "again") == mine
    (out / "README.md").unlink()
    assert examine(out)["good"]
    export(stage(made), out)
    assert "# small, stage b" in text(out)


def test_a_stage_is_pushed_with_its_card_and_what_is_pushed_again_is_there(made, tmp_path, monkeypatch):
    """By way of an export in a folder of its own, that is gone after."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "room"))
    (tmp_path / "room").mkdir()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    export(stage(made), tmp_path / "out")
    with serving_models() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        push(stage(made), "acme/small")
        push(stage(made), "acme/small")
        repo = hub.repositories["acme/small"]
    assert repo.files() == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert len(repo.branches["main"]) == 2 and len(hub.uploaded) == 1
    assert not [*(tmp_path / "room").iterdir()]
