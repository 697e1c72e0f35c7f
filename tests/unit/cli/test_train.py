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

from spider.checkpoints.metrics import read_rows
from spider.checkpoints.records import steps
from spider.cli import cli
from spider.common import files
from spider.common.errors import RESUME_ME, TrainingError
from spider.config import Given, load_config, with_settings
from spider.publish.export import export
from spider.training.loop import Trainer
from spider.training.stage import Places, plan
from tests.advice.followed import advised
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
                    "evaluation": {"checkpoints": 0},
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


# ------------------------------------------------------------------------------------------------ settings


def test_flags_and_paths_go_before_the_environment_and_that_before_the_configuration(project):
    said = project.train(
        *("r/a", "--micro-batch", 2, "--grad-accum", 2, "--lr", "1e-4", "--precision", "bf16"),
        *("--max-steps", 2, "--no-gradient-checkpointing", "--ckpt-dir", project.folder / "x"),
        *("model.recurrence.loops=3", "optimizer.kind=adamw8bit", "seed=5", "ema.decay=0.9"),
        *("parallel=fsdp", "compile=false"),
        **{"SEQ_LEN": "40", "LR": "2e-4", "N_LOOPS": "", "TARGET_TOKENS": "4000", "CKPT_EVERY": "1"},
    )
    assert said.exit_code == 0, said.output
    spec = manifest(project.folder / "x")["spec"]
    settings = spec["settings"]
    found = {name: settings[name] for name in ("seq_len", "micro_batch", "grad_accum", "lr", "max_steps")}
    assert found == {"seq_len": 40, "micro_batch": 2, "grad_accum": 2, "lr": 1e-4, "max_steps": 2}
    assert (settings["tokens"], settings["ckpt_every"], settings["n_loops"]) == (4000, 1, 3)
    assert (spec["precision"], spec["compile"], spec["parallel"], spec["seed"]) == ("bf16", False, "fsdp", 5)
    assert settings["ema"]["decay"] == 0.9 and spec["optimizer"]["kind"] == "adamw8bit"
    assert spec["model"]["recurrence"]["loops"] == 3 and not spec["model"]["recurrence"]["checkpointing"]
    assert "seq_len 40 (SEQ_LEN)" in said.output and "lr 0.0001 (--lr)" in said.output
    assert "model.recurrence.loops 3 (model.recurrence.loops=3)" in said.output
    assert "all others from" in said.output
    receipt = files.read_json(project.folder / "x/train.json")
    assert f"r/a: trained to step 2 on {receipt['bytes']}" in said.output


def test_the_smaller_variables_of_the_seeds_are_read(project):
    said = project.train(
        "--max-steps", 1, "--ckpt-dir", project.folder / "x", MICRO_BATCH="2", GRAD_ACCUM="3", N_LOOPS="1"
    )
    assert said.exit_code == 0, said.output
    found = manifest(project.folder / "x")["spec"]["settings"]
    assert (found["micro_batch"], found["grad_accum"], found["n_loops"]) == (2, 3, 1)


def test_a_setting_of_a_stage_goes_before_the_file_whatever_the_file_sets_it_in(project):
    run = project.plain["runs"]["r"]
    run["defaults"]["ema"] = {"decay": 0.9, "start_step": 4}
    run["stages"][1]["lr"] = 0.25
    given = [Given("lr", "lr", 0.5), Given("", "ema.decay", 0.5), Given("", "tokens", 1000)]
    changed, _ = with_settings(project.config, "r", "b", given)
    settings = changed.stage("r", "b").settings
    assert (settings.lr, settings.tokens, settings.ema.decay, settings.ema.start_step) == (0.5, 1000, 0.5, 4)
    assert changed.stage("r", "a").settings == project.config.stage("r", "a").settings
    # A model is chosen before its parts are set.
    given = [Given("", "model.hidden", 64), Given("", "model", "tiny")]
    model = with_settings(project.config, "r", "a", given)[0].runs["r"].model
    assert (model.preset, model.hidden, model.ffn_hidden) == ("tiny", 64, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lrr=1", 'lrr=1: unknown key; did you mean "lr"?'),
        ("model.recurrence.lops=1", 'model.recurrence.lops=1: unknown key; did you mean "loops"?'),
        ("lr=1e-3 --lr 2e-3", "--lr and lr=1e-3 are the same setting; give one of them"),
        ("model.recurrence.loops=2 n_loops=3", "n_loops of this run overrides the model's loops"),
        ("stages.a.lr=1", "stages.a.lr=1: unknown key"),
        ("lr=[1", "lr=[1: '[1' is not valid YAML"),
        (
            'ema={"decay":0.1,"decay":0.2}',
            "the key 'decay' is given in line 1 and again in line 1; remove or",
        ),
        ("lr=fast", "lr=fast: must be a number (got 'fast')"),
        ("model.hidden=-1", "model.hidden=-1: must be positive (got -1)"),
        ('ema={"decay":2}', 'ema={"decay":2}.decay: must be below 1.0'),
        ("r/a lr 4", "unexpected lr, 4; a setting is written PATH=VALUE"),
        ("--precision int3", "--precision: must be one of 'auto', 'fp8', 'bf16' or 'fp32' (got 'int3')"),
        ("--resume nowhere", "nowhere: neither a checkpoint, nor a stage folder"),
        ("--resume old.pt", "not a training receipt; give a checkpoint"),
        ("--data-dir .", "the dataset is not encoded"),
        ("--reset-steps", "--reset-steps: needs --resume"),
        ("--max-steps 0", "needs tokens, max_steps"),
        ("r/c", "no stage 'c'"),
    ],
)
def test_a_wrong_setting_is_explained_in_the_words_it_was_given_in(project, monkeypatch, words, message):
    monkeypatch.chdir(project.folder)
    Path("old.pt").touch()
    said = project.train(*words.split())
    assert said.exit_code != 0 and message in said.output + str(said.exception)
    assert not (project.folder / "results/runs").exists()


