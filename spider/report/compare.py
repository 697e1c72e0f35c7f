"""All evaluations side by side: ``summary.json`` for programs, tables and figures for people.

Runs may be scored on different texts. Figures are comparable only with the same text, so compressors are
kept for each, and the tables have one block a text. A dataset scored to two lengths counts as two texts.
Seconds are those of each job's last attempt: what a killed training spent stands in its stage's seconds.

Nothing here imports torch: comparing takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from spider import files
from spider.artifacts import Artifact
from spider.checkpoints.pressed import ArtifactReceipt
from spider.evaluation.artifact import Evaluation, Sample, fairest
from spider.report import figures
from spider.report.charts import COLOURS
from spider.report.costs import seconds_by_rule
from spider.report.formatting import DAGGER, LOSSY, markdown_table
from spider.report.render import html, picture
from spider.report.stages import Log, read_log
from spider.results import ArtifactFolder, StageFolder

#: Columns of the tables: the score of all of a text, and of the answers in conversations.
_BITS, _LEADING = "bits per byte", "of answers"
#: Runs that a figure can hold and still be read, each in a colour of its own; of more, the best.
_DRAWN_RUNS = COLOURS
LIKE_AND_UNLIKE = (
    "Compressors coded the same bytes, after the text that their name says they were given; they go on "
    "learning from it as they read and see all of it so far, a model is frozen, sees its window only, and "
    "may have read its training text several times. Copies are stretches of 50 bytes or more that the "
    "training text holds too."
)
_NOTE = (
    "Bits per byte: nats of the bytes' predictions / (ln 2 x bytes), lower is better; strict also counts "
    "what predicting the documents' ends and beginnings costs. " + LIKE_AND_UNLIKE
)


class ComparedRun(BaseModel, frozen=True):
    """Stages, and their names in the order they were trained."""

    order: list[str]
    stages: dict[str, dict[str, Any]]
    """Held-out ``bpb`` and ``bpb_strict`` (definitions: spider/evaluation/bpb.py), of conversations also
    ``bpb_assistant``, and what the stage learned (``learn``: all, or the assistant's answers); ``steps``,
    ``tokens``, ``bytes`` and ``seconds`` of training, this stage alone; ``global_step`` of the run so far;
    ``data``, its dataset; ``text``, key of `Summary.compressors_by_data`; its own rates of ``compressors``,
    their ``compressor_settings`` and rates on ``fresh`` text; window, loops, weights digest, parameters
    and the device that scored it; ``prompt`` and ``sample`` if it wrote one; ``tasks`` that it was asked."""

    @property
    def last(self) -> dict[str, Any]:
        return self.stages[self.order[-1]]

    @property
    def like_last(self) -> list[str]:
        """The stages that were scored on the text that the last was."""
        text = self.last["text_sha256"]
        return [name for name in self.order if self.stages[name]["text_sha256"] == text]

    @property
    def leading(self) -> str:
        """Return the name of the score that ranks the stages."""
        return leading([self.stages[name] for name in self.like_last])

    @property
    def best(self) -> str | None:
        """The stage with the least `leading` score, of those scored on the text that the last was; None where
        that is not what was written."""
        like, score = self.like_last[::-1], self.leading
        return None if mark(self.last) else min(like, key=lambda name: self.stages[name][score])


class Summary(Artifact):
    """``summary.json``, for programs."""

    WHAT: ClassVar[str] = "a summary"
    REMEDY: ClassVar[str] = "compare again"

    runs: dict[str, ComparedRun]
    compressors: dict[str, float]
    """Bits per byte of each on the text that the first run ended on."""
    compressors_by_data: dict[str, dict[str, float]]
    """The same for every text scored, by dataset, as far as all runs scored on it agree. A compressor that
    was given a stage's training text has another rate in each run."""
    compressor_settings: dict[str, str]
    fresh_by_data: dict[str, dict[str, float]] = {}  # noqa: RUF012
    """Their rates on what is no copy of the training text."""
    seconds_by_rule: dict[str, float]
    """Wall seconds summed over each rule's jobs, from Snakemake's benchmark files."""


def compare(
    evaluations: list[Path], *, benchmarks: Path | None, output: Path, artifacts: Sequence[Path] = ()
) -> Summary:
    """Gather evaluations into summary.json (written last), table.md, table.html, bpb.svg and loss.svg.

    Args:
        evaluations: the evaluation.json of every stage of every run; each stage's train.json and
            metrics.jsonl stand beside it. The first run named is the first in the report.
        artifacts: the evaluation.json of what stages are pressed into, with artifact.json beside it.
        benchmarks: Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.

    Raises:
        ValueError: no evaluation, one of another version, or a stage given twice.
    """
    stages = _by_run(evaluations)
    measured = [one for own in stages.values() for _, one in own]
    labels = _labels(measured)
    runs = {}
    scored = {path: Evaluation.read(path) for path in artifacts}
    small = {(one.run, one.stage): _pressed(path, one) for path, one in scored.items()}
    for run, own in stages.items():
        compared = {
            one.stage: {
                "bpb": one.bpb,
                "bpb_strict": one.bpb_strict,
                **one.training.model_dump(),
                "data": one.data,
                "text": labels[one.text_sha256],
                "scored_bytes": one.bytes,
                "context": one.context,
                "copies": one.copies and one.copies.model_dump(),
                "artifact": small[run, one.stage](one) if (run, one.stage) in small else None,
                **one.model_dump(include={"seq_len", "overlap", "n_loops", "weights", "learn"}),
                **one.model_dump(include={"device", "parameters"}),
                **one.model_dump(include={"compressors", "compressor_settings"}),
                "fresh": one.fresh,
                **({} if one.bpb_assistant is None else {"bpb_assistant": one.bpb_assistant}),
                **_written(folder, one),
                "text_sha256": one.text_sha256,
                **({} if one.lossless else {"lossless": False}),
                **({"tasks": [task.model_dump() for task in one.tasks]} if one.tasks else {}),
            }
            for folder, one in own
        }
        runs[run] = ComparedRun(order=[*compared], stages=compared)
    last_of_first = next(iter(stages.values()))[-1][1]
    summary = Summary(
        format=Summary.FORMAT,
        runs=runs,
        compressors=last_of_first.compressors,
        compressors_by_data=_shared(runs, "compressors"),
        compressor_settings={key: said for one in measured for key, said in one.compressor_settings.items()},
        fresh_by_data=_shared(runs, "fresh"),
        seconds_by_rule=seconds_by_rule(benchmarks) if benchmarks else {},
    )
    _draw(stages, output)
    tables = _tables(summary)
    blocks = ["# Comparison", *(f"## {title}\n\n{markdown_table(*table)}" for title, table in tables.items())]
    notes = [_NOTE] if all(one.lossless for one in measured) else [_NOTE, LOSSY]
    files.write_text(output / "table.md", "\n\n".join([*blocks, *notes]) + "\n")
    best = {title: _best_row(header, rows) for title, (header, rows) in tables.items() if _BITS in header}
    page = html("table.html.j2", title="Spider: comparison", tables=tables, best=best, notes=notes)
    files.write_text(output / "table.html", page)
    return summary.write(output / "summary.json")


def leading(stages: Iterable[dict[str, Any]]) -> str:
    """Return the name of the score that ranks stages of a summary.

    It is that of the answers where one of the stages learned answers alone: such a stage forgets what the
    others learned of the rest of a conversation.
    """
    stages = list(stages)
    answers = any(one.get("learn") == "assistant" for one in stages)
    return "bpb_assistant" if answers and all("bpb_assistant" in one for one in stages) else "bpb"


def best_first(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Sort evaluations by the score that ranks them, the least first."""
    evaluations = list(evaluations)
    score = leading_of(evaluations)
    return sorted(evaluations, key=lambda one: float(getattr(one, score)))


def leading_of(evaluations: Iterable[Evaluation]) -> str:
    """Return the name of the score that ranks evaluations, as `leading` does for a summary."""
    scores = {"learn", "bpb_assistant"}
    return leading(one.model_dump(include=scores, exclude_none=True) for one in evaluations)


def _like(runs: dict[str, ComparedRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by text, and by run, the last stage that was scored on it."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run, one in runs.items():
        for name in one.order:
            found.setdefault(one.stages[name]["text"], {})[run] = one.stages[name]
    return found


def _shared(runs: dict[str, ComparedRun], key: str) -> dict[str, dict[str, float]]:
    """Return by text the rates of compressors that are the same in the last stages of all runs."""
    shared = {}
    for text, own in _like(runs).items():
        first, *others = [stage[key] for stage in own.values()]
        shared[text] = {
            name: rate for name, rate in first.items() if all(o.get(name) == rate for o in others)
        }
    return shared


def _best_row(header: str, rows: list[list[str]]) -> list[str]:
    """Return the row of a table with the least score, of answers where that is what its stages learned."""
    score = header.split("|").index(_LEADING if _LEADING in header else _BITS)
    return min((row for row in rows if row[score]), key=lambda row: float(row[score].rstrip(DAGGER)))


def _written(folder: StageFolder, measured: Evaluation) -> dict[str, str]:
    """Return the prompt and the sample of a stage; nothing if it has no sample."""
    sample = Sample.of_stage(folder, measured)
    return {"prompt": sample.prompt, "sample": sample.text} if sample else {}


def _pressed(path: Path, scored: Evaluation) -> Callable[[Evaluation], dict[str, Any]]:
    """What is told of a stage's artifact, once the stage's own scores are known."""
    one = ArtifactReceipt.read(ArtifactFolder(path.parent).receipt).artifact
    told = one.model_dump(include={"bytes", "code_bytes", "total_bytes", "cap", "clip"})
    told |= scored.model_dump(include={"bpb", "bpb_strict", "text_sha256"})
    return lambda whole: told | {"lost": scored.bpb - whole.bpb}


_Stages = dict[str, list[tuple[StageFolder, Evaluation]]]


def _by_run(paths: list[Path]) -> _Stages:
    """Evaluations grouped by run, in the order of the stages."""
    if not paths:
        raise ValueError("there is nothing to compare: no evaluation was given")
    runs: _Stages = defaultdict(list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        one = Evaluation.read(path)
        if before := seen.get((one.run, one.stage)):
            raise ValueError(f"{path}: {one.run}/{one.stage} was already given as {before}")
        seen[one.run, one.stage] = path
        runs[one.run].append((StageFolder(path.parent), one))
    return {run: sorted(own, key=lambda item: item[1].index) for run, own in runs.items()}


def _labels(evaluations: list[Evaluation]) -> dict[str, str]:
    """Return what each text is called, by its hash: as its datasets, with its size where these have several
    texts. A text that is not what was written has a dagger."""
    by_hash = {one.text_sha256: one for one in evaluations}
    datasets = {sha: ", ".join(dict.fromkeys(one.data for one in evaluations if one.text_sha256 == sha))
                for sha in by_hash}  # fmt: skip
    names = [*datasets.values()]
    labels: dict[str, str] = {}
    for sha, one in by_hash.items():
        name = datasets[sha] if one.lossless else f"{datasets[sha]}{DAGGER}"
        label = name if names.count(datasets[sha]) == 1 else f"{name} ({one.bytes:,} bytes)"
        labels[sha] = label if label not in labels.values() else f"{label} {sha[:8]}"
    return labels


def _draw(stages: _Stages, output: Path) -> None:
    """Draw the figures of all runs, or of the best."""
    best = [one.run for one in best_first(own[-1][1] for own in stages.values())[:_DRAWN_RUNS]]
    names = {run: run if own[-1][1].lossless else f"{run}{DAGGER}" for run, own in stages.items()}
    drawn = {names[run]: own for run, own in stages.items() if run in best}
    few = len(drawn) == len(stages)
    decoded = "" if drawn.keys() <= stages.keys() else f" ({DAGGER} of decoded text)"
    which = ("all runs" if few else f"the best {len(drawn)} of {len(stages)} runs") if len(stages) > 1 else ""
    logs: list[Log] = []
    for name, own in drawn.items():
        begin = 0.0
        for folder, one in own:
            logs.append(replace(read_log(folder, begin, one.bpb), run=name))
            begin = logs[-1].end
    title = f"Training loss (lines) and held-out text (marks) of {which}" if which else "Training loss"
    loss = figures.loss(logs, title + decoded)
    picture(output / "loss.svg", [(1, [loss])])
    chart = figures.bits_by_stage(
        {run: [(one.stage, one.bpb) for _, one in own] for run, own in drawn.items()},
        {run: fairest(own[-1][1].compressors) for run, own in drawn.items()},
        decoded if few else f", {which}{decoded}",
    )
    picture(output / "bpb.svg", [(1, [chart])], figures.width_of(chart))


def _tables(summary: Summary) -> dict[str, tuple[str, list[list[str]]]]:
    """Title to (header, rows): a table for each text, compressors below the stages; then seconds by rule."""
    tables = {}
    stages = [
        (f"{run} / {name}", one.stages[name]) for run, one in summary.runs.items() for name in one.order
    ]
    for text, own in _like(summary.runs).items():
        scored = [(name, stage) for name, stage in stages if stage["text"] == text]
        answers = [_LEADING] if leading(own.values()) == "bpb_assistant" else []
        rows = []
        for name, stage in scored:
            bpb, *more = figures_of(stage, ".4f", ",.1f")
            said = [f"{stage['bpb_assistant']:.4f}{mark(stage)}" for _ in answers if "bpb_assistant" in stage]
            rows.append([name, bpb, outside(stage), *(said or [""] * len(answers)), stage["context"], *more])
        for name, stage in scored:
            if small := stage.get("artifact"):
                bpb, strict = (f"{small[key]:.4f}{mark(stage)}" for key in ("bpb", "bpb_strict"))
                title = f"{name}, pressed into {small['total_bytes']:,} bytes"
                rows.append([title, bpb, "", *[""] * len(answers), stage["context"], strict, "", "", ""])
        of = mark(scored[0][1])
        for name, rate, fresh in _compressors(own):
            news = "" if fresh is None else f"{fresh:.4f}{of}"
            rows.append([name, f"{rate:.4f}{of}", news, *[""] * len(answers), "all before", "", "", "", ""])
        title = f"Held-out text of {text}, {scored[0][1]['scored_bytes']:,} bytes"
        columns = [
            "",
            _BITS,
            "outside copies",
            *answers,
            "context",
            "strict",
            "steps",
            "MB trained",
            "seconds",
        ]
        tables[title] = "|".join(columns), rows
    if asked := [(name, stage["tasks"]) for name, stage in stages if stage.get("tasks")]:
        kinds = dict.fromkeys(task["task"] for _, own in asked for task in own)
        tables["Questions answered right"] = (
            "|".join(["", *kinds]),
            [_right(name, own, kinds) for name, own in asked],
        )
    if summary.seconds_by_rule:
        rows = [[rule, f"{s:,.1f}"] for rule, s in summary.seconds_by_rule.items()]
        tables["Wall time by rule, all jobs together"] = "rule|seconds", rows
    return tables


def _compressors(own: dict[str, dict[str, Any]]) -> list[tuple[str, float, float | None]]:
    """Return name, rate, and rate on fresh text of each compressor on the text of these stages, by run.

    A compressor whose rate is not the same for all runs has a row for each rate, which names its runs.
    """
    rows: dict[tuple[str, str, float, float | None], list[str]] = defaultdict(list)
    for run, stage in own.items():
        for key, rate in stage["compressors"].items():
            rows[key, stage["compressor_settings"].get(key, key), rate, stage["fresh"].get(key)].append(run)
    named = []
    for (_, label, rate, fresh), runs in rows.items():
        of = "" if len(runs) == len(own) else f", for {', '.join(runs)}"
        named.append((label + of, rate, fresh))
    return sorted(named, key=lambda row: row[1])


def _right(name: str, tasks: list[dict[str, Any]], kinds: Iterable[str]) -> list[str]:
    """A stage's share of each task, in percent; empty where it was not asked."""
    told = {one["task"]: f"{100 * one['by_byte']:.1f}% ± {100 * one['standard_error']:.1f}" for one in tasks}
    return [name, *(told.get(kind, "") for kind in kinds)]


def mark(stage: dict[str, Any]) -> str:
    """What stands behind scores of a stage of a summary: a dagger where its text is not what was written."""
    return "" if stage.get("lossless", True) else DAGGER


def outside(stage: dict[str, Any]) -> str:
    """The score on what is no copy of the training text; empty where that is not known."""
    bpb = (stage["copies"] or {}).get("bpb")
    return "" if bpb is None else f"{bpb:.4f}{mark(stage)}"


def figures_of(stage: dict[str, Any], bits: str, seconds: str) -> list[str]:
    """Cells of a stage of a summary: its two scores, steps, MB trained and seconds, formatted as asked."""
    scores = [format(stage[name], bits) + mark(stage) for name in ("bpb", "bpb_strict")]
    return [*scores, f"{stage['steps']:,}", f"{stage['bytes'] / 1e6:,.2f}", format(stage["seconds"], seconds)]
