"""`spider train` by hand: what its flags and the environment make of a stage, and where it trains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from spider.checkpoints.records import steps
from spider.cli import cli
from spider.common import files
from spider.common.errors import RESUME_ME, TrainingError
from spider.config import ConfigError, Given, StageSpec, load_config, with_settings
from spider.data.shards import verify
from spider.data.sources.mock import make_mock_data
from spider.publish.export import export
from spider.training.loop import Trainer
from spider.training.metrics import read_rows
from spider.training.stage import Places, plan
from tests.forkserver import python
from tests.unit.small_training import DEFAULTS, MODEL, REPO

VARIABLES = ("SEQ_LEN", "MICRO_BATCH", "GRAD_ACCUM", "N_LOOPS", "LR", "TARGET_TOKENS", "CKPT_EVERY")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No tracking, and no setting that the machine happens to have in its environment."""
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Project:
    """A folder with a configuration whose data are encoded, in which `spider train` is called."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self.folder = folder
        self.plain: dict[str, Any] = {
            "results": str(folder / "results"),
            "datasets": {"toy": {"source": {"kind": "pydocs"}}},
            "runs": {
                "r": {
                    "data": "toy",
                    "model": MODEL,
                    "precision": "fp32",
                    "defaults": {**DEFAULTS, "max_steps": 6, "ckpt_every": 3},
                    "stages": [{"name": "a"}, {"name": "b"}],
                }
            },
        }
        home = folder / "results/shards/toy"
        home.parent.mkdir(parents=True)
        home.symlink_to(shards)

    @property
    def config(self):
        return load_config(self.plain)

    @property
    def configured(self) -> Path:
        return self.folder / "results/runs/r/a"

    @property
    def made(self) -> list[Path]:
        """Stage folders of all runs that are not the configuration's."""
        return [f for f in sorted(self.folder.glob("results/runs/r-*/*")) if f.is_dir()]

    def train(self, *arguments: object, log: str = "", **environment: str) -> Result:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.plain))
        said = CliRunner().invoke(
            cli,
            ["--config", str(path), *(["--log", log] if log else []), "train", *map(str, arguments)],
            env=dict(environment),
        )
        if said.exception and not isinstance(said.exception, (SystemExit, ValueError)):
            raise said.exception
        return said


@pytest.fixture
def project(tmp_path, shards) -> Project:
    return Project(tmp_path, shards)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Project:
    """A project whose first stage is trained as configured; its tests leave that as it is."""
    made = Project(tmp_path_factory.mktemp("project"), shards)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPIDER_TRACKING", "off")
        said = made.train()
    assert said.exit_code == 0, said.output
    return made


