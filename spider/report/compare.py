"""All evaluations side by side: ``summary.json`` for programs, tables and figures for people.

    summary.json
      format               1
      runs.{run}.order     stages in the order they were trained
      runs.{run}.stages.{stage}
        bpb, bpb_strict    held-out bits per byte (definitions: spider/evaluation/bpb.py)
        steps, tokens, bytes, seconds      of training, this stage alone; global_step: of the run so far
        text               key into compressors_by_data: what it was scored on
        ...                window, loops, weights digest, prompt and sample
      compressors          bits per byte of zlib, bz2, xz, zstd on the text the first run ended on
      compressors_by_data  the same for every text scored, by dataset
      seconds_by_rule      wall seconds summed over each rule's jobs, from Snakemake's benchmark files

Runs may be scored on different texts. Figures are comparable only with the same ``text``, so compressors are
kept for each, and the tables have one block a text. A dataset scored to two lengths counts as two texts.
Seconds are those of each job's last attempt: what a killed training spent stands in its stage's seconds.

Nothing here imports torch: comparing takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from spider import files
from spider.evaluation.artifact import Evaluation
from spider.report import figures
from spider.report.costs import seconds_by_rule
from spider.report.curves import Curve, curve_of
from spider.report.formatting import markdown_table
from spider.report.render import picture
from spider.report.templates import render
from spider.results import StageFolder

FORMAT = 1
#: Runs that a figure can hold and still be read; of more, the best.
_DRAWN_RUNS = 8
Table = tuple[str, list[list[str]]]


def compare(evaluations: list[Path], *, benchmarks: Path | None, output: Path) -> dict[str, Any]:
    """Gather evaluations into a report.

    Args:
        evaluations: the evaluation.json of every stage of every run; each stage's train.json and
            metrics.jsonl stand beside it. The first run named is the first in the report.
        benchmarks: Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.
        output: folder for summary.json (written last), table.md, table.html, bpb.svg and loss.svg.

    Returns:
        what summary.json holds.

    Raises:
        ValueError: no evaluation, one of another version, or a stage given twice.
    """
    stages = _by_run(evaluations)
    texts, label_of = _texts([one for own in stages.values() for _, one in own])
    last_of_first = next(iter(stages.values()))[-1][1]
    summary = {
        "format": FORMAT,
        "runs": {
            run: {
                "order": [one.stage for _, one in own],
                "stages": {one.stage: _stage(one, label_of) for _, one in own},
            }
            for run, own in stages.items()
        },
        "compressors": texts[label_of[last_of_first.text_sha256]],
        "compressors_by_data": texts,
        "compressor_settings": last_of_first.compressor_settings,
        "seconds_by_rule": seconds_by_rule(benchmarks) if benchmarks else {},
    }
    _draw(stages, output)
    tables = _tables(summary)
    blocks = ["# Comparison", *(f"## {title}\n\n{markdown_table(*table)}" for title, table in tables.items())]
    files.write_text(output / "table.md", "\n\n".join([*blocks, _NOTE]) + "\n")
    best = {title: min(rows, key=lambda row: float(row[1])) for title, (header, rows) in tables.items()
            if "bits per byte" in header}  # fmt: skip
    page = render("table.html.j2", title="Spider: comparison", tables=tables, best=best, note=_NOTE)
    files.write_text(output / "table.html", page)
    files.write_json(output / "summary.json", summary)
    return summary


_Stages = dict[str, list[tuple[Path, Evaluation]]]


def _draw(stages: _Stages, output: Path) -> None:
    """The figures, of all runs or of the best."""
    best = sorted(stages, key=lambda run: stages[run][-1][1].bpb)[:_DRAWN_RUNS]
    drawn = {run: own for run, own in stages.items() if run in best}
    few = len(drawn) == len(stages)
    which = ("all runs" if few else f"the best {len(drawn)} of {len(stages)} runs") if len(stages) > 1 else ""
    curves: list[Curve] = []
    for own in drawn.values():
        begin = 0.0
        for path, one in own:
            curves.append(curve_of(StageFolder(path.parent), begin, one.bpb))
            begin = curves[-1].end
    loss = figures.loss(curves, f"Training loss of {which}" if which else "Training loss")
    picture(output / "loss.svg", [(1, [loss])], 800, 440, "")
    chart = figures.bits_by_stage(
        {run: [(one.stage, one.bpb) for _, one in own] for run, own in drawn.items()},
        {run: own[-1][1].compressors for run, own in drawn.items()},
        "" if few else f", {which}",
    )
    places = sum(len(own) for own in drawn.values())
    picture(output / "bpb.svg", [(1, [chart])], max(760, 240 + 130 * places), 440, "")


def _by_run(paths: list[Path]) -> _Stages:
    """Evaluations grouped by run, in the order of the stages."""
    if not paths:
        raise ValueError("there is nothing to compare: no evaluation was given")
    runs: _Stages = defaultdict(list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        one = Evaluation.read(path)
        key = one.run, one.stage
        if key in seen:
            raise ValueError(f"{path}: {key[0]}/{key[1]} was already given as {seen[key]}")
        seen[key] = path
        runs[one.run].append((path, one))
    return {run: sorted(own, key=lambda item: item[1].index) for run, own in runs.items()}


def _texts(evaluations: list[Evaluation]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Compressors by text, and the label of each text's hash: its dataset, with its size where needed."""
    by_hash = {one.text_sha256: one for one in evaluations}
    names = [one.data for one in by_hash.values()]
    label_of: dict[str, str] = {}
    for sha, one in by_hash.items():
        label = one.data if names.count(one.data) == 1 else f"{one.data} ({one.bytes:,} bytes)"
        label_of[sha] = label if label not in label_of.values() else f"{label} {sha[:8]}"
    return {label_of[sha]: one.compressors for sha, one in by_hash.items()}, label_of


