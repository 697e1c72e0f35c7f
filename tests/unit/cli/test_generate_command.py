"""`spider generate` on a trained checkpoint: what it writes, and what it says to input it cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import spider
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST
from spider.cli import cli, main
from spider.common import files
from spider.evaluation.generate import generate
from spider.training.stage import train


@pytest.fixture(scope="module")
def stage(tmp_path_factory, shards, make_spec) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stage")
    train(make_spec(max_steps=2), folder, shards)
    return folder


def say(*arguments: object, given: bytes = b"") -> Result:
    return CliRunner().invoke(cli, ["generate", *map(str, arguments)], input=given)


def test_it_writes_the_prompt_and_what_the_model_adds(stage):
    model, _ = spider.load_model(stage)
    expected = bytes(generate(model, "the ", max_bytes=30, temperature=0, seed=0, context=64))
    said = say(stage, "--prompt", "the ", "--bytes", 30, "--temperature", 0, "--context", 64)
    assert said.exit_code == 0, said.output
    assert said.output == "the " + expected.decode("utf-8", "replace") + "\n"


def test_options_reach_the_sampler(stage):
    runs = [
        say(stage, "--prompt", "a", "--bytes", 40, *extra).output
        for extra in ([], [], ["--seed", 1], ["--top-k", 1], ["--top-p", 1e-6], ["--n-loops", 1])
    ]
    assert runs[0] == runs[1]
    assert len({runs[0], runs[2], runs[3]}) == 3
    assert runs[3] == runs[4]  # the likeliest byte either way


def test_a_prompt_may_be_any_bytes_from_a_file_or_none_at_all(stage, tmp_path):
    (tmp_path / "prompt").write_bytes(b"caf\xe9 ")
    assert say(stage, "--prompt-file", tmp_path / "prompt", "--bytes", 5).output.startswith("caf\ufffd ")
    assert say(stage, "--prompt-file", "-", "--bytes", 5, given=b"the ").output.startswith("the ")
    assert say(stage, "--bytes", 5).exit_code == 0


def test_a_prompt_that_is_not_utf8_is_refused_on_the_command_line(stage):
    """A real process: only the operating system hands over such an argument."""
    command = [sys.executable, "-m", "spider.cli", "generate", str(stage), "--prompt", b"caf\xe9"]
    said = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"}, check=False
    )
    assert said.returncode == 1
    assert "error: the prompt is not valid UTF-8: e9 (hexadecimal) after 'caf'" in said.stderr
    assert "Traceback" not in said.stderr


def rewrite(stage: Path, tmp_path: Path, change) -> Path:
    """A copy of the newest checkpoint whose manifest was changed."""
    good, _ = Checkpoint.newest_good(stage / "checkpoints")
    copy = tmp_path / good.path.name
    copy.mkdir()
    for file in good.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest["spec"]["model"])
    del manifest["digest"]
    manifest["digest"] = files.digest(manifest)
    files.write_json(copy / MANIFEST, manifest)
    return copy


def test_a_checkpoint_of_another_architecture_is_refused_by_its_tensors(stage, tmp_path, monkeypatch, capsys):
    wider = rewrite(stage, tmp_path, lambda model: model.update(ffn_hidden=model["ffn_hidden"] + 8))
    monkeypatch.setattr(sys, "argv", ["spider", "generate", str(wider)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "a checkpoint of another architecture" in said
    assert "prelude.0.ffn.down.weight has shape" in said


def test_a_checkpoint_in_words_unknown_here_is_refused(stage, tmp_path):
    newer = rewrite(stage, tmp_path, lambda model: model.update(gravity=9.81))
    with pytest.raises(ValueError, match=r"another version of Spider \(model\.gravity"):
        spider.load_model(newer)


def test_several_samples_are_those_of_their_seeds(stage):
    model, _ = spider.load_model(stage)
    settings = {"max_bytes": 30, "temperature": 0.8, "context": 64}
    said = say(stage, "--prompt", "the ", "--bytes", 30, "--context", 64, "--seed", 4, "--num-samples", 3)
    assert said.exit_code == 0, said.output
    for seed in (4, 5, 6):
        text = "the " + model.tokens.decode(generate(model, "the ", seed=seed, **settings))
        assert f"--- seed {seed}\n{text}\n" in said.output
