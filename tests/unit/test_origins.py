"""The page about the origins has its rows in order, and what it names as shown exists."""

import re
from pathlib import Path

import pytest

from spider.config import load_config
from spider.config.reference import reference

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/origins.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (\d|M-)", line)]

#: The names of all keys of the configuration.
KEYS = set(re.findall(r"^\| `(\w+)`", reference(), re.M))


def exists(name: str) -> bool:
    """Return whether a preset, a file or a key of the configuration has this name."""
    if name.endswith(".yaml"):
        return (ROOT / "presets" / name).exists()
    return (ROOT / name).exists() if "/" in name else name.rpartition(".")[2] in KEYS


def test_the_preset_of_the_document_has_what_its_command_and_its_trainer_set():
    config = load_config(ROOT / "presets/spider-seed.yaml")
    run, stage = config.runs["spider-seed"], config.stage("spider-seed", "main").settings
    assert (run.precision, run.optimizer.kind) == ("fp8", "adamw8bit")
    assert run.optimizer.narrow == ["matrices", "tables"] and run.optimizer.weight_decay == 0.1
    assert all(run.optimizer.groups[name].weight_decay == 0.1 for name in ("tables", "vectors"))
    assert (stage.seq_len, stage.micro_batch, stage.grad_accum, stage.n_loops) == (256, 112, 4, 6)
    assert (stage.lr, stage.tokens, stage.schedule) == (3e-4, 10_000_000_000, "cosine")
    assert stage.order == "text"
    assert config.datasets["fineweb-edu"].max_document_bytes == 2048


def test_rows_are_in_order_and_each_is_there_once():
    ids = [row[0].strip() for row in ROWS]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_what_a_row_names_exists(row):
    """Another test follows the links."""
    _, _, today, shown = row
    names = re.findall(r"`([^`]+)`", shown)
    assert today.strip() and (names or "](" in shown)
    assert [name for name in names if not exists(name)] == []
