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

import csv
import html
from collections import defaultdict
from pathlib import Path
from typing import Any

from spider import files
from spider.report.curves import stage_curve
from spider.report.plots import plot_bpb, plot_loss

FORMAT = 1
#: Runs that a figure can hold and still be read; of more, the best.
_DRAWN_RUNS = 8
Table = tuple[list[str], list[list[str]]]


def compare(evaluations: list[Path], *, benchmarks: Path | None, output: Path) -> dict[str, Any]:
    """Gather evaluations into a report.

    Args:
        evaluations: the evaluation.json of every stage of every run; each stage's train.json and
            metrics.jsonl stand beside it. The first run named is the first in the report.
        benchmarks: Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.
        output: folder for summary.json (written last), table.md, table.html, bpb.png and loss.png.

    Returns:
        what summary.json holds.

    Raises:
        ValueError: no evaluation, one of another version, or a stage given twice.
    """
    stages = _by_run(evaluations)
    texts, label_of = _texts([found for run in stages.values() for _, found in run])
    first_run = next(iter(stages.values()))
    summary = {
        "format": FORMAT,
        "runs": {
            run: {
                "order": [found["stage"] for _, found in own],
                "stages": {found["stage"]: _stage(found, label_of) for _, found in own},
            }
            for run, own in stages.items()
        },
        "compressors": texts[label_of[first_run[-1][1]["text_sha256"]]],
        "compressors_by_data": texts,
        "compressor_settings": first_run[-1][1]["compressor_settings"],
        "seconds_by_rule": seconds_by_rule(benchmarks) if benchmarks else {},
    }
    drawn = sorted(stages, key=lambda run: stages[run][-1][1]["bpb"])[:_DRAWN_RUNS]
    few = len(drawn) == len(stages)
    curves = []
    for own in (own for run, own in stages.items() if run in drawn):
        begin = 0
        for path, found in own:
            receipt = files.read_json(path.with_name("train.json"))
            curves.append(stage_curve(path.with_name("metrics.jsonl"), receipt, begin, found["bpb"]))
            begin += receipt["bytes"]
    which = ("all runs" if few else f"the best {len(drawn)} of {len(stages)} runs") if len(stages) > 1 else ""
    plot_loss(curves, output / "loss.png", f"Training loss of {which}" if which else "Training loss")
    groups = [group for group in _bpb_groups(summary) if group["run"] in drawn]
    plot_bpb(groups, output / "bpb.png", "" if few else f", {which}")
    tables = _tables(summary)
    files.write_text(output / "table.md", _markdown(tables))
    files.write_text(output / "table.html", _html(tables))
    files.write_json(output / "summary.json", summary)
    return summary


