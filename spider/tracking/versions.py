"""The content of the model registry: the checkpoints of each run, their scores, and their descriptions.

MLflow's pages show Markdown of up to `_LONGEST` characters. They drop an embedded picture, but show an
artifact of a run, which they fetch from their own server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spider.evaluation.result import BITS, CONTEXTS, Row, best_first
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
    evaluations: list[Evaluation]

    @property
    def run(self) -> str:
        return self.record.tags["spider.run"]

    @property
    def stage(self) -> str:
        """Return the stage, such as ``main``, or ``main/compressed`` for its compressed model."""
        return self.record.tags["spider.stage"]

    @property
    def weights(self) -> str:
        """Return the digest of the weights that are loaded."""
        return str(self.record.params.get("averaged_weights") or self.record.params["weights"])

    @property
    def rows(self) -> list[Row]:
        """Return the measured rows of the model itself. A name denotes the same quantity in all versions."""
        return [row for row in self._measured() if not row.baseline]

    @property
    def baselines(self) -> list[Row]:
        """Return the rows of baselines on the same text."""
        return [row for row in self._measured() if row.baseline]

    def _measured(self) -> list[Row]:
        """Return the rows with a number, one for each name."""
        rows = {row.name: row for one in self.evaluations for row in one.rows if any(row.numbers())}
        return [*rows.values()]

    def tags(self) -> dict[str, str]:
        """Return the tags of the version."""
        tags = {"spider.step": str(self.record.step), "spider.path": str(self.record.params["path"])}
        for row in self.rows:
            for name, _, number in row.numbers():
                value = number.text if number.value is None else str(number.value).removesuffix(".0")
                tags[name.replace("/", ".")] = value
        return self.record.tags | tags


class Line(NamedTuple):
    """A run: its checkpoints in the order of training, and its best stage."""

    run: str
    versions: list[Version]
    choice: Choice | None

    @property
    def digest(self) -> str:
        """Return the digest of the content."""
        records = [record for one in self.versions for record in (one.record, *one.evaluations)]
        return digest([[record.plain() for record in records], self.choice and self.choice.plain()])


def lines(results: Path) -> Iterator[Line]:
    """Yield all runs with the last checkpoint of a stage; raise `RefusedError` for a damaged record."""
    scored = defaultdict[str, list[Evaluation]](list)
    for _, path in spool.records(results, ["evaluations"]):
        one = Evaluation.read(path)
        scored[one.model].append(one)
    choices = {one.run: one for one in (Choice.read(path) for _, path in spool.records(results, ["choices"]))}
    runs = defaultdict[str, list[Version]](list)
    for _, path in spool.records(results, ["models"]):
        record = Checkpoint.read(path)
        if not record.final:
            continue
        runs[record.tags["spider.run"]].append(Version(record, scored[record.identity]))
    for run, versions in runs.items():
        versions.sort(key=lambda one: (one.record.step, one.record.name))
        yield Line(run, versions, choices.get(run))


def about_version(version: Version, uri: str, training: str | None) -> str:
    """Return the description of the version at ``uri``; ``training`` is its training run in MLflow."""
    heading = f"Stage **{version.stage}** of run **{version.run}**, step {version.record.step:,}"
    rows = [_cells(row.label, row) for row in version.rows if row.unit == BITS]
    if any(one.metrics.get("lossless") == 0 for one in version.evaluations):
        rows.append(["text", "as decoded by its tokenizer: compare only scores of the same decoded text", ""])
    best = [row for context in CONTEXTS for row in best_first(version.baselines, context)[:1]]
    rows += [_cells(f"for comparison: {row.label}", row) for i, row in enumerate(best) if row not in best[:i]]
    rows.append(["weights", f"{version.weights}, at `{version.record.params['path']}`", ""])
    rows += [[row.label, str(row), ""] for row in version.rows if row.unit != BITS]
    return _joined(heading, ["", *CONTEXTS], rows, _picture(version, training), _EXAMPLE.format(uri))


def _cells(label: str, row: Row) -> list[str]:
    """Return a line of a table with a number for each context."""
    return [label, *(str(row.number(context) or "") for context in CONTEXTS)]


def about_run(
    line: Line, versions: Sequence[tuple[str, str | None, Version]], name: str, best: str | None
) -> str:
    """Return the description of a registered model.

    Args:
        versions: the number, the training run in MLflow and the content of each version.
        name: the name of the registered model.
        best: the number of the best version.
    """
    heading = f"Run **{line.run}**" + (
        "; in bold the alias `best`, by bits per byte, each document alone" if best else ""
    )
    columns = {
        name: f"{row.label}, {context}" if row.unit == BITS else row.label
        for *_, one in versions
        for row in one.rows
        for name, context, _ in row.numbers()
    }
    rows = []
    for number, _, one in reversed(versions):
        values = {name: str(number) for row in one.rows for name, _, number in row.numbers()}
        cells = [number, one.stage, f"{one.record.step:,}", *(values.get(name, "") for name in columns)]
        rows.append([f"**{cell}**" if cell and number == best else cell for cell in cells])
    below = []
    for number, training, one in versions:
        if number == (best or versions[-1][0]):
            below = [_picture(one, training), _EXAMPLE.format(f"{name}@best" if best else f"{name}/{number}")]
    return _joined(heading, ["version", "stage", "step", *columns.values()], rows, *below)


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
    """Return the picture of the loss, if the training run has one."""
    artifacts = [Path(file.path).name for one in version.evaluations for file in one.artifacts]
    if _PICTURE not in artifacts or training is None:
        return ""
    return f"![Training loss](get-artifact?path={version.stage}/{_PICTURE}&run_uuid={training})"
