"""The model card: ``README.md`` of an exported folder, rendered from what the run has left.

It says what is known and leaves out what is not: a checkpoint that lies in its results folder has scores,
costs and settings to tell, one that was copied elsewhere has its manifest. Scores stand in it only if they
are of the weights that are exported, by digest. Nothing depends on when or where it is made, so equal records
give equal bytes. Its head is the YAML that a hub reads.

People may edit it. Its last line holds the digest of all before, by which an edited card is known and kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spider import files
from spider.checkpoints.compressed import CompressedReceipt
from spider.checkpoints.records import Exported, Manifest, Receipt
from spider.config import Config, ModelConfig, load_config
from spider.evaluation.records import Evaluation, further_results
from spider.evaluation.result import Result, all_rows, baselines, legends, scores, shortened
from spider.report.compare import baseline_cells, leading, score_columns
from spider.report.formatting import (
    DAGGER,
    LOSSY,
    bits,
    cells,
    duration,
    flops_label,
    markdown_table,
    printable,
    quantity,
    titles,
)
from spider.report.page import settings_of
from spider.report.stages import StageRecord, read_stages
from spider.results import NEWEST, CompressedFolder, Results, StageFolder
from spider.tokens import Tokens
from spider.tracking import spool
from spider.version import VERSION

log = logging.getLogger(__name__)

_MARK = (
    "<!-- Written by Spider, {}: without this line, or with another text before it, the card is yours. -->"
)
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{16})") + r"\n\Z")


def is_edited(card: str) -> bool:
    """Whether a person has changed, or written, a card."""
    mark = _MARKED.search(card)
    return mark is None or mark[1] != files.digest(card[: mark.start()])


@dataclass(frozen=True)
class Subject:
    """What is exported."""

    told: Manifest | Exported
    weights: str
    """Digest of what the exported folder holds."""
    config: ModelConfig
    parameters: int
    tokens: Tokens
    stage: StageFolder | None = None
    """Where its stage, or what that was compressed into, has left its records; None: in no results folder."""
    results: Results | None = None

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Of these very weights."""
        path = self.stage and self.stage.evaluation
        one = Evaluation.read(path) if path and path.is_file() else None
        return one if one and one.weights == self.weights else None

    @cached_property
    def measured(self) -> dict[str, Result]:
        """Return what was measured of these weights, by name."""
        found = self.evaluation.all_results if self.evaluation else {}
        return found | (further_results(self.stage, self.weights) if self.stage else {})

    @cached_property
    def run(self) -> Config | None:
        """The configuration of its results folder; None, with a warning, where this Spider cannot read it."""
        path = self.results and self.results.root / NEWEST
        if not (path and path.is_file()):
            return None
        try:
            return load_config(path, allow_imports=False)
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            log.warning("%s: cannot be read, the model card will say less (%s)", path, reason)
            return None

    @cached_property
    def stages(self) -> list[StageRecord]:
        """Those of its run that led to it, as they were trained."""
        here = isinstance(self.told, Manifest) or isinstance(self.stage, CompressedFolder)
        if self.results is None or self.run is None or not here:
            return []
        stages = read_stages(self.run, self.results, self.told.run)
        names = [stage.name for stage in stages]
        if self.told.stage not in names:
            return []
        return [
            stage for stage in stages[: names.index(self.told.stage) + 1] if stage.receipt or stage.manifest
        ]


def card(of: Subject) -> str:
    """The card as Markdown, front matter and mark included; `ValueError` where a record is damaged."""
    told, measured, costs = of.told, of.evaluation, list(_costs(of))
    read = sum(one.bytes for _, one, _ in _trained(of)) or told.bytes
    body = _TEMPLATES.get_template("card.md.j2").render(
        of=of,
        told=told,
        name=_name(of),
        size=quantity(of.parameters, ""),
        family=of.config.family,
        vocabulary="bytes" if of.tokens.digest is None else f"{of.tokens.size:,} tokens",
        text=quantity(read, "B") if read else None,
        version=told.spider if isinstance(told, Exported) else VERSION,
        data=_words(" |source|licence|language|digest", list(_data(of))),
        scores=_scores(of, measured) if measured else None,
        legends=legends([of.measured]),
        results=list(_results(of)),
        dagger="" if measured is None or measured.lossless else DAGGER,
        lossy=LOSSY,
        costs=markdown_table("stage|steps|text|seconds|FLOPs|on", costs) if costs else None,
        digests=_words(" |digest", list(_digests(of))),
        commit=_commit(of),
        settings=_settings(of),
    )  # fmt: skip
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    text = f"---\n{_front_matter(of).to_yaml()}\n---\n\n{body}\n\n"
    return text + _MARK.format(files.digest(text)) + "\n"