def manifest(stage: Path) -> dict[str, Any]:
    return files.read_json(steps(stage / "checkpoints")[-1] / "manifest.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_that_asks_for_a_gpu_does_not_train_without_one_unless_it_is_told_to(project):
    project.plain["runs"]["r"]["resources"] = {"gpus": 1}
    said = project.train("--max-steps", 1)
    assert isinstance(said.exception, ValueError)
    assert "resources.gpus: the run asks for 1" in str(said.exception)
    assert not project.configured.exists() and not project.made
    assert project.train("resources.gpus=0", "--max-steps", 1).exit_code == 0


def test_the_remedy_for_running_out_of_memory_continues_the_stage(project, monkeypatch):
    """Each step reads what it would have read. The same settings in the file train no further step."""
    project.plain["runs"]["r"]["defaults"] |= {"grad_accum": 2, "log_every": 1}
    assert project.train("--ckpt-dir", project.folder / "whole").exit_code == 0
    forward_backward = Trainer._forward_backward

    def too_much(self, *arguments):
        if self.progress.step == 4 and self.micro_batches == 2:
            torch.empty(1 << 60, dtype=torch.uint8)
        return forward_backward(self, *arguments)

    monkeypatch.setattr(Trainer, "_forward_backward", too_much)
    error = str(project.train().exception)
    assert "out of memory at step 4" in error
    remedy = re.findall(r"set micro_batch: (\d+) and grad_accum: (\d+)\. The stage then goes on", error)
    assert remedy == [("2", "4")]
    said = project.train("--micro-batch", 2, "--grad-accum", 4)
    assert said.exit_code == 0 and not project.made, said.output
    assert "began with 1 CPU threads (processes: 1, micro-batches of 4) and goes on with 1 CPU" in said.output
    assert manifest(project.configured)["alike_since"] == 3
    read = [
        [(row.step, row.batches) for row in read_rows(folder / "metrics.jsonl")]
        for folder in (project.folder / "whole", project.configured)
    ]
    assert len(read[0]) == 6 and read[0] == read[1]
    monkeypatch.setattr(Trainer, "_forward_backward", forward_backward)
    assert project.train("--micro-batch", 2).exit_code == 0 and len(project.made) == 1  # another batch
    project.plain["runs"]["r"]["defaults"] |= {"micro_batch": 1, "grad_accum": 8}
    written = (project.configured / "metrics.jsonl").stat().st_mtime_ns
    assert project.train().exit_code == 0
    assert (project.configured / "metrics.jsonl").stat().st_mtime_ns == written, "a finished stage"


def test_an_experiment_of_a_version_with_a_digest_for_each_cut_keeps_its_folder(project, monkeypatch):
    project.plain["runs"]["r"]["defaults"] |= {"grad_accum": 2, "max_steps": 1}
    with monkeypatch.context() as earlier:
        earlier.setattr(StageSpec, "deciding", StageSpec.recorded)
        earlier.setattr(StageSpec, "identities", property(lambda spec: [spec.identity]))
        assert project.train("--lr", 0.01).exit_code == 0
    before = project.made
    assert project.train("--lr", 0.01).exit_code == 0
    assert project.train("--lr", 0.01, "--micro-batch", 2, "--grad-accum", 4).exit_code == 0
    assert project.made == before and len(before) == 1


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("seq_len", 64, "settings.seq_len"),
        ("lr", 0.5, "settings.lr"),
        ("tokens", 1000, "settings.tokens"),
        ("precision", "bf16", "precision"),
        ("compile", False, "compile"),
    ],
)
def test_a_setting_changes_its_own_field_of_its_own_stage(project, key, value, path):
    before = project.config
    after, _ = with_settings(before, "r", "b", [Given("--flag", key, value)])
    first, second = after.stage("r", "a"), after.stage("r", "b").model_dump()
    expected = before.stage("r", "b").model_dump()
    *block, leaf = path.split(".")
    (expected[block[0]] if block else expected)[leaf] = value
    assert second == expected
    assert first.settings == before.stage("r", "a").settings


def test_every_flag_reaches_the_training(project, shards):
    said = project.train(
        *("r/a", "--seq-len", 40, "--micro-batch", 2, "--grad-accum", 2, "--n-loops", 1, "--lr", "1e-4"),
        *(
            "--precision",
            "bf16",
            "parallel=fsdp",
            "compile=false",
            "--max-steps",
            2,
            "tokens=4000",
            "ckpt_every=1",
        ),
        *("--data-dir", shards, "--no-gradient-checkpointing", "--ckpt-dir", project.folder / "mine"),
    )
    assert said.exit_code == 0, said.output
    spec = manifest(project.folder / "mine")["spec"]
    settings = spec["settings"]
    assert (settings["seq_len"], settings["micro_batch"], settings["grad_accum"]) == (40, 2, 2)
    assert (settings["n_loops"], settings["lr"], settings["max_steps"]) == (1, 1e-4, 2)
    assert (settings["tokens"], settings["ckpt_every"]) == (4000, 1)
    assert (spec["precision"], spec["compile"]) == ("bf16", False)
    assert spec["parallel"] == "fsdp"
    assert not spec["model"]["recurrence"]["checkpointing"]
    assert (
        f"r/a: trained to step 2 on {files.read_json(project.folder / 'mine/train.json')['bytes']}"
        in said.output
    )


