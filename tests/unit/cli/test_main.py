"""The command line: imports of its help, and its exit statuses."""

import json
import subprocess
import sys

import click
import pytest

from spider.cli import cli, main
from spider.cli.train import ALIASES
from spider.common.errors import RESUME_ME, Preempted

HEAVY = ("torch", "mlflow", "datasets", "matplotlib", "pyarrow", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["track", "ui", "--help"]])
def test_help_imports_no_heavy_library(arguments):
    asked = "import sys, json; from spider.cli import cli; cli(sys.argv[1:], standalone_mode=False); "
    asked += f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    said = subprocess.run([sys.executable, "-c", asked, *arguments], capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.startswith("Usage: "), said
    assert json.loads(said.stdout.splitlines()[-1]) == []


def test_every_command_has_a_help_text():
    def commands(group: click.Group):
        for command in group.commands.values():
            yield from commands(command) if isinstance(command, click.Group) else [command]

    assert all(command.help and command.help.strip() for command in commands(cli))


def test_the_help_of_an_alias_names_its_setting():
    options = {option.opts[0]: option for option in cli.commands["train"].params}
    assert options["--lr"].help == "Alias of lr=VALUE."
    assert options["--no-gradient-checkpointing"].help == "Alias of model.gradient_checkpointing=false."
    variables = [variable for _, variable in ALIASES.values() if variable]
    assert all(options[flag].help for flag, _ in ALIASES.values())
    assert all(variable in cli.commands["train"].help for variable in variables)


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
