"""Join all evaluations into ``summary.json``, and make the tables that every view shows.

A `Line` is one scored model with all its results. `join` is the only place that reads lines; terminal,
``table.md``, page and card are loops over the tables of `models` and `measurements`. No view names a
measurement: the columns of a table are the rows of results.

Runs may be scored on different texts. Scores are comparable only on the same text, so there is one table for
each text, with its own compressors. One dataset scored to two lengths counts as two texts.

This module does not import torch, so comparing takes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, Field

from spider.common.formatting import bits
from spider.common.record import Record
from spider.common.results import CompressedFolder, Results, StageFolder, root_of
from spider.evaluation.noise import Noise, noise, scored_runs, undecided
from spider.evaluation.records import (
    DAGGER,
    LOSSY,
    CheckpointScores,
    Evaluation,
    Sample,
    Scored,
    Training,
    results_in,
    results_of,
    sum_of_probabilities,
)
from spider.evaluation.result import (
    ALONE,
    BITS,
    CARRIED,
    CONTEXTS,
    GIVEN,
    GIVEN_STAGE,
    SECONDS,
    SIZE,
    Number,
    Result,
    Row,
    Table,
    baselines,
    best_first,
    legends,
    shortened,
)
from spider.provenance.made import attempts

#: What a compressor has read of the held-out text, in the words of `Scored.context`.
_BASELINE_CONTEXT = Number(value=None, text="the document, or all before")


class Line(Scored):
    """A scored model: the end of a stage, an earlier checkpoint, a compressed model, or one of others."""

    run: str
    stage: str
    steps: int
    """Steps of this stage, 0 for a foreign model. ``tokens``, ``bytes`` and ``seconds`` are alike."""
    tokens: int
    bytes: int
    seconds: float
    text: str
    """Name of the scored text. Lines on the same text are comparable."""
    scored_bytes: int
    results: dict[str, Result]
    """All results by name, without figures. Those on a decoded text have a mark."""
    compressed: Line | None = None
    checkpoints: tuple[Line, ...] = ()
    """Scored checkpoints up to the end of the stage, by rising step, on a sample of its text."""
    prompt: str | None = None
    sample: str | None = None

    @property
    def badges(self) -> list[Row]:
        """Return the columns that are good or bad news, such as an audit."""
        return [row for one in self.results.values() for row in one.rows if row.column and row.tone]


class ComparedRun(BaseModel, frozen=True):
    """Stages, and their names in the order of training."""

    order: list[str]
    stages: dict[str, Line]

    @property
    def last(self) -> Line:
        """Return the last stage."""
        return self.stages[self.order[-1]]

    @property
    def lines(self) -> dict[str, Line]:
        """Return by name each stage, and its compressed model after it."""
        found: dict[str, Line] = {}
        for name in self.order:
            stage = self.stages[name]
            found[name] = stage
            if stage.compressed:
                found[f"{name}, compressed"] = stage.compressed
        return found

    def named(self, run: str) -> dict[str, Line]:
        """Return the lines of a run by names that are unique among runs."""
        return {f"{run} / {name}": one for name, one in self.lines.items()}

    @property
    def like_last(self) -> list[str]:
        """Return the stages that were scored on the text of the last one."""
        return [name for name in self.order if self.stages[name].text_sha256 == self.last.text_sha256]

    @property
    def leading(self) -> str:
        """Return the name of the score that orders the stages."""
        return leading(self.stages[name] for name in self.like_last)

    @property
    def best(self) -> str | None:
        """Return the best stage of those scored on the text of the last; None for a decoded text."""
        if not self.last.lossless:
            return None
        return min(self.like_last[::-1], key=lambda name: float(getattr(self.stages[name], self.leading)))


class Summary(Record):
    """``summary.json``, for programs."""

    FORMAT: ClassVar[int] = 3
    WHAT: ClassVar[str] = "a summary"

    runs: dict[str, ComparedRun]
    foreign: dict[str, Line]
    """Models that others trained."""
    seconds_by_rule: dict[str, float]
    """Wall seconds of all jobs of each rule, from Snakemake's benchmark files."""
    noise: dict[str, Noise] = Field(default_factory=dict)
    """How much seeds move scores, by the SHA-256 of the held-out text; none where no run has two seeds."""
    results: dict[str, Result] = Field(default_factory=dict)
    """Results about several runs, from the files of the folder ``report``."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return all lines by name: ``run / stage``."""
        own = {name: one for run, stages in self.runs.items() for name, one in stages.named(run).items()}
        return own | self.others

    @property
    def others(self) -> dict[str, Line]:
        """Return the models of others by name, which says whether their tokenizers keep the text."""
        return {
            f"{name} ({'lossless' if one.lossless else 'lossy'} tokenizer of its own)": one
            for name, one in self.foreign.items()
        }

    @property
    def tables(self) -> list[Table]:
        """Return all tables: models on each text, their other results, results about runs, and seconds."""
        texts = by_text(self.lines).values()
        tables = [models(own, self.noise.get(next(iter(own.values())).text_sha256)) for own in texts]
        tables += self.checkpoints(*self.runs)
        tables += measurements(self.lines)
        for one in self.results.values():
            tables += [one] if one.rows else []
            tables += [figure for figure in one.figures if isinstance(figure, Table)]
        if self.seconds_by_rule:
            rows = [
                Row(name=rule, label=rule, value=seconds, unit=SECONDS)
                for rule, seconds in self.seconds_by_rule.items()
            ]
            title = "Wall time by rule, all jobs together"
            tables.append(Table(title=title, head="rule", value="time", rows=rows))
        return tables

    def checkpoints(self, *runs: str) -> list[Table]:
        """Return a table of the scored checkpoints of these runs on each sample, the best first."""
        found = {
            f"{run} / {name}, step {one.global_step:,}": one
            for run in runs
            for name, stage in self.runs[run].stages.items()
            for one in stage.checkpoints
        }
        ranked = dict(sorted(found.items(), key=lambda item: item[1].bpb))
        tables = [models(lines, places=(0, 1)) for lines in by_text(ranked).values()]
        titles = (one.title.replace("Held-out text of", "Checkpoints, best first, on") for one in tables)
        return [one.model_copy(update={"title": title}) for one, title in zip(tables, titles, strict=True)]

    @property
    def notes(self) -> list[str]:
        """Return the sentences that explain the tables."""
        return notes(self.lines)