def _by_run(paths: list[Path]) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """Evaluations grouped by run, in the order of the stages."""
    if not paths:
        raise ValueError("there is nothing to compare: no evaluation was given")
    runs: dict[str, list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        found = files.read_json(path)
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise ValueError(
                f"{path}: an evaluation of format {version!r}, this Spider reads {FORMAT}; evaluate again"
            )
        key = found["run"], found["stage"]
        if key in seen:
            raise ValueError(f"{path}: {key[0]}/{key[1]} was already given as {seen[key]}")
        seen[key] = path
        runs[found["run"]].append((path, found))
    return {run: sorted(own, key=lambda item: item[1]["index"]) for run, own in runs.items()}


def _texts(found: list[dict[str, Any]]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Compressors by text, and the label of each text's hash: its dataset, with its size where needed."""
    by_hash = {one["text_sha256"]: one for one in found}
    names = [one["data"] for one in by_hash.values()]
    label_of: dict[str, str] = {}
    for sha, one in by_hash.items():
        label = one["data"] if names.count(one["data"]) == 1 else f"{one['data']} ({one['bytes']:,} bytes)"
        label_of[sha] = label if label not in label_of.values() else f"{label} {sha[:8]}"
    return {label_of[sha]: one["compressors"] for sha, one in by_hash.items()}, label_of


def _stage(found: dict[str, Any], label_of: dict[str, str]) -> dict[str, Any]:
    return {
        "bpb": found["bpb"],
        "bpb_strict": found["bpb_strict"],
        **found["training"],
        "text": label_of[found["text_sha256"]],
        "scored_bytes": found["bytes"],
        **{k: found[k] for k in ("seq_len", "overlap", "n_loops", "weights", "prompt", "sample")},
    }


def seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Wall seconds of all jobs of each rule, most expensive first, from ``{benchmarks}/{rule}/**.tsv``."""
    seconds: dict[str, float] = defaultdict(float)
    for path in sorted(benchmarks.glob("*/**/*.tsv")):
        with open(path, encoding="utf-8", newline="") as f:
            for row in csv.DictReader(f, delimiter="\t"):
                try:
                    seconds[path.relative_to(benchmarks).parts[0]] += float(row["s"])
                except (KeyError, TypeError, ValueError):
                    raise ValueError(
                        f"{path}: not a Snakemake benchmark file (no seconds in column s)"
                    ) from None
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {rule: round(s, 2) for rule, s in ordered}


def _bpb_groups(summary: dict[str, Any]) -> list[dict[str, Any]]:
    groups = []
    for run, one in summary["runs"].items():
        stages = [(name, one["stages"][name]) for name in one["order"]]
        groups.append(
            {
                "run": run,
                "stages": [(name, stage["bpb"]) for name, stage in stages],
                "compressors": summary["compressors_by_data"][stages[-1][1]["text"]],
            }
        )
    return groups


# ------------------------------------------------------------------------------------------------ tables


def _tables(summary: dict[str, Any]) -> dict[str, Table]:
    """Title to (header, rows): a table for each text, compressors below the stages; then seconds by rule."""
    tables: dict[str, Table] = {}
    for text, compressors in summary["compressors_by_data"].items():
        header = ["", "bits per byte", "strict", "steps", "MB trained", "seconds"]
        rows, scored = [], 0
        for run, one in summary["runs"].items():
            for name in one["order"]:
                stage = one["stages"][name]
                if stage["text"] != text:
                    continue
                scored = stage["scored_bytes"]
                rows.append(
                    [
                        f"{run} / {name}",
                        f"{stage['bpb']:.4f}",
                        f"{stage['bpb_strict']:.4f}",
                        f"{stage['steps']:,}",
                        f"{stage['bytes'] / 1e6:,.2f}",
                        f"{stage['seconds']:,.1f}",
                    ]
                )
        for name, bits in sorted(compressors.items(), key=lambda item: item[1]):
            rows.append([summary["compressor_settings"][name], f"{bits:.4f}", "", "", "", ""])
        tables[f"Held-out text of {text}, {scored:,} bytes"] = (header, rows)
    if summary["seconds_by_rule"]:
        rows = [[rule, f"{s:,.1f}"] for rule, s in summary["seconds_by_rule"].items()]
        tables["Wall time by rule, all jobs together"] = (["rule", "seconds"], rows)
    return tables


_NOTE = (
    "Bits per byte: nats of the bytes' predictions / (ln 2 x bytes), lower is better; strict also counts "
    "what predicting the documents' ends and beginnings costs. Compressors saw the same bytes."
)


def _markdown(tables: dict[str, Table]) -> str:
    blocks = ["# Comparison"]
    for title, (header, rows) in tables.items():
        lines = [f"## {title}", "", _md_row(header), "|---|" + "---:|" * (len(header) - 1)]
        blocks.append("\n".join(lines + [_md_row(row) for row in rows]))
    return "\n\n".join([*blocks, _NOTE]) + "\n"


def _md_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; color: #222; max-width: 52em; }
table { border-collapse: collapse; margin-bottom: 2em; }
th, td { padding: .3em 1em; text-align: right; border-bottom: 1px solid #e3e3e3; }
td { font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; }
tr.best td { font-weight: bold; background: #eef6ee; }
p { color: #555; }
"""


def _html(tables: dict[str, Table]) -> str:
    """A page that stands alone; the best bits per byte of each table is marked."""
    parts = []
    for title, (header, rows) in tables.items():
        best = min(rows, key=lambda row: float(row[1])) if "bits per byte" in header else None
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "\n".join(
            ('<tr class="best">' if row is best else "<tr>")
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in rows
        )
        parts.append(f"<h2>{html.escape(title)}</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>")
    content = "\n".join([*parts, f"<p>{html.escape(_NOTE)}</p>"])
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Spider: comparison</title>'
        f"<style>{_CSS}</style></head>\n<body>\n<h1>Comparison</h1>\n{content}\n</body>\n</html>\n"
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