def _stage(one: Evaluation, label_of: dict[str, str]) -> dict[str, Any]:
    return {
        **one.model_dump(include={"bpb", "bpb_strict"}),
        **one.training.model_dump(),
        "text": label_of[one.text_sha256],
        "scored_bytes": one.bytes,
        **one.model_dump(include={"seq_len", "overlap", "n_loops", "weights", "prompt", "sample"}),
    }


# ------------------------------------------------------------------------------------------------ tables


def _tables(summary: dict[str, Any]) -> dict[str, Table]:
    """Title to (header, rows): a table for each text, compressors below the stages; then seconds by rule."""
    tables: dict[str, Table] = {}
    for text, compressors in summary["compressors_by_data"].items():
        rows, scored = [], 0
        for run, one in summary["runs"].items():
            for name in one["order"]:
                stage = one["stages"][name]
                if stage["text"] != text:
                    continue
                scored = stage["scored_bytes"]
                rows.append([f"{run} / {name}", *figures_of(stage, ".4f", ",.1f")])
        for name, bits in sorted(compressors.items(), key=lambda item: item[1]):
            rows.append([summary["compressor_settings"][name], f"{bits:.4f}", "", "", "", ""])
        header = "|bits per byte|strict|steps|MB trained|seconds"
        tables[f"Held-out text of {text}, {scored:,} bytes"] = (header, rows)
    if summary["seconds_by_rule"]:
        rows = [[rule, f"{s:,.1f}"] for rule, s in summary["seconds_by_rule"].items()]
        tables["Wall time by rule, all jobs together"] = ("rule|seconds", rows)
    return tables


def figures_of(stage: dict[str, Any], bits: str, seconds: str) -> list[str]:
    """Cells of a stage of a summary: its two scores, steps, MB trained and seconds, formatted as asked."""
    scores = [format(stage["bpb"], bits), format(stage["bpb_strict"], bits)]
    return [*scores, f"{stage['steps']:,}", f"{stage['bytes'] / 1e6:,.2f}", format(stage["seconds"], seconds)]


_NOTE = (
    "Bits per byte: nats of the bytes' predictions / (ln 2 x bytes), lower is better; strict also counts "
    "what predicting the documents' ends and beginnings costs. Compressors saw the same bytes."
)


def read_summary(path: Path) -> dict[str, Any]:
    """A summary.json, checked for its version."""
    summary = files.read_json(path)
    version = summary.get("format") if isinstance(summary, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{path}: a summary of format {version!r}, this Spider reads {FORMAT}; compare again"
        )
    return summary
