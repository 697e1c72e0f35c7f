"""A forecast is written before the run that it is about, and what comes later is compared with it."""

import json

import pytest
from click.testing import CliRunner

from spider.checkpoints.records import Receipt
from spider.cli import cli
from spider.config import ConfigError, load_config
from spider.errors import TrainingError
from spider.evaluation.evaluate import evaluate
from spider.evaluation.records import Evaluation
from spider.files import read_json
from spider.ladders.forecast import Forecast, against, forecast, kept
from spider.report.compare import compare
from spider.report.ladders import write_ladders
from spider.report.page import render
from spider.results import Results, write_config
from spider.training.stage import Places, plan, train
from tests.unit.ladders.test_fit import loss
from tests.unit.report.finished import encode_text
from tests.unit.small_training import one_thread  # noqa: F401 (a fixture)

FLOPS = (1e8, 3e8)
TARGET = 1e9
SIZES = [8, 16, 32]


def plain(root):
    """Return a configuration with a ladder of a toy model."""
    ladder = {
        "data": "text",
        "model": {"family": "tests.families.toy", "width": 8},
        "precision": "fp32",
        "defaults": {"seq_len": 16, "micro_batch": 2, "log_every": 50, "ckpt_every": 10_000, "val_every": 0},
        "stages": [{"name": "main"}],
        "evaluation": {"max_bytes": 1000, "loops_bytes": 0, "carry_over": 0},
        "resources": {"threads": 1},
        "size": "model.width",
        "links": {"lr": "0.01 * sqrt(8 / width)"},
        "rungs": [{"flops": flops, "sizes": SIZES, "seeds": [1, 2]} for flops in FLOPS],
        "target": {"flops": TARGET, "sizes": [64]},
    }
    dataset = {"source": {"kind": "local", "files": ["text.parquet"]}, "validation": 0.3}
    return {"results": str(root), "datasets": {"text": dataset}, "ladders": {"toy": ladder}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train and evaluate one run of the ladder; the others get its records with losses of a known law."""
    root = tmp_path_factory.mktemp("ladder") / "results"
    config, results = load_config(plain(root)), Results(root)
    encode_text(results)
    names = list(config.rungs["toy"].rungs)
    data = results.shards("text")
    first = results.stage(names[0], "main")
    spec = config.stage(names[0], "main")
    limited = spec.model_copy(update={"settings": spec.settings.model_copy(update={"max_steps": 5})})
    train(limited, first.path, data)
    evaluate(first.receipt, spec, data, first.path, device="cpu")
    receipt, evaluation = Receipt.read(first.receipt), Evaluation.read(first.evaluation)
    for name, budget in config.rungs["toy"].rungs.items():
        write(results, name, receipt, evaluation, budget, config.runs[name])
    return plain(root)


def write(results, name, receipt, evaluation, budget, run):
    # The best size at the smallest budget has the middle width.
    parameters = 0.2 * FLOPS[0] ** 0.5 * run.model.width / 16 * (budget / FLOPS[0]) ** 0.5
    folder = results.stage(name, "main")
    folder.path.mkdir(parents=True, exist_ok=True)
    tokens = round(budget / 6 / parameters)
    receipt.model_copy(update={"run": name, "tokens": tokens, "steps": 500}).write(folder.receipt)
    changes = {"run": name, "flops_per_token": 6 * parameters}
    changes["bpb"] = loss(budget, parameters) + 0.002 * (-1) ** run.seed
    evaluation.model_copy(update=changes).write(folder.evaluation)


@pytest.fixture
def ladder(trained, tmp_path):
    """Return a copy of the configuration, and of its results folder."""
    import shutil

    copy = json.loads(json.dumps(trained))
    root = tmp_path / "results"
    shutil.copytree(trained["results"], root)
    copy["results"] = str(root)
    write_config(root, copy)
    return load_config(copy), Results(root)


def target(config, results, **changed):
    """Train the run that waits, for two steps."""
    (name,) = config.rungs["toy"].targets
    planned = plan(config, config, name, "main", Places())
    settings = planned.spec.settings.model_copy(update={"max_steps": 2, **changed})
    return train(**planned._replace(spec=planned.spec.model_copy(update={"settings": settings}))._asdict())


def test_a_ladder_becomes_runs_whose_settings_follow_from_their_size(ladder):
    config, _ = ladder
    names = list(config.rungs["toy"].rungs)
    assert len(names) == 12 and names[0] == "toy-c1e8-width8-seed1"
    assert config.runs["toy-c3e8-width32-seed2"].defaults.lr == 0.005
    assert config.rungs["toy"].targets == {"toy-c1e9-width64-seed1": TARGET}
    assert config.runs["toy-c1e9-width64-seed1"].forecast == "toy"
    assert config.shown == ["toy-c1e9-width64-seed1"] and config.forecast_at("toy") == [TARGET]


def test_the_forecast_has_a_loss_an_interval_and_the_settings_of_the_best_size(ladder):
    config, results = ladder
    found = forecast(config, results, "toy")
    (one,) = found.predictions
    assert found.problem is None and one.low < one.bpb < one.high
    assert one.parameters * one.tokens * 6 == pytest.approx(TARGET)
    assert one.settings["model.width"] % 8 == 0
    assert one.settings["lr"] == pytest.approx(0.01 * (8 / one.settings["model.width"]) ** 0.5)
    assert len(found.rungs) == 12 and found.rungs[0].steps == 500


def test_a_run_does_not_start_without_its_forecast_and_keeps_the_one_that_it_began_with(ladder):
    config, results = ladder
    with pytest.raises(TrainingError, match=r"forecast.json: no such file; this run needs a forecast before"):
        target(config, results)
    written = forecast(config, results, "toy").write(results.forecast("toy"))
    target(config, results)
    folder = results.stage("toy-c1e9-width64-seed1", "main")
    assert kept(folder) == (written, written.digest)
    assert read_json(folder.origin)["fields"]["forecast"] == written.digest

    evaluate(
        folder.receipt, config.stage("toy-c1e9-width64-seed1", "main"), results.shards("text"), folder.path
    )
    (view,) = write_ladders(config, results, results.ladders)
    assert not view.stale and [one.run for one in view.targets] == ["toy-c1e9-width64-seed1"]
    page = results.ladders.read_text()
    assert "toy at 1e9: forecast" in page or "forecast <strong>" in page
    phrase = against(folder, Evaluation.read(folder.evaluation).bpb)
    assert phrase.startswith("forecast by the ladder toy before it started: ") and "the interval" in phrase
    assert phrase.capitalize() in render(config, results, "toy-c1e9-width64-seed1")
    compare([folder.evaluation], benchmarks=None, output=results.report)
    assert f"toy-c1e9-width64-seed1: {phrase}." in (results.report / "table.md").read_text()
    assert "after its forecast" in page and results.ladders.with_suffix(".svg").stat().st_size > 3000

    # A rung changes later: another forecast, the same copy, and the finished run is not trained again.
    path = results.stage("toy-c3e8-width8-seed1", "main").evaluation
    path.write_text(json.dumps(read_json(path) | {"bpb": 5.0}))
    forecast(config, results, "toy").write(results.forecast("toy"))
    before = folder.receipt.read_bytes()
    target(config, results)
    assert folder.receipt.read_bytes() == before and kept(folder)[0] == written
    (view,) = write_ladders(config, results, results.ladders)
    assert "stale, a run of the ladder has changed" in view.stale[0]

    copied = read_json(folder.forecast)
    copied["predictions"][0]["bpb"] -= 0.1
    folder.forecast.write_text(json.dumps(copied))
    (view,) = write_ladders(config, results, results.ladders)
    assert "was edited after the training began" in view.stale[0]


def test_a_run_that_began_before_its_forecast_is_refused(ladder):
    config, results = ladder
    (name,) = config.rungs["toy"].targets
    block = config.runs[name].model_copy(update={"forecast": None})
    early = config.model_copy(update={"runs": {**config.runs, name: block}})
    early._rungs = config.rungs
    target(early, results)
    forecast(config, results, "toy").write(results.forecast("toy"))
    with pytest.raises(TrainingError, match="began to train before its forecast was written"):
        target(config, results)


def test_a_ladder_without_a_law_says_why_and_its_target_does_not_start(ladder):
    config, results = ladder
    for name in config.rungs["toy"].rungs:
        path = results.stage(name, "main").receipt
        path.write_text(json.dumps(read_json(path) | {"steps": 200}))
    found = forecast(config, results, "toy").write(results.forecast("toy"))
    assert not found.predictions and len(found.left_out) >= 12
    assert found.left_out[0] == "toy-c1e8-width8-seed1: 200 steps, a run needs 300"
    with pytest.raises(TrainingError, match="this run needs a forecast before it starts"):
        target(config, results)
    write_ladders(config, results, results.ladders)
    assert "toy: no forecast" in results.ladders.read_text()


def test_runs_on_different_text_are_refused(ladder):
    config, results = ladder
    path = results.stage("toy-c3e8-width8-seed1", "main").evaluation
    path.write_text(json.dumps(read_json(path) | {"text_sha256": "0" * 64}))
    with pytest.raises(
        ValueError, match="toy-c1e8-width8-seed1 and toy-c3e8-width8-seed1 are scored on diff"
    ):
        forecast(config, results, "toy")
    results.stage("toy-c3e8-width8-seed2", "main").evaluation.unlink()
    with pytest.raises(ValueError, match=r"seed2/main/evaluation.json: no such file"):
        forecast(config, results, "toy")


def test_a_forecast_has_its_own_run_in_the_records(ladder, monkeypatch):
    _, results = ladder
    monkeypatch.setenv("SPIDER_WORKFLOW", "w")  # nothing is sent
    for words in (["forecast", "toy"], ["ladders"]):
        done = CliRunner().invoke(cli, ["--config", str(results.root / "config.yaml"), "report", *words])
        assert done.exit_code == 0, done.output
    assert Forecast.read(results.forecast("toy")).predictions
    done = CliRunner().invoke(
        cli, ["--config", str(results.root / "config.yaml"), "report", "forecast", "tyo"]
    )
    assert "no ladder 'tyo'; did you mean \"toy\"?" in str(done.exception)


def test_an_audit_finds_an_edited_forecast_and_takes_a_newer_one_for_none(ladder, monkeypatch):
    config, results = ladder
    monkeypatch.setenv("SPIDER_WORKFLOW", "w")  # nothing is sent

    def spider(*words):
        return CliRunner().invoke(cli, ["--config", str(results.root / "config.yaml"), *words])

    (name,) = config.rungs["toy"].targets
    for words in (["report", "forecast", "toy"], ["train", f"{name}/main"], ["evaluate", f"{name}/main"]):
        assert (done := spider(*words)).exit_code == 0, done.output
    path = results.stage("toy-c3e8-width8-seed1", "main").evaluation
    path.write_text(json.dumps(read_json(path) | {"bpb": 5.0}))
    spider("report", "forecast", "toy")
    done = spider("audit", name, "--only", "digests")
    assert done.exit_code == 0, done.output
    folder = results.stage(name, "main")
    copied = read_json(folder.forecast)
    copied["predictions"][0]["high"] += 1.0
    folder.forecast.write_text(json.dumps(copied))
    done = spider("audit", name, "--only", "digests")
    assert done.exit_code == 1
    assert f"runs/{name}/main/forecast.json: is not the one that `train {name}/main` wrote" in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rungs": [{"flops": 1e8, "sizes": [8, 16, 32]}]},
            "a forecast needs at least two budgets, each once",
        ),
        ({"rungs": [{"flops": f, "sizes": [8]} for f in FLOPS]}, r"rungs\[0\].sizes: a budget needs 3 sizes"),
        ({"target": {"flops": 2e8, "sizes": [64]}}, "must be above the largest budget of the rungs"),
        ({"target": {"flops": 1e12, "sizes": [64]}}, r"at most 100 times as large, 3e\+10 \(got 1e\+12\)"),
        (
            {"rungs": [{"flops": f, "sizes": SIZES, "seeds": []} for f in FLOPS]},
            r"ladders.toy.rungs\[0\].seeds",
        ),
        ({"sizes": [1]}, "ladders.toy.sizes: unknown key; did you mean"),
        ({"size": "model.widht"}, 'model.widht: unknown key; did you mean "width"'),
        ({"grid": {"lr": [1]}}, "has no grid or forecast of its own"),
    ],
)
def test_a_wrong_ladder_is_named(tmp_path, change, message):
    config = plain(tmp_path)
    config["ladders"]["toy"] |= change
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_a_ladder_like_another_shares_its_runs(tmp_path):
    config = plain(tmp_path)
    rungs = [{"flops": flops, "sizes": SIZES} for flops in (1e8, 2e8)]
    config["ladders"]["lower"] = {"like": "toy", "rungs": rungs, "target": {"flops": 3e8, "sizes": [16]}}
    found = load_config(config)
    assert len(found.runs) == 13 + 3 + 1
    shared = {*found.rungs["lower"].rungs} & {*found.rungs["toy"].rungs}
    assert shared == {f"toy-c1e8-width{size}-seed1" for size in SIZES}
    assert found.rungs["lower"].targets == {"lower-c3e8-width16-seed1": 3e8}
    config["ladders"]["lower"]["like"] = "tyo"
    with pytest.raises(ConfigError, match=r"ladders.lower.like: no ladder 'tyo'; did you mean"):
        load_config(config)
    config["ladders"]["lower"] |= {"like": "toy", "data": "text"}
    with pytest.raises(ConfigError, match=r"ladders.lower.data: is that of toy; leave it out"):
        load_config(config)


def test_a_run_may_wait_for_a_ladder_that_exists(tmp_path):
    config = plain(tmp_path)
    run = {key: config["ladders"]["toy"][key] for key in ("data", "model", "evaluation")}
    run |= {"stages": [{"name": "main", "target_flops": 2e9}], "forecast": "toy"}
    found = load_config(config | {"runs": {"big": run}})
    assert found.forecast_at("toy") == [TARGET, 2e9]
    with pytest.raises(ConfigError, match=r"runs.big.forecast: no ladder 'tyo'; did you mean \"toy\""):
        load_config(config | {"runs": {"big": run | {"forecast": "tyo"}}})
    run["stages"] = [{"name": "main", "max_steps": 5}]
    with pytest.raises(ConfigError, match=r"runs.big.forecast: needs target_flops"):
        load_config(config | {"runs": {"big": run}})


def test_runs_with_too_few_steps_are_named_before_they_are_trained(ladder, tmp_path):
    config, _ = ladder
    path = tmp_path / "short.yaml"
    short = config.written | {"ladders": {"toy": plain(tmp_path)["ladders"]["toy"]}, "runs": {}}
    short["ladders"]["toy"]["rungs"][0]["flops"] = 1e6
    path.write_text(json.dumps(short))
    printed = CliRunner().invoke(cli, ["--config", str(path), "describe"], catch_exceptions=False).output
    assert "toy-c1e6-width8-seed1: " in printed and "a ladder leaves out runs under 300" in printed
    assert "toy-c3e8-width8-seed1: " not in printed
