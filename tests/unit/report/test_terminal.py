"""Test the terminal summary of a workflow."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from spider.evaluation.result import BITS, BYTES, GIVEN, Number, Result, Row
from spider.report.tables import Invocation, compare, terminal_summary
from tests.unit.evaluation.stages import demo, write_benchmark, write_stage


def bits_number(value: float) -> Number:
    return Number(value=value, unit=BITS)


def given(name: str, alone: float | None, carried: float, group: str, size: float) -> Row:
    """Return the row of a compressor that was given ``size`` megabytes."""
    return Row(
        name=f"compressors/{name} {group}".strip(),
        label=f"{name} {group}".strip(),
        value=alone,
        carried=bits_number(carried),
        unit=BITS,
        better="lower",
        baseline=True,
        group=group,
        columns={GIVEN: Number(value=size * 1e6, unit=BYTES)},
    )


def compared(runs: Path) -> list[Path]:
    """Write two runs on one held-out text, one of them with an n-gram index; both have two stages."""
    both = [
        given("ppmd", 1.61, 1.57, "given all", 26.5),
        given("zpaq", None, 1.377, "given all", 26.5),
        given("xz", 2.39, 2.2, "", 0),
        given("ppmd", 1.90, 1.85, "", 0),
    ]
    own = [given("ppmd", 1.814, 1.764, "given stage", 12)]
    paths = []
    for run, bpb, rows, counted in (("gpt", 2.15, both + own, 0), ("ngram", 1.4, both, 25_200_000)):
        changed = {"results": {"baselines": Result(title="", rows=rows)}, "counted": counted}
        paths += [
            write_stage(runs, run, "main", 0, bpb + 0.1, global_step=400, steps=400, **changed),
            write_stage(runs, run, "anneal", 1, bpb, global_step=700, steps=300, **changed),
        ]
    return paths


def shown(tmp_path, *, shift=0.0, terminal=False, width=80, **changed) -> str:
    for rule, seconds in (("train", 182.0), ("evaluate", 21.0)):
        write_benchmark(tmp_path / "benchmarks", rule, "x", seconds)
    paths = demo(tmp_path / "runs", shift=shift, **changed)
    compare(paths, benchmarks=tmp_path / "benchmarks", output=tmp_path / "report")
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None
    )
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
        "500,000 held-out bytes of pydocs: bits per byte, lower is better",
        "demo, each document alone: 2.050 bits per byte, 11.3% below bz2, the best of the",
        "demo, with what came before: 1.950 bits per byte, 13.7% below bz2, the best of",
        "model   alone           came before  parameters       on  time  steps",
        "warmup  3.020 ████████  2.920            1.00 k   400 kB  12 s    100",
        "anneal  2.050 █████     1.950            1.00 k  2.80 MB  38 s    700",
        "bz2     2.310 ██████    2.260\n",
        "the probabilities of all ids sum to one within",
        "A sample of demo, the prompt in bold:\nThe function",
        "The function returns the [value] of the",  # brackets are text, not markup
        "report/",
        "make ui\n",
        "make report\n",
        "Time of all jobs: 3 min 23 s; the longest: train 3 min 02 s, evaluate 21 s.",
    ):
        assert needed in re.sub(" *\n", "\n", text), needed


@pytest.mark.parametrize(
    ("started", "commands"),
    [
        (Invocation(), ["make ui", "make report"]),
        (Invocation(tracked=False), ["make report"]),
        (
            Invocation(config=Path.cwd() / "presets/my own.yaml"),
            ["make ui CONFIG='presets/my own.yaml'", "make report CONFIG='presets/my own.yaml'"],
        ),
        (
            Invocation(config=Path("/a/b.yaml"), snakefile=Path("/c/Snakefile")),
            [
                "spider --config /a/b.yaml track ui",
                "snakemake --snakefile /c/Snakefile --configfile /a/b.yaml --report /results/report.html",
            ],
        ),
    ],
)
def test_the_last_lines_name_commands_for_the_same_configuration(started, commands):
    assert [*started.commands(Path("/results/report")).values()] == commands


def test_models_and_the_best_baselines_are_ranked_beside_what_they_were_given(tmp_path):
    """Runs that were trained on other texts have other baselines; the best of all is in the table."""
    text = summary_of(compared(tmp_path / "runs"), tmp_path)
    rows = [line for line in text.splitlines() if re.match(r"(ngram|gpt|ppmd|zpaq|xz) ", line)]
    numbers = [[cell for cell in row.split() if "█" not in cell] for row in rows]
    assert numbers == [
        ["ngram", "1.400", "1.300", "1.00", "k", "2.80", "MB", "25", "s", "700"],
        ["gpt", "2.150", "2.050", "1.00", "k", "2.80", "MB", "25", "s", "700"],
        ["ppmd", "given", "all", "1.610", "1.570", "26.5", "MB"],
        ["ppmd", "given", "stage", "1.814", "1.764", "12.0", "MB"],
        ["ppmd", "1.900", "1.850", "0", "B"],
        ["zpaq", "given", "all", "1.377", "26.5", "MB"],
    ]
    bars = [row.count("█") for row in rows]
    assert bars[0] < bars[1] == max(bars) == 8 and bars[2] < bars[4] and bars[5] == 0


def test_a_compressor_that_wins_is_named(tmp_path):
    text = shown(tmp_path, shift=0.35)
    assert "demo, each document alone: 2.400 bits per byte, 3.9% above bz2, the best of the" in text
    assert "demo, with what came before: 2.300 bits per byte, 1.8% above bz2" in text


def test_a_model_is_compared_within_one_column_only(tmp_path):
    """The best baseline of each column has no number in the other one."""
    rows = [
        Row(name="a", label="alone only", value=2.10, unit=BITS, baseline=True, group="a"),
        Row(name="b", label="xz", value=2.20, carried=bits_number(2.15), unit=BITS, baseline=True, group="b"),
        Row(
            name="c", label="zpaq", value=None, carried=bits_number(1.5), unit=BITS, baseline=True, group="c"
        ),
    ]
    text = shown(tmp_path, results={"baselines": Result(title="", rows=rows)})
    text = re.sub(r"\s+", " ", text)
    assert "each document alone: 2.050 bits per byte, 2.4% below alone only, the best of the" in text
    assert "with what came before: 1.950 bits per byte, 30.0% above zpaq, the best of the" in text
    assert "alone only 2.100 ██████ xz" in text and "zpaq 1.500 " in text
    table = (tmp_path / "report/table.md").read_text()
    assert "| zpaq |  | 1.5000 |" in table and "| alone only | 2.1000 |  |" in table
    alone = shown(tmp_path / "alone", bpb_carried=None, results={"baselines": Result(title="", rows=rows)})
    assert "demo, with what came before" not in alone


def test_intervals_are_shown(tmp_path):
    intervals = {"intervals": {"bpb": (1.97, 2.13)}, "intervals_carried": {"bpb": (1.88, 2.02)}}
    text = " ".join(shown(tmp_path, **intervals).split())
    assert "demo: each document alone 1.970 to 2.130, with what came before 1.880 to 2.020." in text
    assert (
        "| **2.0500 (1.970 to 2.130)** | 1.9500 (1.880 to 2.020) |"
        in (tmp_path / "report/table.md").read_text()
    )


def test_runs_on_other_texts_have_a_table_of_their_own(tmp_path):
    paths = [*demo(tmp_path / "runs"), *demo(tmp_path / "runs", "other", data="web", sha="b" * 64)]
    text = summary_of(paths, tmp_path)
    assert "500,000 held-out bytes of pydocs:" in text and "500,000 held-out bytes of web:" in text
    assert (
        text.index("of pydocs") < text.index("demo, each") < text.index("of web") < text.index("other, each")
    )


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
