import re
import subprocess
import sys
from pathlib import Path

import pytest

from spider.config import ModelConfig
from spider.model.gpt.config import Config as GPTConfig

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