# ------------------------------------------------------------------------------------------------------ join


def join(
    evaluations: Sequence[Path], *, foreign: Sequence[Path] = (), benchmarks: Path | None = None
) -> Summary:
    """Join evaluations with all results of their folders.

    Args:
        evaluations: The evaluation.json of stages. What is known of their checkpoints and compressed models
            lies beside them. The first run is the first in the report.
        foreign: The evaluation.json of models that others trained.
        benchmarks: Folder of Snakemake's benchmark files, ``{benchmarks}/{rule}/*.tsv``.

    Raises:
        ValueError: The list of evaluations is empty, a file is damaged, or a stage is given twice.
    """
    if not evaluations:
        raise ValueError("there is nothing to compare: no evaluation was given")
    root = root_of(evaluations[0])
    results = Results(root) if root else None
    stages = _by_run(evaluations)
    others = _by_run(foreign)
    read = [one for own in (*stages.values(), *others.values()) for _, one in own]
    small = {}
    for folder, one in (pair for own in stages.values() for pair in own):
        compressed = CompressedFolder(folder.compressed)
        if compressed.evaluation.is_file():
            small[one.run, one.stage] = compressed, Evaluation.read(compressed.evaluation)
    labels = _labels([*read, *(one for _, one in small.values())])
    runs = {}
    for run, own in stages.items():
        lines = {}
        before = None
        for folder, one in own:
            beside: dict[str, Any] = {}
            if found := small.get((run, one.stage)):
                beside["compressed"] = _line(*found, labels, before)
            scored = CheckpointScores.of(folder, one)
            named = {each.text_sha256: f"a sample of {labels[one.text_sha256]}" for each in scored}
            beside["checkpoints"] = tuple(_line(None, each, named, before) for each in scored)
            lines[one.stage] = _line(folder, one, labels, before, **beside)
            before = _sum(before, one.training)
        runs[run] = ComparedRun(order=[*lines], stages=lines)
    return Summary(
        format=Summary.FORMAT,
        runs=runs,
        foreign={name: _line(*own[0], labels, None) for name, own in others.items()},
        seconds_by_rule=_seconds_by_rule(benchmarks) if benchmarks else {},
        noise=_noise(results) if results else {},
        results=_about_runs(results) if results else {},
    )