def test_a_wrong_value_in_the_environment_names_its_variable(project):
    said = project.train(MICRO_BATCH="many")
    assert said.exit_code == 2 and "MICRO_BATCH" in said.output


def test_a_number_of_steps_between_checkpoints_replaces_the_configured_minutes(project):
    project.plain["runs"]["r"]["defaults"] |= {"ckpt_minutes": 10, "max_steps": 5}
    said = project.train(CKPT_EVERY="2")
    assert said.exit_code == 0, said.output
    assert "ckpt_every 2 (CKPT_EVERY)" in said.output
    assert "ckpt_minutes: 10 of the configuration has no effect, CKPT_EVERY replaces it" in said.output
    saved = [int(path.name.removeprefix("step-")) for path in steps(project.configured / "checkpoints")]
    assert saved == [4, 5]
    # Minutes that are given beside steps are kept.
    said = project.train("ckpt_every=2", "ckpt_minutes=20", "--ckpt-dir", project.folder / "x")
    assert said.exit_code == 0 and "has no effect" not in said.output
    assert len(steps(project.folder / "x/checkpoints")) == 1


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


def test_the_seeds_laptop_command_runs_on_the_default_configuration(tmp_path):
    (tmp_path / "config.yaml").write_bytes((REPO / "config.yaml").read_bytes())
    command = "train --mock-data --max-steps 5 --seq-len 128 --micro-batch 2"
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
    assert receipt["steps"] == 5
    assert receipt["bytes"] <= 5 * 2 * 128
    assert f"main: trained to step 5 on {receipt['bytes']:,} bytes" in said.stderr
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


def test_activation_checkpointing_may_change_with_a_resume_and_the_model_may_not(trained, tmp_path):
    middle = steps(trained.configured / "checkpoints")[0]
    arguments = ("--resume", middle, "--no-gradient-checkpointing", "--ckpt-dir", tmp_path)
    assert trained.train(*arguments).exit_code == 0
    other = Project(tmp_path / "other", trained.folder / "results/shards/toy")
    other.plain["runs"]["r"]["model"] = {**MODEL, "hidden": 48}
    said = other.train("--resume", middle)
    assert isinstance(said.exception, TrainingError)
    assert "trained another model:\n  model.hidden: 32 -> 48" in str(said.exception)


def test_the_remedies_of_a_diverged_training_can_be_followed(project, monkeypatch):
    update, rate = Trainer._update, 2e-3

    def overflowing(self, *given):
        update(self, *given)
        if self.progress.step == 9 and self.settings.lr == rate:  # as too high a rate does, on any processor
            for p in self.model.parameters():
                p.detach().mul_(1e30)

    monkeypatch.setattr(Trainer, "_update", overflowing)
    defaults = project.plain["runs"]["r"]["defaults"]
    defaults |= {"lr": rate, "warmup_steps": 0, "ckpt_every": 1, "max_steps": 20}
    failed = project.train("r/a")
    assert isinstance(failed.exception, TrainingError)
    advised(str(failed.exception), "training/loop.py", "lower lr or optimizer.clip", "move {} away and ")
    good = re.search(r"the last good checkpoint is (\S+)\. ", str(failed.exception))[1]
    elsewhere = project.train("r/a", "lr=1e-3", "--resume", good)
    assert elsewhere.exit_code == 0 and [manifest(folder)["step"] for folder in project.made] == [20]
    project.configured.rename(project.folder / "aside")
    defaults |= {"lr": 1e-3, "max_steps": 2}
    again = project.train("r/a")
    assert again.exit_code == 0 and manifest(project.configured)["step"] == 2


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