def test_the_command_line_goes_before_the_environment_and_that_before_the_configuration(project):
    said = project.train(
        "--ckpt-dir", project.folder / "x", "--lr", "1e-4", LR="2e-4", SEQ_LEN="40", N_LOOPS=""
    )
    assert said.exit_code == 0, said.output
    settings = manifest(project.folder / "x")["spec"]["settings"]
    assert (settings["lr"], settings["seq_len"]) == (1e-4, 40)
    assert (settings["micro_batch"], settings["n_loops"]) == (DEFAULTS["micro_batch"], 2)
    assert "settings: seq_len 40 (SEQ_LEN), lr 0.0001 (--lr); all others from " in said.output


def test_anything_of_the_run_can_be_set_by_its_path(project):
    said = project.train(
        *("r/a", "lr=4e-3", "model.recurrence.loops=3", "optimizer.kind=adamw8bit", "seed=5"),
        *(
            "ema.decay=0.9",
            "max_steps=2",
            "ckpt_every=2",
            "--ckpt-dir",
            project.folder / "x",
        ),
        SEQ_LEN="40",
        LR="1e-4",
    )
    assert said.exit_code == 0, said.output
    spec = manifest(project.folder / "x")["spec"]
    settings = spec["settings"]
    assert (settings["lr"], settings["n_loops"], settings["max_steps"]) == (4e-3, 3, 2)
    assert (settings["ema"]["decay"], settings["ckpt_every"], settings["seq_len"]) == (0.9, 2, 40)
    assert (spec["optimizer"]["kind"], spec["seed"], spec["model"]["recurrence"]["loops"]) == (
        "adamw8bit",
        5,
        3,
    )
    assert "settings: seq_len 40 (SEQ_LEN), lr 0.004 (lr=4e-3), model.recurrence.loops 3" in said.output


def test_a_setting_of_the_stage_goes_before_the_file_whatever_the_file_sets_it_in(project):
    run = project.plain["runs"]["r"]
    run["defaults"]["ema"] = {"decay": 0.9, "start_step": 4}
    run["stages"][1]["lr"] = 0.25
    changed, _ = with_settings(project.config, "r", "b", [Given("lr", "lr", 0.5)])
    assert changed.stage("r", "b").settings.lr == 0.5
    assert changed.stage("r", "a") == project.config.stage("r", "a")
    changed, _ = with_settings(project.config, "r", "b", [Given("", "ema.decay", 0.5)])
    ema = changed.stage("r", "b").settings.ema
    assert (ema.decay, ema.start_step) == (0.5, 4)
    assert changed.stage("r", "a") == project.config.stage("r", "a")


def test_a_model_is_chosen_before_its_parts_are_set(project):
    given = [Given("", "model.hidden", 64), Given("", "model", "tiny")]
    model = with_settings(project.config, "r", "a", given)[0].runs["r"].model
    assert (model.preset, model.hidden, model.ffn_hidden) == ("tiny", 64, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lrr=1", 'lrr=1: unknown key; did you mean "lr"?'),
        ("model.recurrence.lops=1", 'model.recurrence.lops=1: unknown key; did you mean "loops"?'),
        ("lr=1e-3 --lr 2e-3", "--lr and lr=1e-3 are the same setting; give one of them"),
        ("lr=1 lr=2", "lr=1 and lr=2 are the same setting"),
        ("model.recurrence.loops=2 n_loops=3", "n_loops of this run overrides the model's loops"),
        ("stages.a.lr=1", "stages.a.lr=1: unknown key"),
        ("defaults.lr=1", "defaults.lr=1: unknown key"),
        ("lr=[1", "lr=[1: '[1' is not valid YAML"),
        (
            'ema={"decay":0.1,"decay":0.2}',
            "the key 'decay' is given in line 1 and again in line 1; remove or rename one",
        ),
        ("lr=fast", "lr=fast: must be a number (got 'fast')"),
        ("model.hidden=-1", "model.hidden=-1: must be positive (got -1)"),
        ('ema={"decay":2}', 'ema={"decay":2}.decay: must be below 1.0'),
        ("keep_every=4", "keep_every=4: must be a multiple of ckpt_every"),
        ("r/a lr 4", "unexpected lr, 4; a setting is written PATH=VALUE"),
        ("grid={}", "grid={}: unknown key"),
    ],
)
def test_a_wrong_setting_is_explained_in_the_words_it_was_given_in(project, words, message):
    said = project.train(*words.split())
    assert said.exit_code == 2
    assert message in said.output
    assert not (project.folder / "results/runs").exists()


