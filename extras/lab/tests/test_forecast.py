"""A forecast is written before the run that it is about, and what comes later is compared with it."""

import json
import shutil

import pytest
from click.testing import CliRunner
from spider_lab.forecast import Forecast, claim, copy_of, forecast, path_of
from spider_lab.ladders import budgets_of, rungs_of, waiting_of
from spider_lab.page import write_ladders
from test_fit import loss

from spider.checkpoints.records import Receipt
from spider.cli import cli
from spider.common.files import read_json
from spider.common.results import Results, write_config
from spider.config import ConfigError, load_config
from spider.evaluation.evaluate import evaluate
from spider.evaluation.records import Evaluation
from spider.training.stage import Places, plan, train
from tests.advice.followed import refused
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
    names = rungs_of(config, "toy")
    data = results.shards("text")
    first = results.stage(names[0], "main")
    spec = config.stage(names[0], "main")
    limited = spec.model_copy(update={"settings": spec.settings.model_copy(update={"max_steps": 5})})
    train(limited, first.path, data)
    evaluate(first.receipt, spec, data, first.path, device="cpu")
    receipt, evaluation = Receipt.read(first.receipt), Evaluation.read(first.evaluation)
    for name in names:
        budget = config.stage(name, "main").settings.target_flops
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
    copy = json.loads(json.dumps(trained))
    root = tmp_path / "results"
    shutil.copytree(trained["results"], root)
    copy["results"] = str(root)
    write_config(root, copy)
    return load_config(copy), Results(root)


def target(config, results, **changed):
    """Train the run that waits, for two steps."""
    (name,) = waiting_of(config, "toy")
    planned = plan(config, config, name, "main", Places())
    settings = planned.spec.settings.model_copy(update={"max_steps": 2, **changed})
    return train(**planned._replace(spec=planned.spec.model_copy(update={"settings": settings}))._asdict())


def test_a_ladder_becomes_runs_whose_settings_follow_from_their_size(ladder):
    config, _ = ladder
    names = rungs_of(config, "toy")
    assert len(names) == 12 and names[0] == "toy-c1e8-width8-seed1"
    assert config.runs["toy-c3e8-width32-seed2"].defaults.lr == 0.005
    assert waiting_of(config, "toy") == config.shown == ["toy-c1e9-width64-seed1"]
    assert budgets_of(config, "toy") == [TARGET]


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
    (name,) = waiting_of(config, "toy")
    with pytest.raises(ValueError, match=r"forecast.json: no such file"):
        claim(config, results, "toy", name)
    forecast(config, results, "toy").write(path_of(results, "toy"))
    written = Forecast.read(claim(config, results, "toy", name))
    assert written.predictions[0].flops == TARGET
    target(config, results)
    folder = results.stage(name, "main")
    evaluate(folder.receipt, config.stage(name, "main"), results.shards("text"), folder.path)
    output = results.report / "ladders.html"
    (view,) = write_ladders(config, results, output)
    assert not view.stale and [one.run for one in view.targets] == [name]
    page = output.read_text()
    assert "after its forecast" in page and output.with_suffix(".svg").stat().st_size > 3000

    # A rung changes later: another forecast, and the same copy, which is no reason to train again.
    path = results.stage("toy-c3e8-width8-seed1", "main").evaluation
    path.write_text(json.dumps(read_json(path) | {"bpb": 5.0}))
    forecast(config, results, "toy").write(path_of(results, "toy"))
    assert Forecast.read(copy_of(results, name)) == written
    (view,) = write_ladders(config, results, output)
    assert "stale, a run of the ladder has changed" in view.stale[0]


def test_a_run_that_began_before_its_forecast_is_refused(ladder):
    config, results = ladder
    target(config, results)
    forecast(config, results, "toy").write(path_of(results, "toy"))
    (name,) = waiting_of(config, "toy")
    with refused("lab/forecast.py", "move the folder away to train again, or remove {} from the ladder"):
        claim(config, results, "toy", name)
    results.stage(name, "main").path.rename(results.root / "aside")
    claim(config, results, "toy", name)


