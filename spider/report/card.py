"""Write the model card: ``README.md`` of an exported folder, from the files that the run has left.

The card leaves out what is unknown. A checkpoint in its results folder has scores, costs and settings; one
that was copied elsewhere has only its manifest. Scores are shown only if they are of the exported weights, by
digest. The card does not depend on the time or the machine, so equal records give equal bytes. Its front
matter is the YAML that the hub reads.

People may edit the card. Its last line holds the digest of the text before, so an edited card is recognised
and never overwritten.
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

from spider.checkpoints.records import Exported, Manifest, Receipt
from spider.common import VERSION, files
from spider.common.formatting import printable, quantity, redact
from spider.common.results import NEWEST, CompressedFolder, Results, StageFolder
from spider.config import Config, ModelConfig, load_config
from spider.config.data import Dataset
from spider.data.shards import Metadata
from spider.evaluation.records import DAGGER, Evaluation, results_of
from spider.evaluation.result import SECONDS, SIZE, Number, Result, Row, Table, all_rows
from spider.provenance.lineage import Lineage
from spider.provenance.made import relative
from spider.report.page import settings_of
from spider.report.stages import StageRecord, read_stages
from spider.report.summary import Line, join, models, notes
from spider.report.tables import markdown
from spider.tokens import Tokens

log = logging.getLogger(__name__)

_MARK = (
    "<!-- Written by Spider, {}: without this line, or with another text before it, the card is yours. -->"
)
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{16})") + r"\n\Z")


def is_edited(card: str) -> bool:
    """Return whether a person has written or changed a card."""
    mark = _MARKED.search(card)
    return mark is None or mark[1] != files.digest(card[: mark.start()])


@dataclass(frozen=True)
class Subject:
    """The exported model, and the records of its run."""

    manifest: Manifest | Exported
    weights: str
    """Digest of the exported weights."""
    config: ModelConfig
    parameters: int
    tokens: Tokens
    stage: StageFolder | None = None
    """Folder of the stage or of its compressed model; None outside a results folder."""
    results: Results | None = None

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of the exported weights."""
        if self.stage is None or not self.stage.evaluation.is_file():
            return None
        evaluation = Evaluation.read(self.stage.evaluation)
        return evaluation if evaluation.weights == self.weights else None

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Return the scores of the exported weights, and of the compressed model on the same text."""
        if self.stage is None or self.evaluation is None:
            return {}
        line = next(iter(join([self.stage.evaluation]).runs.values())).last
        found = {"this model": line}
        small = line.compressed
        if small and small.text_sha256 == line.text_sha256:
            size = next((str(row) for row in all_rows(small.results) if row.name == "bytes"), "?")
            found[f"compressed into {size} bytes"] = small
        return found

    @cached_property
    def measured(self) -> dict[str, Result]:
        """Return the results of the exported weights, by name."""
        return results_of(self.stage, self.weights) if self.stage else {}

    @cached_property
    def run(self) -> Config | None:
        """Return the configuration of the results folder; None, with a warning, if it cannot be read."""
        path = self.results and self.results.root / NEWEST
        if not (path and path.is_file()):
            return None
        try:
            return load_config(path, allow_imports=False)
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            log.warning("%s: cannot be read, so the model card is shorter (%s)", path, reason)
            return None

    @cached_property
    def stages(self) -> list[StageRecord]:
        """Return the trained stages of the run, up to the exported one."""
        in_results = isinstance(self.manifest, Manifest) or isinstance(self.stage, CompressedFolder)
        if self.results is None or self.run is None or not in_results:
            return []
        stages = read_stages(self.run, self.results, self.manifest.run)
        names = [stage.name for stage in stages]
        if self.manifest.stage not in names:
            return []
        before = stages[: names.index(self.manifest.stage) + 1]
        return [stage for stage in before if stage.receipt or stage.manifest]

    @cached_property
    def trained(self) -> dict[str, Receipt | Manifest]:
        """Return the record of each stage that led to the model, by name.

        The last one is the exported checkpoint, which may be before the end of its stage. A compressed model
        is made from the end of its stage.
        """
        found = {stage.name: stage.receipt or stage.manifest for stage in self.stages}
        if isinstance(self.manifest, Manifest):
            found[self.manifest.stage] = self.manifest
        return {name: record for name, record in found.items() if record}

    @cached_property
    def datasets(self) -> dict[str, str]:
        """Return the digest of each dataset that the model was trained on, by name."""
        if self.stages:
            found = [_trained_on(stage.spec, self.trained[stage.name]) for stage in self.stages]
            return {name: digest for one in found for name, digest in one.items()}
        spec = self.manifest.spec if isinstance(self.manifest, Manifest) else {}
        return _trained_on(spec, self.manifest) if "data" in spec else {}

    @property
    def dataset_settings(self) -> dict[str, Dataset]:
        """Return the settings of these datasets that are in the configuration, by name."""
        known = self.run.datasets if self.run else {}
        return {name: known[name] for name in self.datasets if name in known}


def card(subject: Subject) -> str:
    """Return the card as Markdown with front matter and mark; `ValueError` for a damaged record."""
    manifest = subject.manifest
    read = sum(record.bytes for record in subject.trained.values()) or manifest.bytes
    body = _TEMPLATES.get_template("card.md.j2").render(
        manifest=manifest,
        evaluation=subject.evaluation,
        name=f"{manifest.run}, stage {manifest.stage}",
        size=quantity(subject.parameters, ""),
        family=subject.config.family,
        vocabulary="bytes" if subject.tokens.digest is None else f"{subject.tokens.size:,} tokens",
        text=quantity(read, "B") if read else None,
        version=manifest.spider if isinstance(manifest, Exported) else VERSION,
        data=list(_data(subject)),
        scores=markdown(models(subject.lines), _cell) if subject.lines else None,
        notes=[_cell(note) for note in notes(subject.lines)] if subject.lines else [],
        results=list(_results(subject)),
        costs=_costs(subject),
        digests={
            "weights": subject.weights,
            "settings of the last stage": manifest.identity,
            "data": None if subject.datasets else manifest.data_digest,
            "tokenizer": subject.tokens.digest,
            "n-gram index": manifest.full_index,
            "held-out text, SHA-256": subject.evaluation.text_sha256 if subject.evaluation else None,
        },
        commit=_commit(subject),
        settings=_settings(subject),
    )
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    text = f"---\n{_front_matter(subject).to_yaml()}\n---\n\n{body}\n\n"
    return text + _MARK.format(files.digest(text)) + "\n"


def _cell(value: object) -> str:
    """Return text for a cell of a table: one line without markup."""
    text = " ".join(printable(str(value)).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


# --------------------------------------------------------------------------------------------- front matter


def _front_matter(subject: Subject) -> ModelCardData:
    """Return the metadata that the hub shows and searches."""
    used = subject.dataset_settings.values()
    licenses = list(dict.fromkeys(one.license for one in used if one.license))
    if not all(one.license for one in used):
        licenses = []
    several = len(licenses) > 1
    repositories = dict.fromkeys(one.source.repository for one in used if one.source.repository)
    results = list(_model_index(subject))
    return ModelCardData(
        license="other" if several else next(iter(licenses), None),
        license_name="-and-".join(licenses) if several else None,
        language=list(dict.fromkeys(one.language for one in used if one.language)) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["spider", subject.config.family, *(["byte-level"] if subject.tokens.digest is None else [])],
        datasets=list(repositories) or None,
        model_name=subject.manifest.run if results else None,
        eval_results=results or None,
    )


def _model_index(subject: Subject) -> Iterator[EvalResult]:
    """Yield the scores for the hub's model index."""
    if evaluation := subject.evaluation:
        data = evaluation.data
        known = subject.run.datasets if subject.run else {}
        repository = known[data].source.repository if data in known else None
        yield EvalResult(
            task_type="text-generation",
            dataset_type=repository or data,
            dataset_name=f"{data}, held out",
            metric_type="bits_per_byte",
            metric_value=round(evaluation.bpb, 4),
            metric_name="bits per byte" + ("" if evaluation.lossless else f" {DAGGER} of decoded text"),
        )
    for row in all_rows(subject.measured):
        if row.hub_metric and row.value is not None:
            yield EvalResult(
                task_type="text-generation",
                dataset_type=row.hub_dataset,
                dataset_name=row.hub_dataset,
                metric_type=row.hub_metric.partition(" ")[0],
                metric_value=round(row.value, 4),
                metric_name=row.label,
            )