def test_every_variable_of_the_seeds_is_read(project):
    values = dict(zip(VARIABLES, ("40", "2", "3", "1", "1e-4", "5000", "2"), strict=True))
    said = project.train("--max-steps", 2, "--ckpt-dir", project.folder / "x", **values)
    assert said.exit_code == 0, said.output
    found = manifest(project.folder / "x")["spec"]["settings"]
    names = ("seq_len", "micro_batch", "grad_accum", "n_loops", "lr", "tokens", "ckpt_every")
    assert [found[name] for name in names] == [40, 2, 3, 1, 1e-4, 5000, 2]


@pytest.mark.parametrize("by", ["the environment", "a path"])
def test_a_number_of_steps_between_checkpoints_replaces_the_configured_minutes(project, by):
    project.plain["runs"]["r"]["defaults"] |= {"ckpt_minutes": 10, "max_steps": 5}
    words = ["ckpt_every=2"] if by == "a path" else []
    said = project.train(*words, **({"CKPT_EVERY": "2"} if by == "the environment" else {}))
    assert said.exit_code == 0, said.output
    origin = "CKPT_EVERY" if by == "the environment" else "ckpt_every=2"
    assert f"ckpt_every 2 ({origin})" in said.output
    assert f"ckpt_minutes: 10 of the configuration has no effect, {origin} replaces it" in said.output
    saved = [int(path.name.removeprefix("step-")) for path in steps(project.configured / "checkpoints")]
    assert saved == [4, 5]


def test_minutes_between_checkpoints_that_are_given_beside_steps_are_kept(project):
    project.plain["runs"]["r"]["defaults"] |= {"ckpt_minutes": 10, "max_steps": 5}
    said = project.train("ckpt_every=2", "ckpt_minutes=20")
    assert said.exit_code == 0 and "has no effect" not in said.output
    assert len(steps(project.configured / "checkpoints")) == 1


def test_a_job_of_a_workflow_takes_nothing_from_the_environment_and_says_so_once(project):
    said = project.train("r/a", log=str(project.folder / "a.log"), LR="0.5", SEQ_LEN="no number")
    assert said.exit_code == 0, said.output
    assert said.output.count("SEQ_LEN, LR: set in the environment and ignored") == 1
    assert manifest(project.configured)["identity"] == project.config.stage("r", "a").identity


# --------------------------------------------------------------------------------------------------- places


def test_a_stage_as_configured_trains_where_the_workflow_does(trained):
    assert manifest(trained.configured)["identity"] == trained.config.stage("r", "a").identity
    assert (trained.configured / "train.json").exists()
    config = trained.config
    given = [Given("ckpt_every=1", "ckpt_every", 1), Given("--lr", "lr", DEFAULTS["lr"])]
    bookkeeping = plan(config, with_settings(config, "r", "a", given)[0], "r", "a", Places())
    assert bookkeeping.folder == trained.configured
    same_data = plan(config, config, "r", "a", Places(data_dir=trained.folder / "results/shards/toy"))
    assert same_data.folder == trained.configured


