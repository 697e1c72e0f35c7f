"""`spider clean` lists what no configuration in a results folder reaches, and removes it after asking."""

import json

import filelock
import pytest
import yaml
from click.testing import CliRunner

from spider.cli import cli
from spider.common.results import Results, write_config
from spider.config import load_config
from spider.config.scored import baselines_name
from spider.workflow.clean import leftovers


def configuration(results, *runs, ngram=False):
    model = {"preset": "tiny", "ngram": {}} if ngram else "tiny"
    stages = [{"name": "main", "max_steps": 2}]
    return {
        "results": str(results),
        "tracking": {"enabled": False},
        "datasets": {"docs": {"source": {"kind": "pydocs"}, "ngram": 0.5}},
        "runs": {run: {"data": "docs", "model": model, "stages": stages} for run in runs},
    }


def fill(path, size=1000):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


@pytest.fixture
def results(tmp_path):
    """A results folder of two configurations, with what they reach and what they do not."""
    root = tmp_path / "results"
    first = configuration(root, "old", ngram=True)
    second = configuration(root, "new")
    write_config(root, first)
    write_config(root, second)
    for run, plain in (("old", first), ("new", second)):
        config = load_config(plain)
        for name in ("metrics.jsonl", "checkpoints/step-00000002/model", ".lock"):
            fill(root / "runs" / run / "main" / name)
        warmup = Results(root).warmup(run, config.stage(run, "main").shape)
        fill(warmup)
        fill(warmup.with_suffix(".compile-cache"))
    counted = load_config(first).run("old").model.ngram.counted
    fill(root / "ngram/docs" / counted / "full/index.json")
    for name in ("docs", "gone"):
        fill(root / f"raw/{name}/000.parquet")
        fill(root / f"shards/{name}/train/000.bin")
        digest = {"digest": f"digest of {name}"}
        (root / f"shards/{name}/metadata.json").write_text(json.dumps(digest))
    for name in (baselines_name(config, config.stage("new", "main")), "gone"):
        fill(root / f"baselines/{name}.json")
    fill(root / "overlap/gone.json")
    fill(root / "tokenizers/gone/tokenizer.json")
    fill(root / "ngram/docs/0123456789abcdef/full/index.json")
    fill(root / "runs/gone/main/metrics.jsonl")
    fill(root / "runs/new/gone/metrics.jsonl")
    fill(root / "runs/new/main/superseded-0123-1/checkpoints/step-00000002/model", 5000)
    fill(root / "runs/new/warmup-0123.json")
    fill(root / "runs/new/warmup-0123.compile-cache")
    fill(root / "report/runs/gone.html")
    fill(root / "report/runs/new.html")
    fill(root / "logs/train/gone/main.log")
    return root


UNREACHED = {
    "raw/gone",
    "shards/gone",
    "tokenizers/gone",
    "ngram/docs/0123456789abcdef",
    "baselines/gone.json",
    "overlap/gone.json",
    "runs/gone",
    "runs/new/gone",
    "runs/new/main/superseded-0123-1",
    "runs/new/warmup-0123.json",
    "runs/new/warmup-0123.compile-cache",
    "report/runs/gone.html",
}


def found(root, **options):
    return {str(one.path.relative_to(root)) for one in leftovers(root, **options)}


def everything(root):
    return {path for path in root.rglob("*") if path.is_file()}


def clean(root, *words, answer=""):
    return CliRunner().invoke(cli, ["--config", str(root / "config.yaml"), "clean", *words], input=answer)


def test_what_no_configuration_reaches_is_listed(results):
    assert found(results) == UNREACHED
    (index,) = [path for path in (results / "ngram/docs").iterdir() if path.name != "0123456789abcdef"]
    assert found(results, newest=True) == UNREACHED | {"runs/old", f"ngram/docs/{index.name}"}


def test_it_lists_sizes_and_removes_after_asking(results):
    before = everything(results)
    refused = clean(results, answer="n\n")
    assert refused.exit_code == 1 and everything(results) == before
    assert "5.00 kB  superseded training: " in refused.output
    assert clean(results, answer="y\n").exit_code == 0
    gone = before - everything(results)
    assert gone == {path for path in before if any(path.is_relative_to(results / one) for one in UNREACHED)}
    assert "every result is reached" in clean(results, "--yes").output


def test_a_run_that_is_being_trained_stays(results):
    with filelock.FileLock(fill(results / "runs/gone/main/.lock", 0)):
        assert found(results) == UNREACHED - {"runs/gone"}
    assert found(results) == UNREACHED


def test_the_target_of_a_link_stays(results, tmp_path):
    elsewhere = fill(tmp_path / "elsewhere/train/000.bin").parents[1]
    (results / "shards/linked").symlink_to(elsewhere)
    assert clean(results, "--yes").exit_code == 0
    assert not (results / "shards/linked").is_symlink() and (elsewhere / "train/000.bin").exists()


def test_a_configuration_that_is_not_valid_reaches_nothing(results, caplog):
    (copy,) = [path for path in (results / "configs").iterdir() if "old" in path.read_text()]
    plain = yaml.safe_load(copy.read_text())
    plain["runs"]["old"]["modle"] = "tiny"
    copy.write_text(yaml.safe_dump(plain))
    (index,) = [path for path in (results / "ngram/docs").iterdir() if path.name != "0123456789abcdef"]
    more = {"runs/old", f"ngram/docs/{index.name}", str(copy.relative_to(results))}
    assert found(results) == UNREACHED | more
    assert f"{copy}: not valid, so it reaches nothing: runs.old.modle: unknown key" in caplog.text


def test_a_folder_without_a_valid_configuration_is_refused(results):
    for path in (results / "config.yaml", *(results / "configs").iterdir()):
        path.write_text("runs: {}")
    with pytest.raises(ValueError, match="has no valid configuration"):
        leftovers(results)