def _by_run(paths: Sequence[Path]) -> dict[str, list[tuple[StageFolder, Evaluation]]]:
    """Return evaluations by run, in the order of the stages, each with its folder."""
    runs = defaultdict[str, list[tuple[StageFolder, Evaluation]]](list)
    seen: dict[tuple[str, str], Path] = {}
    for path in paths:
        one = Evaluation.read(path)
        if before := seen.get((one.run, one.stage)):
            raise ValueError(f"{path}: {one.run}/{one.stage} was already given as {before}")
        seen[one.run, one.stage] = path
        runs[one.run].append((StageFolder(path.parent), one))
    return {run: sorted(own, key=lambda item: item[1].index) for run, own in runs.items()}


def _labels(evaluations: list[Evaluation]) -> dict[str, str]:
    """Return the name of each text by its hash: its datasets, with the size if they have several texts.

    The name of a decoded text has a dagger.
    """
    datasets: dict[str, dict[str, None]] = defaultdict(dict)
    for one in evaluations:
        datasets[one.text_sha256][one.data] = None
    names = {sha: ", ".join(own) for sha, own in datasets.items()}
    labels: dict[str, str] = {}
    for one in evaluations:
        sha = one.text_sha256
        if sha in labels:
            continue
        label = names[sha] + ("" if one.lossless else DAGGER)
        if list(names.values()).count(names[sha]) > 1:
            label += f" ({one.bytes:,} bytes)"
        labels[sha] = f"{label} {sha[:8]}" if label in labels.values() else label
    return labels


def _line(
    folder: StageFolder | None,
    one: Evaluation,
    labels: dict[str, str],
    before: Training | None,
    **beside: Any,
) -> Line:
    """Return the line of an evaluation; that of a checkpoint on a sample has no folder of its own."""
    found = results_of(folder, one.weights) if folder else one.all_results
    found = {"score": one.score, "facts": one.facts(before)} | found
    if folder and folder.sample.exists():
        sample = Sample.read(folder.sample)
        beside |= {"prompt": sample.prompt, "sample": sample.text}
    return Line(
        **one.model_dump(include={*Scored.model_fields, "run", "stage"}),
        **one.training.model_dump(exclude={"global_step"}),
        text=labels[one.text_sha256],
        scored_bytes=one.bytes,
        results={name: _shown(result, one.lossless) for name, result in found.items()},
        **beside,
    )


def _shown(result: Result, lossless: bool) -> Result:
    """Return a result without figures and details, and with marks if it is on a decoded text."""
    small = result.model_copy(update={"figures": [], "details": {}})
    return small if lossless else small.model_copy(update={"rows": marked(small.rows)})


def marked(rows: Iterable[Row]) -> list[Row]:
    """Return rows with the mark of decoded text on their bits per byte."""

    def one(number: Any) -> Any:
        return number.model_copy(update={"mark": DAGGER}) if number and number.unit == BITS else number

    return [
        one(row).model_copy(
            update={
                "carried": one(row.carried),
                "columns": {title: one(number) for title, number in row.columns.items()},
            }
        )
        for row in rows
    ]


def _sum(before: Training | None, own: Training) -> Training:
    """Return the training of a run up to the end of a stage."""
    if before is None:
        return own
    sums = {
        name: getattr(before, name) + getattr(own, name) for name in ("steps", "tokens", "bytes", "seconds")
    }
    return own.model_copy(update=sums)


def _noise(results: Results) -> dict[str, Noise]:
    """Return the noise of a seed in a results folder, for each text."""
    runs = scored_runs(results)
    texts = dict.fromkeys(one.text for one in runs)
    found = {text: noise(one for one in runs if one.text == text) for text in texts}
    return {text: one for text, one in found.items() if one}