def test_another_training_is_a_run_of_its_own_and_the_same_command_goes_on_with_it(trained):
    before = (trained.configured / "train.json").stat().st_mtime_ns
    for _ in range(2):
        said = trained.train("--lr", "1e-4")
        assert said.exit_code == 0, said.output
    assert "going on from step-00000006" in said.output
    made = [stage for stage in trained.made if manifest(stage)["spec"]["settings"]["lr"] == 1e-4]
    assert len(made) == 1 and made[0].name == "a"
    assert (trained.configured / "train.json").stat().st_mtime_ns == before


def test_unfinished_training_of_other_settings_in_a_named_folder_is_refused(project):
    folder = project.folder / "x"
    assert project.train("--ckpt-dir", folder).exit_code == 0
    last = steps(folder / "checkpoints")[-1] / "manifest.json"
    files.write_json(last, files.read_json(last) | {"final": False})
    said = project.train("--ckpt-dir", folder, "--lr", "1e-4")
    assert isinstance(said.exception, TrainingError)
    assert "settings.lr: 0.003 -> 0.0001" in str(said.exception)
    assert "train in another folder (--ckpt-dir)" in str(said.exception)


def test_mock_data_are_the_same_shards_each_time_and_are_kept(tmp_path):
    for name in ("x", "y"):
        make_mock_data(tmp_path / name)
    verify(tmp_path / "x")
    first, second = (files.read_json(tmp_path / n / "metadata.json") for n in ("x", "y"))
    assert first == second
    assert first["splits"]["train"]["bytes"] > 500_000
    (tmp_path / "x/000.parquet").unlink()
    make_mock_data(tmp_path / "x")
    assert not (tmp_path / "x/000.parquet").exists()


