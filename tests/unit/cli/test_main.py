"""The command line: imports of its help, and its exit statuses."""

import os
import subprocess
import sys

import click
import pytest

from spider.cli import cli, main
from spider.cli.session import grow_segments
from spider.cli.train import ALIASES
from spider.common.errors import RESUME_ME, Preempted

HEAVY = ("torch", "mlflow", "datasets", "matplotlib", "pyarrow", "numpy")


def test_help_imports_no_heavy_library():
    asked = "import sys; from click.testing import CliRunner; from spider.cli import cli\n"
    asked += "for words in ('', 'train', 'track ui', 'data', 'generate'):\n"
    asked += "    done = CliRunner().invoke(cli, [*words.split(), '--help'])\n"
    asked += "    assert done.output.startswith('Usage: '), done\n"
    asked += f"print([m for m in {HEAVY} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert said.stdout == "[]\n", said


def test_segments_of_gpu_memory_grow_unless_the_user_sets_the_allocator(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    grow_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    grow_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_help_of_an_alias_names_its_setting():
    train = cli.get_command(click.Context(cli), "train")
    options = {option.opts[0]: option for option in train.params}
    assert options["--lr"].help == "Alias of lr=VALUE."
    assert options["--no-gradient-checkpointing"].help == "Alias of model.gradient_checkpointing=false."
    variables = [variable for _, variable in ALIASES.values() if variable]
    assert all(options[flag].help for flag, _ in ALIASES.values())
    assert all(variable in train.help for variable in variables)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("what to do"), 1, "error: what to do"),
        (PermissionError(13, "denied", "there"), 1, "there: permission denied; name a folder you may write"),
        (OSError(28, "full", "here"), 1, "here: no space left on the disk; free some and run the same"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again"),
        (click.UsageError("no such option"), 2, "Error: no such option"),
        (Preempted(15, 7), RESUME_ME, "SIGTERM: stopped after step 7, run again to go on"),
    ],
)
def test_an_expected_error_is_one_message_and_a_status(monkeypatch, capsys, error, status, message):
    @cli.command("fail")
    def fail():
        raise error

    monkeypatch.setattr(sys, "argv", ["spider", "fail"])
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        del cli.commands["fail"]
    assert left.value.code == status
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