def _name(of: Subject) -> str:
    return f"{of.told.run}, stage {of.told.stage}"


def _words(header: str, rows: list[list[str]]) -> str | None:
    """A table of words, which are not aligned as numbers are."""
    return markdown_table(header, rows).replace(" ---: |", " --- |") if rows else None


def _cell(said: object) -> str:
    """Text as a cell of a table: one line, without what would be markup."""
    text = " ".join(printable(str(said)).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


# --------------------------------------------------------------------------------------------- front matter


def _front_matter(of: Subject) -> ModelCardData:
    """What a hub shows and searches by."""
    used = [of.run.datasets[name] for name in _datasets(of) if of.run and name in of.run.datasets]
    licenses = list(dict.fromkeys(one.license for one in used if one.license))
    license: dict[str, Any] = {}
    if used and all(one.license for one in used):
        license = {"license": licenses[0]}
        if len(licenses) > 1:
            license = {"license": "other", "license_name": "-and-".join(licenses)}
    repos = [one.source.repository for one in used if one.source.repository]
    results = list(_model_index(of))
    return ModelCardData(
        **license,
        language=list(dict.fromkeys(one.language for one in used if one.language)) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["spider", of.config.family, *(["byte-level"] if of.tokens.digest is None else [])],
        datasets=list(dict.fromkeys(repos)) or None,
        model_name=of.told.run if results else None,
        eval_results=results or None,
    )


def _model_index(of: Subject) -> Iterator[EvalResult]:
    """Yield the scores for the hub's model index."""

    def result(data: str, kind: str, metric: str, value: float, said: str) -> EvalResult:
        return EvalResult(
            task_type="text-generation",
            dataset_type=kind,
            dataset_name=data,
            metric_type=metric,
            metric_value=round(value, 4),
            metric_name=said,
        )

    if one := of.evaluation:
        source = of.run.datasets[one.data].source if of.run and one.data in of.run.datasets else None
        kind = (source.repository if source else None) or one.data
        decoded = "" if one.lossless else f" {DAGGER} of decoded text"
        yield result(f"{one.data}, held out", kind, "bits_per_byte", one.bpb, f"bits per byte{decoded}")
    for row in all_rows(of.measured):
        if row.hub_metric and row.value is not None:
            data = row.hub_dataset
            yield result(data, data, row.hub_metric.partition(" ")[0], row.value, row.label)


# --------------------------------------------------------------------------------------------------- tables


def _datasets(of: Subject) -> dict[str, str]:
    """What it was trained on, stage after stage, and the digest of each."""
    if of.stages:
        trained = [stage.receipt or stage.manifest for stage in of.stages]
        return {s.spec["data"]: one.data_digest for s, one in zip(of.stages, trained, strict=True) if one}
    spec = of.told.spec if isinstance(of.told, Manifest) else {}
    return {spec["data"]: of.told.data_digest or ""} if "data" in spec else {}


def _data(of: Subject) -> Iterator[list[str]]:
    for name, digest in _datasets(of).items():
        known = of.run.datasets.get(name) if of.run else None
        said = spool.redact(known.source.description) if known else ""
        license = (known.license or "not said") if known else ""
        yield [_cell(name), _cell(said), license, (known.language if known else "") or "", f"`{digest}`"]


def _scores(of: Subject, one: Evaluation) -> str:
    """Return the table of the model, its compressed model, and the baselines on the same text."""
    dagger = "" if one.lossless else DAGGER
    columns = score_columns([one.all_results], leading([one]))
    rows = [["**this model**", *_cells(one, columns, dagger, bold=True), one.context]]
    if compressed := _compressed_model(of):
        small = Evaluation.read(compressed.evaluation)
        size = CompressedReceipt.read(compressed.receipt).compressed.total_bytes
        if small.text_sha256 == one.text_sha256:
            cells = _cells(small, columns, dagger)
            rows.append([f"compressed into {size:,} bytes", *cells, small.context])
    for row in shortened(baselines(one.results)):
        cells = baseline_cells(row, columns, dagger)
        rows.append([_cell(row.note or row.label), *cells, "all before"])
    return markdown_table("|".join([" ", *columns.values(), "context"]), rows)


def _cells(one: Evaluation, columns: dict[str, str], dagger: str, bold: bool = False) -> list[str]:
    """Return the scores of an evaluation below these columns, the first in bold where asked."""
    values = {row.name: f"{row}{dagger}" for row in scores(one.all_results) if row.value is not None}
    cells = [values.get(name, "") for name in columns]
    return [f"**{cells[0]}**", *cells[1:]] if bold else cells


def _results(of: Subject) -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, table and notes of each further result."""
    for result in of.measured.values():
        rows = result.own_rows()
        if rows:
            lines = [
                [_cell(text) for text in line] for line in cells(result.model_copy(update={"rows": rows}))
            ]
            yield _cell(result.title), markdown_table(titles(result), lines), [_cell(n) for n in result.notes]


def _compressed_model(of: Subject) -> CompressedFolder | None:
    """What its stage was compressed into, if that was measured; not of what is itself compressed."""
    if of.stage is None or isinstance(of.stage, CompressedFolder):
        return None
    folder = CompressedFolder(of.stage.compressed)
    return folder if folder.receipt.is_file() and folder.evaluation.is_file() else None


_Stage = tuple[str, Receipt | Manifest, float | None]


def _trained(of: Subject) -> list[_Stage]:
    """Each stage that led to it: its name, what it came to, and a token's FLOPs where those are known."""
    told, stages = of.told, of.stages
    if not isinstance(told, Manifest):  # compressed, from what its stage ended with
        done = [(stage, stage.receipt) for stage in stages]
        return [(stage.name, one, _work(stage.evaluation)) for stage, one in done if one]
    before = [(stage, stage.receipt or stage.manifest) for stage in stages if stage.name != told.stage]
    led = [(stage.name, one, _work(stage.evaluation)) for stage, one in before if one]
    last = next((stage.evaluation for stage in stages if stage.name == told.stage), None)
    return [*led, (told.stage, told, _work(last))]  # which need not be at its stage's end


def _work(one: Evaluation | None) -> float | None:
    return one.flops_per_token if one else None


def _costs(of: Subject) -> Iterator[list[str]]:
    """Of each stage, and of all together where there are several."""
    done = _trained(of)
    for name, one, each in done:
        steps, kind = (
            (one.steps, one.precision) if isinstance(one, Receipt) else (one.step, one.precision.kind)
        )
        work = flops_label(each * one.tokens) if each else ""
        where = _cell(f"{one.device}, {kind}")
        yield [name, f"{steps:,}", quantity(one.bytes, "B"), duration(one.seconds), work, where]
    if len(done) > 1:
        text, seconds = (sum(getattr(one, key) for _, one, _ in done) for key in ("bytes", "seconds"))
        total = sum(each * one.tokens for _, one, each in done if each)
        known = flops_label(total) if all(each for *_, each in done) else ""
        steps = done[-1][1].global_step
        yield ["all", f"{steps:,}", quantity(text, "B"), duration(seconds), known, ""]


def _digests(of: Subject) -> Iterator[list[str]]:
    yield ["weights", f"`{of.weights}`"]
    if of.told.identity:
        yield ["settings of the last stage", f"`{of.told.identity}`"]
    if of.told.data_digest and not _datasets(of):
        yield ["data", f"`{of.told.data_digest}`"]
    if of.tokens.digest:
        yield ["tokenizer", f"`{of.tokens.digest}`"]
    if of.told.full_index:
        yield ["ngram", f"`{of.told.full_index}`"]
    if of.evaluation:
        yield ["held-out text, SHA-256", f"`{of.evaluation.text_sha256}`"]


# ------------------------------------------------------------------------------------------- to do it again


def _settings(of: Subject) -> str | None:
    """The part of the configuration that made it, as YAML."""
    if of.run is None or of.told.run not in of.run.runs:
        return None
    scored = of.run.runs[of.told.run].evaluation.data
    return settings_of(of.run, of.told.run, [*_datasets(of), *([scored] if scored else [])]).rstrip()


def _commit(of: Subject) -> str | None:
    """Of the code that trained its stage."""
    if of.results is None:
        return None
    jobs = [files.read_json(path) for _, path in spool.records(of.results.root, ["jobs"])]
    wanted = {"spider.rule": "train", "spider.name": f"{of.told.run}/{of.told.stage}"}
    made = [job for job in jobs if wanted.items() <= job["tags"].items()]
    last = max(made, key=lambda job: job.get("started", 0), default=None)
    return last["tags"].get("git.commit") if last else None


def _fence(text: str) -> str:
    """More backticks than stand in a row anywhere in a text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=False, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters |= {"bits": bits, "count": "{:,}".format, "fence": _fence, "cell": _cell}
