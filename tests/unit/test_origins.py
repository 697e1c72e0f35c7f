"""The page about the origins has each row of the audit once, and what it names as shown exists."""

import re
from pathlib import Path

import pytest

from spider.config import load_config
from spider.config.reference import reference

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/origins.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (\d|M-)", line)]

#: The numbers that the audit gave to lines of the descriptions where a difference is left.
_LISTED = """
000-03 000-04 000-15 000-19 000-20 000-21 000-25 000-28 000-29 000-32 000-34 000-37 000-42 000-43 000-44
000-47 000-48 000-54 000-55 
001-02 001-03 001-05 001-06 001-07 001-08 001-12 001-13 001-14 001-20 001-21 001-25 001-26 001-28
001-44 001-45
002-02 002-03 002-16 002-18 002-19 002-23 002-24 002-26 002-27 002-28 002-31 002-34 002-35 002-36
002-40 002-41 002-42 002-43 002-44 002-48 002-49 002-50 002-51 002-52 002-53 002-54 002-57 002-58
002-60 002-61 002-62 002-66
003-10 003-13 003-14 003-17 003-18 003-20 003-23 003-25 003-30 003-31 003-33 003-34
003-36 003-38 003-43 003-44 003-45 003-46 003-47 003-48 003-50 003-51 003-52 003-53 003-54 
003-57 003-59 003-60 003-61 003-63 003-65 003-66 003-71 003-72 003-75 003-76 003-77 003-79
M-02 M-03 M-13 M-14 M-18
"""
IDS = _LISTED.split()

#: The names of all keys of the configuration.
KEYS = set(re.findall(r"^\| `(\w+)`", reference(), re.M))


def exists(name: str) -> bool:
    """Return whether a test, a preset, a file or a key of the configuration has this name."""
    path, _, test = name.partition("::")
    if test:
        return re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.M) is not None
    if path.endswith(".yaml"):
        return (ROOT / "presets" / path).exists()
    return (ROOT / path).exists() if "/" in path else path.rpartition(".")[2] in KEYS


def test_the_preset_of_the_document_has_what_its_command_and_its_trainer_set():
    config = load_config(ROOT / "presets/spider-seed.yaml")
    run, stage = config.runs["spider-seed"], config.stage("spider-seed", "main").settings
    assert (run.precision, run.optimizer.kind, run.optimizer.narrow) == ("fp8", "adamw8bit", ["matrices"])
    assert (stage.seq_len, stage.micro_batch, stage.grad_accum, stage.n_loops) == (256, 112, 4, 6)
    assert (stage.lr, stage.tokens, stage.schedule) == (3e-4, 10_000_000_000, "cosine")
    assert config.datasets["fineweb-edu"].max_document_bytes == 2048


def test_every_row_of_the_audit_is_there_once():
    assert [row[0].strip() for row in ROWS] == IDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_what_a_row_names_exists(row):
    """Another test follows the links."""
    _, _, today, shown = row
    names = re.findall(r"`([^`]+)`", shown)
    assert today.strip() and (names or "](" in shown)
    assert [name for name in names if not exists(name)] == []
