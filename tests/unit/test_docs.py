import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from spider.cli import cli
from spider.cli.train import _read_settings
from spider.config import ModelConfig, load_config, with_settings
from spider.model.gpt.config import Config as GPTConfig
from tests.shown_commands import shown, words

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_what_the_schema_says():
    script = ROOT / "docs/config_reference.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/config.md").read_text() == made, (
        "run: python docs/config_reference.py > docs/config.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_are_there(page):
    """The log is history; all else speaks of the tree as it is."""
    if page.name == "LOG.md":
        return
    folders = "spider|kernels|tests|rules|benchmarks|presets|profiles|docs"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_gpt_page_lists_every_switch():
    """The sizes of a model and three constants are not switches; everything else is in the table."""
    page = (ROOT / "docs/gpt.md").read_text()
    sizes = {"hidden", "layers", "heads", "ffn_ratio", "vocab_size", "rope_base", "norm_eps"}
    switches = set(GPTConfig.model_fields) - set(ModelConfig.model_fields) - sizes
    assert [switch for switch in sorted(switches) if f"`{switch}`" not in page] == []


def test_the_golf_page_names_each_variable_of_the_original_script_and_only_keys_that_exist():
    page = (ROOT / "docs/golf.md").read_text()
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*) \|$", page, re.M)
    variables = [name for row, _ in rows for name in re.findall(r"`([A-Z0-9_]+)`", row)]
    assert len(variables) == len(set(variables)) == 44
    reference = (ROOT / "docs/config.md").read_text()
    named = {word for _, key in rows for word in re.findall(r"`([a-z_.]+)`", key)}
    keys = {part for name in named for part in name.split(".") if part}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", reference)] == []


def parsed(command: click.Command, arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that a line names, and its own words; refuses an unknown command, option, or extra word."""
    while isinstance(command, click.Group):
        _, rest, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
        if not rest:
            return command, arguments
        assert rest[0] in command.commands, rest[0]
        command, arguments = command.commands[rest[0]], rest[1:]
    _, extra, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
    assert not extra, extra
    return command, arguments


@pytest.mark.parametrize("line", shown("spider").values(), ids=shown("spider"))
def test_commands_that_are_shown_can_be_given(line):
    variables = re.findall(r"^(?:([A-Z_]+)=(\S+) )(?:([A-Z_]+)=(\S+) )?", line)
    given = words(line)[words(line).index("spider") + 1 :]
    command, arguments = parsed(cli, given)
    if command is not cli.commands["train"] or "--resume" in arguments or "--help" in arguments:
        return
    # A training is planned: its settings are taken, and its processes share a step.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(*[iter(variables[0] if variables else ())] * 2, strict=True):
            patch.setenv(name, value)
        context = command.make_context("train", list(arguments))
        names, settings, _ = _read_settings(context)
    path = ROOT / "config.yaml"
    if given[0] == "--config":  # what a preset left in its results folder
        path = ROOT / "presets" / f"{Path(given[1]).parent.name}.yaml"
    config = load_config(path)
    run, stage = config.choose(*names)
    changed, _ = with_settings(config, run, stage, settings)
    assert changed.stage(run, stage).micro_batch(context.params["processes"]) >= 1


def test_the_resources_shown_for_a_cluster_fit_the_preset_shown_for_it():
    page = (ROOT / "docs/cluster.md").read_text()
    (block,) = re.findall(r"^```yaml\n(resources:.*?)```", page, re.M | re.S)
    plain = yaml.safe_load((ROOT / "presets/spider-1b.yaml").read_text())
    plain["runs"]["spider-1b"] |= yaml.safe_load(block)
    config = load_config(plain)
    assert config.stage("spider-1b", "main").processes == 16


def test_the_guide_lists_every_rule_and_its_command():
    rules = [
        name
        for path in (ROOT / "rules").glob("*.smk")
        for name in re.findall(r"^ *rule (\w+):", path.read_text(), re.M)
    ]
    rows = re.findall(
        r"^\| (\w+) \| .* \| `spider (\w+) [^`]*` \|$", (ROOT / "docs/guide.md").read_text(), re.M
    )
    assert sorted(rule for rule, _ in rows if rule != "rule") == sorted(rules)
    for rule, command in rows:
        assert rule.removesuffix("_compressed") == command