def test_the_seeds_laptop_command_runs_on_the_default_configuration(tmp_path):
    (tmp_path / "config.yaml").write_bytes((REPO / "config.yaml").read_bytes())
    command = "train --mock-data --max-steps 20 --seq-len 128 --micro-batch 2"
    said = subprocess.run(
        [python(), "-m", "spider.cli", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert "run: spider, the first of the configuration" in said.stderr
    (stage,) = tmp_path.glob("results/runs/spider-*/main")
    receipt = json.loads((stage / "train.json").read_text())
    assert receipt["steps"] == 20
    assert receipt["bytes"] <= 20 * 2 * 128
    assert f"main: trained to step 20 on {receipt['bytes']:,} bytes" in said.stderr
    assert f"; best loss {receipt['best_loss']:.3f}; " in said.stderr
    assert (stage / "mock_data/metadata.json").exists()


# --------------------------------------------------------------------------------------------------- resume


def test_resuming_in_the_middle_ends_with_the_weights_of_the_undisturbed_training(trained):
    middle, last = steps(trained.configured / "checkpoints")
    folder = trained.folder / "resumed"
    said = trained.train("--resume", middle, "--ckpt-dir", folder)
    assert said.exit_code == 0, said.output
    assert f"{middle}: going on from its step 3" in said.output
    found, undisturbed = manifest(folder), files.read_json(last / "manifest.json")
    assert found["weights"] == undisturbed["weights"]
    assert (found["step"], found["global_step"], found["bytes"]) == (6, 6, undisturbed["bytes"])
    assert found["parent_weights"] == files.read_json(middle / "manifest.json")["weights"]


def test_the_average_of_the_weights_goes_on_as_well(project):
    project.plain["runs"]["r"]["defaults"]["ema"] = {"decay": 0.9, "start_step": 1}
    assert project.train().exit_code == 0
    middle = steps(project.configured / "checkpoints")[0]
    assert project.train("--resume", middle, "--ckpt-dir", project.folder / "x").exit_code == 0
    assert (
        manifest(project.folder / "x")["averaged_weights"] == manifest(project.configured)["averaged_weights"]
    )
    assert files.read_json(middle / "manifest.json")["averaged_weights"] is not None


@pytest.mark.parametrize("kind", ["stage", "receipt", "exported"])
def test_what_can_be_resumed_and_with_how_many_steps_done(trained, tmp_path, kind):
    export(trained.configured, tmp_path / "exported")
    last = steps(trained.configured / "checkpoints")[-1]
    receipt, exported = trained.configured / "train.json", tmp_path / "exported"
    start = {"stage": trained.configured, "receipt": receipt, "exported": exported}[kind]
    said = trained.train("--resume", start, "--max-steps", 8, "--ckpt-dir", tmp_path / "x")
    assert said.exit_code == 0, said.output
    found = manifest(tmp_path / "x")
    tokens = DEFAULTS["seq_len"] * DEFAULTS["micro_batch"]
    assert (found["step"], found["tokens"]) == (8, 8 * tokens)
    assert found["parent_weights"] == files.read_json(last / "manifest.json")["weights"]
    whole = kind != "exported"
    assert ("going on from its step 6" in said.output) == whole
    assert ("holds no optimizer's state, this stage's begins afresh at step 0" in said.output) != whole


def test_reset_steps_takes_the_weights_alone(trained, tmp_path):
    """With a rate that moves nothing, what a training ends with is what it started from."""
    still = ("--lr", "1e-30", "--max-steps", 1)
    said = trained.train("--resume", trained.configured, "--reset-steps", *still, "--ckpt-dir", tmp_path)
    assert said.exit_code == 0, said.output
    found, before = manifest(tmp_path), manifest(trained.configured)
    assert (found["step"], found["global_step"], found["resumed"]) == (1, 1, "weights")
    assert found["parent_weights"] == before["weights"]
    assert found["tokens"] == DEFAULTS["seq_len"] * DEFAULTS["micro_batch"]
    assert same_weights(tmp_path, trained.configured)


def same_weights(one: Path, other: Path) -> bool:
    import spider

    (a, _), (b, _) = (spider.load_model(path) for path in (one, other))
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_activation_checkpointing_may_change_with_a_resume_and_the_model_may_not(trained, tmp_path):
    middle = steps(trained.configured / "checkpoints")[0]
    arguments = ("--resume", middle, "--no-gradient-checkpointing", "--ckpt-dir", tmp_path)
    assert trained.train(*arguments).exit_code == 0
    other = Project(tmp_path / "other", trained.folder / "results/shards/toy")
    other.plain["runs"]["r"]["model"] = {**MODEL, "hidden": 48}
    said = other.train("--resume", middle)
    assert isinstance(said.exception, TrainingError)
    assert "trained another model:\n  model.hidden: 32 -> 48" in str(said.exception)


# ------------------------------------------------------------------------------------------------ bad input


def test_without_names_it_is_the_only_run_and_its_first_stage(project):
    assert project.config.choose() == ("r", "a")
    assert project.config.choose("r", "b") == ("r", "b")
    project.plain["runs"]["s"] = project.plain["runs"]["r"]
    with pytest.raises(ConfigError, match="several runs, name one: r, s"):
        project.config.choose()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int3"], "--precision: must be one of 'auto', 'fp8', 'bf16' or 'fp32' (got 'int3')"),
        (["--resume", "nowhere"], "nowhere: neither a checkpoint, nor a stage folder"),
        (["--resume", "{folder}"], "neither a checkpoint, nor a stage folder, nor an exported folder"),
        (["--resume", "{folder}/old.pt"], "not a training receipt; give a checkpoint"),
        (["--data-dir", "{folder}"], "the dataset is not encoded"),
        (["--data-dir", "{folder}", "--mock-data"], "give --mock-data or --data-dir, not both"),
        (["--reset-steps"], "--reset-steps: needs --resume"),
        (["--max-steps", "0"], "needs tokens, max_steps"),
        (["--lr", "0"], "--lr: must be positive (got 0)"),
        (["r/c"], "no stage 'c'"),
        (["r/b", "--mock-data"], "r/b: starts from stage a, which is not trained"),
    ],
)
def test_wrong_usage_is_explained(project, arguments, message):
    (project.folder / "old.pt").touch()
    said = project.train(*(word.format(folder=project.folder) for word in arguments))
    assert said.exit_code != 0
    assert message in said.output + str(said.exception)
    assert not (project.folder / "results/runs").exists()