# --------------------------------------------------------------------------------------------------- tables


def _trained_on(spec: dict[str, Any], record: Any) -> dict[str, str]:
    """Return the digests of the datasets of a stage by name, from its spec and a record of its training."""
    position = getattr(record, "position", None)
    if isinstance(spec["settings"].get("data"), dict) and position:
        return {name: split.rpartition("/")[0] for name, split in position["data"].items()}
    return {spec["data"]: record.data_digest or ""}


def _data(subject: Subject) -> Iterator[list[str]]:
    """Yield the datasets with source, licence, language and digest."""
    settings = subject.dataset_settings
    for name, digest in subject.datasets.items():
        source, license, language = "", "", ""
        if one := settings.get(name):
            source = redact(one.source.description) + _without(subject, name, digest)
            license = one.license or "not specified"
            language = one.language or ""
        yield [name, source, license, language, digest]


def _without(subject: Subject, dataset: str, digest: str) -> str:
    """Return what cleaning left out of a dataset, if the results folder still has its description."""
    path = subject.results and subject.results.shards(dataset) / "metadata.json"
    metadata = Metadata.read(path) if path and path.exists() else None
    return f"; {metadata.without}" if metadata and metadata.digest == digest and metadata.without else ""


def _results(subject: Subject) -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, table and notes of each further result."""
    for result in subject.measured.values():
        own = result.model_copy(update={"rows": result.own_rows()})
        if own.rows:
            yield _cell(own.title), markdown(own, _cell), [_cell(note) for note in own.notes]


def _costs(subject: Subject) -> str | None:
    """Return the table of the costs of each stage, and of all together."""
    trained = subject.trained
    known = {stage.name: stage.evaluation.flops_per_token for stage in subject.stages if stage.evaluation}
    flops = {name: known[name] * trained[name].tokens for name in trained if name in known}
    rows = []
    for name, record in trained.items():
        if isinstance(record, Receipt):
            steps, precision = record.steps, record.precision
        else:
            steps, precision = record.step, record.precision.kind
        device = f"{record.device}, {precision}"
        rows.append(_cost(name, steps, record.bytes, record.seconds, flops.get(name), device))
    if len(trained) > 1:
        records = [*trained.values()]
        size, seconds = sum(record.bytes for record in records), sum(record.seconds for record in records)
        all_flops = sum(flops.values()) if flops.keys() == trained.keys() else None
        rows.append(_cost("all", records[-1].global_step, size, seconds, all_flops))
    return markdown(Table(title="Costs", head="stage", value="steps", rows=rows), _cell) if rows else None


def _cost(name: str, steps: int, size: float, seconds: float, flops: float | None, device: str = "") -> Row:
    columns = {
        "text": Number(value=size, unit=SIZE),
        "time": Number(value=seconds, unit=SECONDS),
        "FLOPs": Number(value=None, text="" if flops is None else f"{flops:.3g}".replace("e+", "e")),
        "on": Number(value=None, text=device),
    }
    return Row(name=name, label=name, value=steps, columns=columns)


# --------------------------------------------------------------------------------------------- reproduction


def _settings(subject: Subject) -> str | None:
    """Return the part of the configuration that makes the model, as YAML."""
    config = subject.run
    if config is None or subject.manifest.run not in config.runs:
        return None
    scored = config.runs[subject.manifest.run].evaluation.data
    datasets = [*subject.datasets, *([scored] if scored else [])]
    return settings_of(config, subject.manifest.run, datasets).rstrip()


def _commit(subject: Subject) -> str | None:
    """Return the commit of the code that trained the stage."""
    if subject.results is None:
        return None
    receipt = subject.results.stage(subject.manifest.run, subject.manifest.stage).receipt
    job = Lineage(subject.results.root).newest.get(relative(subject.results.root, receipt))
    return job.commit if job else None


def _fence(text: str) -> str:
    """Return more backticks than any row of backticks in a text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"count": "{:,}".format, "fence": _fence, "cell": _cell}
