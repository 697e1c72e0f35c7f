"""The content of the model registry: the checkpoints of each run, their scores, and their descriptions.

MLflow's pages show Markdown of up to `_LONGEST` characters. They drop an embedded picture, but show an
artifact of a run, which they fetch from their own server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spider.evaluation.result import BITS, Row
from spider.files import digest
from spider.tracking import spool
from spider.tracking.records import Checkpoint, Choice, Evaluation

_PICTURE = "loss.svg"
#: Characters of a description that each database holds.
_LONGEST = 5000
_EXAMPLE = """\
    import mlflow

    model = mlflow.pyfunc.load_model("models:/{}")
    model.predict(["The "], params={{"max_bytes": 100}})
"""


class Version(NamedTuple):
    """A checkpoint with all its scores."""

    record: Checkpoint
    scores: dict[str, float]
    measured: list[Row]
    """Measured rows; a name denotes the same quantity in all versions."""
    pictured: bool
    """Whether its training run has the picture of the loss."""

    @property
    def run(self) -> str:
        return self.record.tags["spider.run"]

    @property
    def stage(self) -> str:
        return self.record.tags["spider.stage"]

    @property
    def weights(self) -> str:
        """Return the digest of the weights that are loaded."""
        return str(self.record.params.get("averaged_weights") or self.record.params["weights"])

    @property
    def size(self) -> int | None:
        """Return the bytes of a compressed model with its code, or None for another model."""
        size = self.scores.get("compressed/bytes")
        return None if size is None else int(size)

    @property
    def rows(self) -> list[Row]:
        """Return the measured rows of the model itself, one for each name."""
        own = {row.name: row for row in self.measured if not row.baseline and row.value is not None}
        return [*own.values()]

    def tags(self) -> dict[str, str]:
        """Return the tags of the version."""
        values = {"spider.step": self.record.step, "spider.path": self.record.params["path"]}
        values |= {row.name.replace("/", "."): row.value for row in self.rows}
        values["bytes"] = self.size
        return self.record.tags | {name: str(value) for name, value in values.items() if value is not None}


class Line(NamedTuple):
    """A run: its checkpoints in the order of training, and its best stage."""

    run: str
    versions: list[Version]
    choice: Choice | None

    @property
    def digest(self) -> str:
        """Return the digest of the content."""
        rows = [[row.model_dump() for row in one.measured] for one in self.versions]
        versions = [[one.record.plain(), one.scores, one.pictured] for one in self.versions]
        return digest([versions, rows, self.choice and self.choice.plain()])


def lines(results: Path) -> Iterator[Line]:
    """Yield all runs with a recorded checkpoint; raise `RefusedError` for a damaged record."""
    scored = defaultdict[str, list[Evaluation]](list)
    for _, path in spool.records(results, ["evaluations"]):
        one = Evaluation.read(path)
        scored[one.model or one.identity].append(one)
    choices = {one.run: one for one in (Choice.read(path) for _, path in spool.records(results, ["choices"]))}
    runs = defaultdict[str, list[Version]](list)
    for _, path in spool.records(results, ["models"]):
        record = Checkpoint.read(path)
        own = scored[record.identity]
        scores = {name: value for one in own for name, value in one.metrics.items()}
        measured = [row for one in own for row in one.rows]
        pictured = any(Path(file.path).name == _PICTURE for one in own for file in one.artifacts)
        runs[record.tags["spider.run"]].append(Version(record, scores, measured, pictured))
    for run, versions in runs.items():
        versions.sort(key=lambda one: (one.record.step, one.record.name))
        yield Line(run, versions, choices.get(run))


def about_version(version: Version, uri: str, training: str | None) -> str:
    """Return the description of the version at ``uri``; ``training`` is its training run in MLflow."""
    path, stage = version.record.params["path"], version.stage + _compressed_model(version)
    heading = f"Stage **{stage}** of run **{version.run}**, step {version.record.step:,}"
    rows = [[row.label, str(row)] for row in version.rows if row.unit == BITS]
    if version.scores.get("lossless") == 0:
        rows.append(["text", "as decoded by its tokenizer: compare only scores of the same decoded text"])
    if version.size is not None:
        rows.append(["with the code it needs", f"{version.size:,} bytes"])
    rivals = [row for row in version.measured if row.baseline and row.value is not None]
    if rivals:
        best = min(rivals, key=lambda row: row.value or 0.0)
        rows.append([f"for comparison: {best.label}", str(best)])
    rows.append(["weights", f"{version.weights}, at `{path}`"])
    rows += [[row.label, str(row)] for row in version.rows if row.unit != BITS]
    return _joined(heading, ["", ""], rows, _picture(version, training), _EXAMPLE.format(uri))


def about_run(
    line: Line, versions: Sequence[tuple[str, str | None, Version]], name: str, best: str | None
) -> str:
    """Return the description of a registered model.

    Args:
        versions: the number, the training run in MLflow and the content of each version.
        name: the name of the registered model.
        best: the number of the best version.
    """
    heading = f"Run **{line.run}**" + ("; in bold the alias `best`, by bits per byte" if best else "")
    columns = {row.name: row.label for *_, one in versions for row in one.rows}
    header = ["version", "stage", "step", *columns.values(), "bytes, with code"]
    rows = []
    for number, _, one in reversed(versions):
        values = {row.name: str(row) for row in one.rows}
        cells = [number, one.stage + _compressed_model(one), f"{one.record.step:,}"]
        cells += [values.get(name, "") for name in columns]
        cells += ["" if one.size is None else f"{one.size:,}"]
        rows.append([f"**{cell}**" if cell and number == best else cell for cell in cells])
    whole = [item for item in versions if item[2].size is None]
    below = [
        (_picture(one, training), _EXAMPLE.format(f"{name}@best" if best else f"{name}/{number}"))
        for number, training, one in whole
        if number == (best or whole[-1][0])
    ]
    return _joined(heading, header, rows, *(below[0] if below else ()))


def _joined(heading: str, header: list[str], rows: list[list[str]], *below: str) -> str:
    """Join the parts, with as many rows of the table as fit."""
    while True:
        # MLflow shows the columns of a table without a gap.
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join(f"| {'&emsp; | '.join(cells)} |" for cells in lines).replace("---&emsp;", "---")
        text = "\n\n".join(part for part in (heading, table, *below) if part)
        if len(text) <= _LONGEST or not rows:
            return text[:_LONGEST]
        rows = rows[:-1]


def _picture(version: Version, training: str | None) -> str:
    if not (version.pictured and training):
        return ""
    return f"![Training loss](get-artifact?path={version.stage}/{_PICTURE}&run_uuid={training})"


def _compressed_model(version: Version) -> str:
    return "" if version.size is None else ", compressed"
