"""`spider compare`: is the difference of two scores more than chance, over documents and over seeds?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from spider.cli.session import JSON, Session
from spider.common.results import Results, StageFolder

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Paired:
    """The difference of two models, in bits per byte, by a paired t test."""

    difference: float
    """The second minus the first. It is less than 0 if the second is better."""
    low: float
    high: float
    """95% interval."""
    p: float
    """Probability of a difference as large as this or larger, if there is none."""
    count: int
    pairs: str

    def __str__(self) -> str:
        interval = f"({self.low:+.4f} to {self.high:+.4f}, 95%)"
        return f"{self.difference:+.4f} {interval}, p = {self.p:.2g}, over {self.count:,} {self.pairs}"


def paired(values: Sequence[np.ndarray], scale: float, pairs: str) -> Paired:
    """Return what two arrays of values show, whose differences are multiplied by ``scale``."""
    from scipy import stats

    one, other = values
    test = stats.ttest_rel(other, one)
    low, high = (float(bound) * scale for bound in test.confidence_interval())
    return Paired(float((other - one).mean()) * scale, low, high, float(test.pvalue), len(one), pairs)


@click.command()
@click.argument("one")
@click.argument("other")
@JSON
@click.pass_obj
def compare(session: Session, one: str, other: str, as_json: bool) -> None:
    """Compare two models that were scored on the same text: ONE and OTHER are RUN or RUN/STAGE.

    The difference is OTHER minus ONE in bits per byte, each document alone. Documents are paired, which shows
    what other text might give. If seeds of both runs are there, they are paired too, which shows what other
    trainings might give. Nothing is trained.
    """
    import numpy as np

    from spider.evaluation.records import Evaluation

    first, second = (Evaluation.read(_folder(session, name).evaluation) for name in (one, other))
    both = f"{one} and {other}"
    if first.text_sha256 != second.text_sha256:
        raise ValueError(f"{both} are scored on different text; give both the same evaluation.data")
    bits = [np.array(scored.document_bits) for scored in (first, second)]
    if min(map(len, bits)) < 2:
        raise ValueError(f"{both} have no bits of two or more documents; evaluate both again, on more text")
    found = [paired(bits, len(bits[0]) / first.bytes, "documents")]
    found += of_seeds(session.results, session.names(one)[0], session.names(other)[0])
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    for line in found:
        click.echo(line)
    if len(found) == 1:
        remedy = "train both with further seeds, such as `grid: {seed: [1, 2]}`"
        click.echo(f"Another seed moves a score too: {remedy}.")


def _folder(session: Session, name: str) -> StageFolder:
    """Return the folder of the scores of a stage (default: the last one), or of a foreign model."""
    if name in session.config.foreign:
        return session.results.foreign(name)
    return session.results.stage(*session.stage_of(name))


def of_seeds(results: Results, one: str, other: str) -> list[Paired]:
    """Return what two runs show over the seeds that both were trained with, if those are several."""
    import numpy as np

    from spider.evaluation.noise import scored_runs

    known = scored_runs(results)
    runs = {found.run: found for found in known}
    if one not in runs or other not in runs or runs[one].recipe == runs[other].recipe:
        return []
    sides = []
    for of in (runs[one], runs[other]):
        alike = [run for run in known if (run.recipe, run.text, run.data) == (of.recipe, of.text, of.data)]
        sides.append({run.seed: run.bpb for run in alike})
    seeds = sorted(sides[0].keys() & sides[1].keys())
    if len(seeds) < 2:
        return []
    return [paired([np.array([side[seed] for seed in seeds]) for side in sides], 1.0, "seeds")]