def test_a_wrong_value_in_the_environment_names_its_variable(project):
    said = project.train(MICRO_BATCH="many")
    assert said.exit_code == 2
    assert "MICRO_BATCH" in said.output


def test_resuming_what_is_over_or_lies_in_the_same_folder_is_refused(trained, tmp_path):
    said = trained.train("--resume", trained.configured, "--ckpt-dir", tmp_path)
    assert isinstance(said.exception, TrainingError)
    assert "is at step 6, and this stage ends after 6; give it more steps" in str(said.exception)
    said = trained.train("--resume", trained.configured, "--ckpt-dir", trained.configured)
    assert isinstance(said.exception, ConfigError)
    assert "is in this training's own folder" in str(said.exception)


# ---------------------------------------------------------------------------------------- several processes


def spider_train(folder, *arguments):
    """`spider train` of two processes on made-up text."""
    command = [python(), "-m", "spider.cli", "train", "--mock-data", "--ckpt-dir", str(folder / "here")]
    return subprocess.Popen(
        [*command, "--processes", "2", "--threads", "2", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def is_second(process, folder):
    """Return whether a process is the second one of a training in a folder."""
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(folder) and process.environ().get("RANK") == "1"
    return False


def test_several_processes_speak_with_one_voice_leave_together_and_go_on(project):
    (project.folder / "config.yaml").write_text(yaml.safe_dump(project.plain))
    whole = ("--micro-batch", "2", "--grad-accum", "2", "--max-steps", "4000")
    first = spider_train(project.folder, *whole)
    assert first.stderr is not None
    said = []
    for line in first.stderr:
        said.append(line)
        if "step 6/4000" in line:
            first.send_signal(signal.SIGUSR1)
    assert first.wait() == RESUME_ME, said
    batch = "4 windows of 32 (1 micro-batches of 2 on each of 2 processes, ddp)"
    assert sum(batch in line for line in said) == 1
    assert sum("step 3/4000" in line for line in said) == 1
    (saved,) = steps(project.folder / "here/checkpoints")[-1:]
    manifest = files.read_json(saved / "manifest.json")
    assert (manifest["processes"], manifest["parallel"], manifest["threads"]) == (2, "ddp", 1)
    assert manifest["step"] >= 6

    again = spider_train(project.folder, *whole)
    assert again.stderr is not None
    for line in again.stderr:
        if f"step {manifest['step'] + 3 - manifest['step'] % 3}/4000" in line:
            (second,) = (p for p in psutil.process_iter() if is_second(p, project.folder))
            second.kill()
            break
    rest = again.stderr.read()
    assert again.wait() == 1
    assert "process 1 was killed" in rest and "another process of this training is gone" in rest
    assert "Traceback" not in rest

    uneven = spider_train(project.folder, "--micro-batch", "3", "--ckpt-dir", str(project.folder / "other"))
    _, error = uneven.communicate()
    assert uneven.returncode == 1
    assert error.count("3 windows, which 2 processes cannot share evenly") == 1 and "Traceback" not in error


def test_the_remedies_of_a_diverged_training_can_be_followed(project):
    defaults = project.plain["runs"]["r"]["defaults"]
    defaults |= {"lr": 100.0, "warmup_steps": 0, "ckpt_every": 1, "max_steps": 20}
    failed = project.train("r/a")
    assert isinstance(failed.exception, TrainingError)
    good = re.search(
        r"the last good checkpoint is (\S+)\. The same settings fail again: lower lr", str(failed.exception)
    )[1]
    elsewhere = project.train("r/a", "lr=1e-3", "--resume", good)
    assert elsewhere.exit_code == 0 and [manifest(folder)["step"] for folder in project.made] == [20]
    project.configured.rename(project.folder / "aside")
    defaults["lr"] = 1e-3
    again = project.train("r/a")
    assert again.exit_code == 0 and manifest(project.configured)["step"] == 20
