import re
import subprocess
import sys
from pathlib import Path

import pytest

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