def _seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Return the wall seconds of all jobs of each rule, most expensive first."""
    seconds = defaultdict[str, float](float)
    for path in sorted(benchmarks.rglob("*.tsv")):
        seconds[path.relative_to(benchmarks).parts[0]] += sum(row["s"] for row in attempts(path))
    return {rule: round(s, 2) for rule, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _about_runs(results: Results) -> dict[str, Result]:
    """Return the results in the folder of reports."""
    found: dict[str, Result] = {}
    for path in sorted(results.report.glob("*.json")):
        if path.name != "summary.json":
            found |= results_in(path)
    return {
        name: one.model_copy(update={"figures": [f for f in one.figures if isinstance(f, Table)]})
        for name, one in found.items()
    }


# ---------------------------------------------------------------------------------------------------- tables


def leading(lines: Iterable[Scored]) -> str:
    """Return the name of the score that orders models.

    It is that of the answers if one of the stages learned answers alone, because such a stage forgets what
    the others learned from the rest of a conversation.
    """
    lines = list(lines)
    answers = any(one.learn == "assistant" for one in lines)
    return "bpb_assistant" if answers and all(one.bpb_assistant is not None for one in lines) else "bpb"


def by_text(lines: Mapping[str, Line]) -> dict[str, dict[str, Line]]:
    """Return lines by the name of the text that they were scored on."""
    found: dict[str, dict[str, Line]] = {}
    for name, one in lines.items():
        found.setdefault(one.text, {})[name] = one
    return found


def models(
    lines: Mapping[str, Line],
    noise: Noise | None = None,
    *,
    short: bool = False,
    places: Sequence[int] = (0, 1, 2),
) -> Table:
    """Return the table of models on one text, and of the baselines on it.

    The best model has a good tone, unless another one is within the noise of seeds.

    Args:
        short: show the best baselines only, by their short names.
        places: columns to show: the leading score (0), the columns of results (1), and the other numbers in
            bits per byte (2).
    """
    trained = {name: one for name, one in lines.items() if one.steps}
    first = leading(trained.values() or lines.values())
    shown = {name: dict(_numbers(one, first)) for name, one in lines.items()}
    titles = [title for place in places for title in _titles(shown.values(), place)]
    scored = [(name, float(getattr(one, first)), True) for name, one in trained.items()]
    unclear = undecided(scored, noise)
    best = min(scored, key=lambda one: one[1])[0] if scored and not unclear else None
    rows = []
    for name, placed in shown.items():
        cells = {title: number for (_, title), number in placed.items()}
        rows.append(_row(name, cells, titles, tone="good" if name == best else ""))
    for label, row in _baselines(trained, short):
        numbers = {context: number for _, context, number in row.numbers()}
        numbers |= {_title(title, ALONE): number for title, number in row.columns.items()}
        if given := row.columns.get(GIVEN):
            numbers["trained on"] = given.model_copy(update={"unit": SIZE})
        if numbers.keys() & {*titles}:
            rows.append(_row(label, numbers | {"context": _BASELINE_CONTEXT}, titles, baseline=True))
    some = next(iter(lines.values()))
    return Table(
        title=f"Held-out text of {some.text}, {some.scored_bytes:,} bytes",
        value=titles[0] if titles else "",
        rows=rows if titles else [],
        notes=[unclear] if unclear else [],
    )


def _numbers(line: Line, first: str) -> Iterator[tuple[tuple[int, str], Number]]:
    """Yield place (0 in front, 2 behind), title and number of the columns of a model."""
    for result in line.results.values():
        for row in result.rows:
            if row.baseline or not (row.column or row.unit == BITS):
                continue
            for _, context, number in row.numbers():
                title = _title(row.label, context) if row.unit == BITS else row.label
                yield (0 if row.name == first else 1 if row.column else 2, title), number


def _titles(shown: Iterable[dict[tuple[int, str], Number]], place: int) -> list[str]:
    return list(dict.fromkeys(title for numbers in shown for at, title in numbers if at == place))


def _title(label: str, context: str) -> str:
    return context if label == BITS else f"{label}, {context}"


def _row(label: str, numbers: Mapping[str, Number], titles: Sequence[str], **more: Any) -> Row:
    """Return the row of a table with all of these columns, in their order."""
    none = Number(value=None)
    cells = [numbers.get(title, none) for title in titles] or [none]
    shown = cells[0].model_dump(include=set(Number.model_fields))
    columns = dict(zip(titles[1:], cells[1:], strict=True))
    return Row(name=label, label=label, columns=columns, **shown, **more)


def _baselines(lines: Mapping[str, Line], short: bool) -> Iterator[tuple[str, Row]]:
    """Yield label and row of each baseline of the last stage of each run, best first.

    A baseline whose rate differs between runs has a row for each rate, which names its runs. The short list
    has the best for each text given, and none that was given nothing if others were given some.
    """
    last = {one.run: one for one in lines.values()}
    runs: dict[str, list[str]] = defaultdict(list)
    rows: dict[str, Row] = {}
    for run, line in last.items():
        for row in baselines(line.results):
            key = row.model_dump_json()
            runs[key].append(run)
            rows[key] = row
    listed = best_first(rows.values())
    if short:
        listed = shortened([row for row in listed if row.group] or listed)
    for row in listed:
        own = ", ".join(runs[row.model_dump_json()])
        if short:
            yield (f"{row.label.split()[0]} like {own}" if row.group == GIVEN_STAGE else row.label), row
        else:
            everyones = len(runs[row.model_dump_json()]) == len(last)
            yield (row.note or row.label) + ("" if everyones else f", for {own}"), row


def measurements(lines: Mapping[str, Line]) -> list[Table]:
    """Return a table for each result that has rows beside those of the table of models."""
    tables = []
    for key in dict.fromkeys(key for one in lines.values() for key in one.results):
        measured = {name: one.results[key] for name, one in lines.items() if key in one.results}
        titles = list(dict.fromkeys(row.label for one in measured.values() for row in one.own_rows()))
        if titles:
            rows = [
                _row(name, {row.label: row for row in one.own_rows()}, titles)
                for name, one in measured.items()
            ]
            some = next(iter(measured.values()))
            tables.append(Table(title=some.title, value=titles[0], rows=rows))
    return tables


def notes(lines: Mapping[str, Line]) -> list[str]:
    """Return the sentences that explain the tables of some models."""
    found = legends(one.results for one in lines.values())
    for name, one in lines.items():
        found += [f"{name}, {row.label}: {row}. {row.note}." for row in one.badges]
    found.append(sum_of_probabilities(max(one.deviation for one in lines.values())))
    if not all(one.lossless for one in lines.values()):
        found.append(LOSSY)
    return found


class Verdict(NamedTuple):
    """A score beside the best baseline of its context."""

    context: str
    score: str
    """The number, such as ``2.050``."""
    words: str
    """What follows it, such as ``bits per byte, 11.3% below xz, the best of the baselines``."""
    better: bool | None = None
    """Whether the model is better; None without a baseline."""


def worth(lines: Mapping[str, Line]) -> str:
    """Return a sentence that compares models with the best compressor that was given the same text as each.

    Of the two contexts the worse one for the model counts. A model without a score of what came before reads
    no earlier document. One that learned answers alone is left out, because compressors code all text.
    """
    found: list[str] = []
    for name, line in lines.items():
        rows = [row for row in baselines(line.results) if row.columns.get(GIVEN)]
        same = [row for row in rows if row.group == GIVEN_STAGE]
        most = max((row.columns[GIVEN].value or 0 for row in rows), default=0)
        same = same or [row for row in rows if row.columns[GIVEN].value == most]
        shares = []
        for context, own in zip(CONTEXTS, (line.bpb, line.bpb_carried or line.bpb), strict=True):
            rates = [number.value for row in same if (number := row.number(context)) and number.value]
            shares += [own / rate - 1 for rate in rates]
        if shares and line.learn != "assistant":
            words = f"{abs(max(shares)):.1%} {'more' if max(shares) > 0 else 'fewer'}"
            found.append(f"{name} {words}" if found else f"{name} needs {words} bits")
    return f"Beside the best compressor that was given the same text, {', '.join(found)}." if found else ""


def verdicts(scored: Scored, results: Mapping[str, Result]) -> list[Verdict]:
    """Compare a model with the best baseline of each context; leave out contexts without a score.

    A stage that learned the answers of conversations is compared with none, because baselines read all text.
    """
    mark = "" if scored.lossless else DAGGER
    if scored.learn == "assistant" and scored.bpb_assistant is not None:
        words = f"bits per byte of the assistant's answers, {bits(scored.bpb)}{mark} of all of that text"
        return [Verdict("Held-out text", f"{bits(scored.bpb_assistant)}{mark}", words)]
    kinds = {ALONE: "the best of the baselines that can be reset", CARRIED: "the best of the baselines"}
    found = []
    for context, own in zip(CONTEXTS, (scored.bpb, scored.bpb_carried), strict=True):
        if own is None:
            continue
        words, better = "bits per byte", None
        for row in best_first(baselines(results), context)[:1]:
            rival = row.number(context)
            if rival and rival.value is not None:
                better = own < rival.value
                share = f"{abs(1 - own / rival.value):.1%} {'below' if better else 'above'}"
                words += f", {share} {row.label}, {kinds[context]}"
        found.append(Verdict(context, f"{bits(own)}{mark}", words, better))
    return found
