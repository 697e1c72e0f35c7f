"""Test the terminal summary of a workflow."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from spider.evaluation.result import BITS, BYTES, GIVEN, GIVEN_STAGE, Number, Result, Row, shortened
from spider.report.tables import Invocation, compare, terminal_summary
from tests.unit.evaluation.stages import demo, write_benchmark


def bits_number(value: float) -> Number:
    return Number(value=value, unit=BITS)


def shown(tmp_path, *, shift=0.0, terminal=False, width=80, **changed) -> str:
    for rule, seconds in (("train", 182.0), ("evaluate", 21.0)):
        write_benchmark(tmp_path / "benchmarks", rule, "x", seconds)
    paths = demo(tmp_path / "runs", shift=shift, **changed)
    compare(paths, benchmarks=tmp_path / "benchmarks", output=tmp_path / "report")
    file, colours = io.StringIO(), "truecolor" if terminal else None
    console = Console(file=file, width=width, force_terminal=terminal, color_system=colours)
    terminal_summary(tmp_path / "report" / "summary.json", console=console)
    return file.getvalue()


def summary_of(paths, tmp_path):
    compare(paths, output=tmp_path / "report")
    file = io.StringIO()
    terminal_summary(tmp_path / "report/summary.json", console=Console(file=file, width=80))
    return file.getvalue()


def test_it_shows_scores_a_sample_and_the_next_commands(tmp_path):
    text = shown(tmp_path)
    for needed in (
        "Bits per byte of 500,000 held-out bytes of pydocs, lower is better:",
        "model   alone           came before  parameters       on  time  steps",
        "warmup  3.020 ████████  2.920            1.00 k   400 kB  12 s    100",
        "anneal  2.050 █████     1.950            1.00 k  2.80 MB  38 s    700",
        "bz2     2.310 ██████    2.260\n",
        "demo writes: The function returns the [value] of the",  # brackets are text, not markup
        "make ui\n",
        ".venv/bin/spider generate demo/anneal\n",
    ):
        assert needed in re.sub(" *\n", "\n", text) or needed in " ".join(text.split()), needed
    table = (tmp_path / "report/table.md").read_text()
    assert "| **2.0500** | 1.9500 |" in table


def test_each_model_is_compared_with_what_was_given_the_same_text(tmp_path):
    """By the compressors given the stage's text, or else the most text, in the worse of the two contexts."""

    def given(name: str, value: float | None, carried: float, group: str, size: int) -> Row:
        columns = {GIVEN: Number(value=size, unit=BYTES)}
        more = {"unit": BITS, "baseline": True, "group": group, "columns": columns}
        return Row(name=name, label=f"{name} {group}", value=value, carried=bits_number(carried), **more)

    def sentence(*rows: Row) -> str:
        folder = tmp_path / str(len(rows))
        text = " ".join(shown(folder, results={"baselines": Result(title="", rows=[*rows])}).split())
        return text.partition(" the same text, ")[2].partition(". Bits")[0]

    rows = given("ppmd", 2.4, 2.3, "", 0), given("ppmd", 1.6, 1.7, "all", 900)
    assert sentence(*rows) == "demo needs 28.1% more bits"
    assert sentence(*rows, given("zpaq", None, 1.5, "all", 900)) == "demo needs 30.0% more bits"
    assert sentence(*rows, *rows, given("ppmd", 2.1, 2.0, GIVEN_STAGE, 400)) == "demo needs 2.4% fewer bits"


@pytest.mark.parametrize(
    ("started", "commands"),
    [
        (Invocation(), ["make ui", ".venv/bin/spider generate a/b"]),
        (Invocation(tracked=False), [".venv/bin/spider generate a/b"]),
        (
            Invocation(config=Path.cwd() / "presets/my own.yaml"),
            [
                "make ui CONFIG='presets/my own.yaml'",
                ".venv/bin/spider --config 'presets/my own.yaml' generate a/b",
            ],
        ),
        (
            Invocation(config=Path("/a/b.yaml"), snakefile=Path("/c/Snakefile")),
            ["spider --config /a/b.yaml track ui", "spider --config /a/b.yaml generate a/b"],
        ),
    ],
)
def test_the_last_lines_name_commands_for_the_same_configuration(started, commands):
    named = [*started.commands(Path("/results/report"), "a", "b").values()]
    assert [one for one in named if one.startswith(("make", "spider", ".venv"))] == commands
    assert "/results/report/runs/a.html" in named


def test_short_lists_show_the_best_baselines_of_each_group_in_each_column():
    numbers = {
        "ppmd": (1.6, 1.57, "all"),
        "zpaq": (None, 1.4, "all"),
        "xz": (2.4, 2.2, ""),
        "zstd": (2.5, 2.3, ""),
    }
    rows = [
        Row(name=name, label=name, value=alone, carried=bits_number(carried), unit=BITS, group=group)
        for name, (alone, carried, group) in numbers.items()
    ]
    assert [row.label for row in shortened(rows)] == ["ppmd", "xz", "zpaq"]
    assert shortened(rows[2:]) == rows[2:], "all of an only group"


def test_a_compressor_without_a_number_in_a_column_has_an_empty_cell(tmp_path):
    numbers = {"alone only": (2.10, None), "xz": (2.20, bits_number(2.15)), "zpaq": (None, bits_number(1.5))}
    rows = [
        Row(name=name, label=name, value=alone, carried=carried, unit=BITS, baseline=True, group=name)
        for name, (alone, carried) in numbers.items()
    ]
    text = " ".join(shown(tmp_path, results={"baselines": Result(title="", rows=rows)}).split())
    assert "alone only 2.100 ██████ xz" in text and "zpaq 1.500 " in text
    table = (tmp_path / "report/table.md").read_text()
    assert "| zpaq |  | 1.5000 |" in table and "| alone only | 2.1000 |  |" in table


def test_lines_fit_80_columns_and_a_pipe_gets_no_colour(tmp_path):
    text = shown(tmp_path, width=200, sample="x" * 500 + "\n\n東京" * 60)
    assert "\x1b" not in text
    from rich.cells import cell_len

    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_a_terminal_gets_colours_but_no_control_characters_of_the_model(tmp_path):
    text = shown(tmp_path, terminal=True, sample="a\x1b[2Jb\x07\r\tc")
    assert "\x1b[1;32m" in text
    assert "\x1b[2J" not in text and "\x07" not in text and "\r" not in text


def test_an_audit_is_a_column_and_a_line(tmp_path):
    """Good news of several models share a line; bad news have all that is known."""
    paths = demo(tmp_path / "runs")
    for path, state, tone in zip(paths, ("passed", "passed", "failed"), ("good", "good", "bad"), strict=True):
        row = Row(name="a", label="audit", value=None, text=state, tone=tone, column=True, note="the checks")
        found = Result(title="Audit", rows=[row]).model_dump()
        path.with_name("audit.json").write_text(json.dumps({"result": found}))
    text = summary_of(paths, tmp_path)
    assert "Audit passed: demo / warmup, demo / main." in text
    assert "Audit FAILED, demo / anneal: the checks." in text