def test_a_ladder_without_a_law_says_why_and_its_target_does_not_start(ladder):
    config, results = ladder
    for name in rungs_of(config, "toy"):
        path = results.stage(name, "main").receipt
        path.write_text(json.dumps(read_json(path) | {"steps": 200}))
    forecast(config, results, "toy").write(path_of(results, "toy"))
    found = Forecast.read(path_of(results, "toy"))
    assert not found.predictions
    assert found.left_out[0] == "toy-c1e8-width8-seed1: 200 steps, a run needs 300"
    with pytest.raises(ValueError, match="toy-c1e9-width64-seed1 needs a forecast before it starts"):
        claim(config, results, "toy", *waiting_of(config, "toy"))
    write_ladders(config, results, output := results.report / "ladders.html")
    assert "toy: no forecast" in output.read_text()
    path = results.stage("toy-c3e8-width8-seed1", "main").evaluation
    path.write_text(json.dumps(read_json(path) | {"text_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="seed1 and toy-c3e8-width8-seed1 are scored on diff"):
        forecast(config, results, "toy")


def test_the_commands_write_forecast_and_page(ladder):
    _, results = ladder

    def spider(*words):
        return CliRunner().invoke(cli, ["--config", str(results.root / "config.yaml"), *words])

    for words in (["forecast", "toy"], ["ladders"], ["forecast", "toy", "--run", "toy-c1e9-width64-seed1"]):
        done = spider(*words)
        assert done.exit_code == 0, done.output
    assert Forecast.read(copy_of(results, "toy-c1e9-width64-seed1")).predictions
    assert "no ladder 'tyo'; did you mean \"toy\"?" in str(spider("forecast", "tyo").exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rungs": [{"flops": 1e8, "sizes": SIZES}]}, "a forecast needs at least two budgets, each once"),
        ({"rungs": [{"flops": f, "sizes": [8]} for f in FLOPS]}, r"rungs\[0\].sizes: a budget needs 3 sizes"),
        ({"target": {"flops": 2e8, "sizes": [64]}}, "must be above the largest budget of the rungs"),
        ({"target": {"flops": 1e12, "sizes": [64]}}, r"at most 100 times as large, 3e\+10 \(got 1e\+12\)"),
        ({"size": "model.widht"}, 'model.widht: unknown key; did you mean "width"'),
        ({"links": {"lr": "1 / widht"}}, r"ladders.toy.links.lr: uses 'widht'; did you mean \"width\"\?"),
        ({"links": {"lr": "1 / 0"}}, r"ladders.toy.links.lr: '1 / 0' has no value"),
        ({"links": {"lrr": "1"}}, r"ladders.toy.links.lrr: unknown key; did you mean \"lr\"\?"),
    ],
)
def test_a_wrong_ladder_is_named(tmp_path, change, message):
    config = plain(tmp_path)
    config["ladders"]["toy"] |= change
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_a_run_may_wait_for_a_ladder(tmp_path):
    config = plain(tmp_path)
    run = {key: config["ladders"]["toy"][key] for key in ("data", "model", "evaluation")}
    run |= {"stages": [{"name": "main", "target_flops": 2e9}]}
    config["ladders"]["toy"]["waiting"] = ["big"]
    assert budgets_of(load_config(config | {"runs": {"big": run}}), "toy") == [TARGET, 2e9]
    with pytest.raises(ConfigError, match=r"ladders.toy.waiting: no run 'big'"):
        load_config(config)
    run["stages"] = [{"name": "main", "max_steps": 5}]
    with pytest.raises(ConfigError, match=r"runs.big: waits for a forecast, so it needs target_flops"):
        waiting_of(load_config(config | {"runs": {"big": run}}), "toy")


def test_a_link_follows_from_the_size_the_budget_and_the_links_before_it(tmp_path):
    config = plain(tmp_path)
    links = {"lr": "max(0.001, 0.1 / sqrt(width))", "min_lr_ratio": "lr * 2"}
    config["ladders"]["toy"]["links"] = links | {"evaluation.batch": "round(1.5)"}
    run = load_config(config).runs["toy-c1e8-width16-seed1"]
    assert (run.defaults.lr, run.defaults.min_lr_ratio, run.evaluation.batch) == (0.025, 0.05, 2)
