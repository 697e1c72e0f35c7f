"""`spider compare` pairs the documents of two scores, and the seeds of two runs."""

import json

import pytest
from click.testing import CliRunner
from scipy import stats

from spider.cli import cli
from spider.common.files import read_json, write_json
from spider.common.results import write_config
from spider.evaluation.records import Evaluation
from tests.advice.followed import advised, refused
from tests.unit.report.finished import TOY, toys, train_toys
from tests.unit.small_training import one_thread  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Train and score two recipes with two seeds each."""
    root = tmp_path_factory.mktemp("compare") / "results"
    fast = TOY | {"defaults": TOY["defaults"] | {"lr": 0.1}}
    runs = {
        f"{name}{seed}": run | {"seed": seed}
        for name, run in (("slow", TOY), ("fast", fast))
        for seed in (0, 1)
    }
    plain = toys(root, runs)
    results = train_toys(plain, *runs)
    write_config(root, plain)
    return results


def compare(results, *words):
    return CliRunner().invoke(cli, ["--config", str(results.root / "config.yaml"), "compare", *words])


def test_documents_and_seeds_are_paired(results):
    found = json.loads(compare(results, "slow0", "fast0/main", "--json").output)
    one, other = (Evaluation.read(results.stage(run, "main").evaluation) for run in ("slow0", "fast0"))
    documents, seeds = found
    assert sum(one.document_bits) / one.bytes == pytest.approx(one.bpb, abs=1e-4)
    assert documents["difference"] == pytest.approx(other.bpb - one.bpb, abs=1e-4)
    assert documents["count"] == one.documents and documents["p"] < 1e-2
    assert documents["p"] == pytest.approx(stats.ttest_rel(other.document_bits, one.document_bits).pvalue)
    assert documents["low"] < documents["difference"] < documents["high"] < 0
    scores = {run: Evaluation.read(results.stage(run, "main").evaluation).bpb for run in results.runs}
    mean = (scores["fast0"] + scores["fast1"] - scores["slow0"] - scores["slow1"]) / 2
    assert seeds["difference"] == pytest.approx(mean) and (seeds["count"], seeds["pairs"]) == (2, "seeds")
    lines = compare(results, "slow0", "fast0").output.splitlines()
    assert lines[0].endswith("documents") and lines[1].endswith("2 seeds") and len(lines) == 2
    lines = compare(results, "slow0", "slow1").output.splitlines()
    advised(lines[1], "cli/inspect.py", "train both with further seeds, such as")


def test_scores_of_other_text_and_of_an_earlier_version_are_refused(results):
    path = results.stage("fast0", "main").evaluation
    before = read_json(path)
    try:
        write_json(path, {key: value for key, value in before.items() if key != "document_bits"})
        with refused("cli/inspect.py", "evaluate both again, on more text"):
            raise compare(results, "slow0", "fast0").exception
        write_json(path, before | {"text_sha256": "0" * 64})
        with refused("cli/inspect.py", "give both the same evaluation.data"):
            raise compare(results, "slow0", "fast0").exception
    finally:
        write_json(path, before)
