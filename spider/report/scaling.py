"""Scaling laws from a sweep over sizes and FLOP budgets: IsoFLOP parabolas, then power laws.

The second approach of Hoffmann et al. (arXiv:2203.15556). At each budget C a parabola in log N is fitted to
the loss, bits per byte on held-out text; its minimum is the best size. Through the minima go power laws,

    N_opt = k C^a    D_opt = k C^b    L_opt = k C^c

straight lines in logarithms, by least squares. N counts the parameters that text is multiplied with, all
experts among them; rows that are only looked up (embedding, n-gram tables) cost no FLOPs and are told apart.
D is bytes trained; that of a minimum is interpolated between the sizes of its budget, since FLOPs a byte are
the model's own count and not 6 N.

A parabola whose minimum is not between the smallest and the largest size is reported with what to do, drawn
dashed, and left out of the laws. Of several runs of one size and one budget the best counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from spider import files
from spider.checkpoints.records import Receipt
from spider.config import Config
from spider.evaluation.records import Evaluation
from spider.report.charts import COLOURS, MARKERS, Axis, Chart, Format, Series
from spider.report.formatting import bytes_label, count_label, flops_label, markdown_table, quantity
from spider.report.render import picture
from spider.results import Results

FORMAT = 1
#: Fewest sizes that a parabola goes through, and fewest minima that a law goes through.
LEAST_SIZES, LEAST_BUDGETS = 3, 2
#: Of what there are laws: a title, a letter, and how a value is said beside an axis.
_LAWS: dict[str, tuple[str, str, Format]] = {
    "parameters": ("Best parameters", "N", count_label),
    "bytes": ("Best bytes", "D", bytes_label),
    "bpb": ("Bits per byte there", "L", count_label),
}


@dataclass(frozen=True)
class Point:
    """One trained run of the sweep."""

    run: str
    budget: float
    """FLOPs that it was given."""
    flops: float
    """That it took: whole steps."""
    parameters: float
    """Without those that are only looked up."""
    all_parameters: int
    bytes: float
    bpb: float


@dataclass(frozen=True)
class IsoFlop:
    """The parabola of one budget."""

    budget: float
    flops: float
    """Geometric mean of what its runs took."""
    points: list[Point]
    coefficients: tuple[float, float, float] | None = None
    """Of bpb in log10 of the parameters, highest power first; None: too few sizes."""
    residual: float | None = None
    """Root mean square of what the parabola leaves, in bits per byte; 0 for three sizes."""
    best_parameters: float | None = None
    best_bytes: float | None = None
    best_bpb: float | None = None
    problem: str | None = None
    """Why it is not used; the best_* are then None."""


@dataclass(frozen=True)
class Law:
    """``factor * flops ** exponent``."""

    exponent: float
    factor: float
    error: float | None
    """Standard error of the exponent; None where two minima leave nothing to estimate it from."""

    def at(self, flops: float) -> float:
        return self.factor * flops**self.exponent

    def __str__(self) -> str:
        return f"C^{self.exponent:.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")


@dataclass(frozen=True)
class ScalingFit:
    curves: list[IsoFlop]
    parameters: Law | None = None
    bytes: Law | None = None
    bpb: Law | None = None
    problem: str | None = None
    """Why there are no laws."""


def fit(points: list[Point]) -> ScalingFit:
    """Parabolas of all budgets, and the laws through their minima."""
    groups: dict[float, dict[float, Point]] = defaultdict(dict)
    for point in sorted(points, key=lambda point: point.bpb):
        groups[point.budget].setdefault(point.parameters, point)
    curves = [fit_budget(budget, [*sizes.values()]) for budget, sizes in sorted(groups.items())]
    good = [curve for curve in curves if curve.problem is None]
    if len(good) < LEAST_BUDGETS:
        said = f"{len(good)} of {len(curves)} budgets have a minimum, a law needs {LEAST_BUDGETS}"
        return ScalingFit(curves, problem=said)
    flops = [curve.flops for curve in good]
    laws = [fit_law(flops, [getattr(curve, f"best_{name}") for curve in good]) for name in _LAWS]
    return ScalingFit(curves, laws[0], laws[1], laws[2])


def fit_budget(budget: float, points: list[Point]) -> IsoFlop:
    """The parabola of one budget's points, all of different sizes."""
    points = sorted(points, key=lambda point: point.parameters)
    curve = IsoFlop(budget, math.exp(sum(math.log(point.flops) for point in points) / len(points)), points)
    if (count := len(points)) < LEAST_SIZES:
        return replace(curve, problem=f"{count} sizes, a parabola needs {LEAST_SIZES}")
    size_N = np.log10([point.parameters for point in points])
    bpb_N = np.array([point.bpb for point in points])
    # Around their middle, where the powers of a logarithm differ enough to be told apart.
    middle = size_N.mean()
    a, b, c = map(float, np.polyfit(size_N - middle, bpb_N, 2))
    left_N = bpb_N - np.polyval((a, b, c), size_N - middle)
    coefficients = a, float(b - 2 * a * middle), float(c - b * middle + a * middle**2)
    curve = replace(curve, coefficients=coefficients, residual=float(np.sqrt((left_N**2).mean())))
    if a <= 0:
        said = "it opens downwards: the sizes are too close to each other, or chance decided"
        return replace(curve, problem=said)
    at = middle - b / (2 * a)
    if not size_N[0] <= at <= size_N[-1]:
        said = "below the smallest size: add smaller ones, or a larger budget"
        if at > size_N[-1]:
            said = "above the largest size: add larger ones, or a smaller budget"
        return replace(curve, problem=f"its minimum lies {said}")
    data = float(10 ** np.interp(at, size_N, np.log10([point.bytes for point in points])))
    return replace(curve, best_parameters=float(10**at), best_bytes=data, best_bpb=c - b**2 / (4 * a))


def fit_law(flops: list[float], values: list[float]) -> Law:
    """A power law through at least two points, by least squares on logarithms."""
    x_B, y_B = np.log10(flops), np.log10(values)
    middle = x_B.mean()
    slope, height = np.polyfit(x_B - middle, y_B, 1)
    error = None
    if len(x_B) > 2:
        left_B = y_B - height - slope * (x_B - middle)
        error = float(np.sqrt((left_B**2).sum() / (len(x_B) - 2) / ((x_B - middle) ** 2).sum()))
    return Law(float(slope), float(10 ** (height - slope * middle)), error)


def read_points(config: Config, results: Results, sweep: str) -> list[Point]:
    """Return what the runs of a sweep came to.

    Raises:
        ValueError: a run is not trained or not evaluated, or two were scored on different texts.
    """
    points, texts = [], set()
    for run in config.sweeps[sweep]:
        (stage,) = config.runs[run].stages
        folder = results.stage(run, stage.name)
        receipt, measured = Receipt.read(folder.receipt), Evaluation.read(folder.evaluation)
        budget = config.stage(run, stage.name).settings.target_flops
        assert budget is not None, "checked when the configuration is read"
        texts.add(measured.text_sha256)
        flops, size = measured.flops_per_token * receipt.tokens, measured.parameters
        multiplied = size - measured.parameters_looked_up
        points.append(Point(run, budget, flops, multiplied, size, receipt.bytes, measured.bpb))
    if len(texts) > 1:
        raise ValueError(f"the runs of {sweep} were not all scored on the same text; evaluate them again")
    return points


def write_scaling(config: Config, results: Results, output: Path) -> ScalingFit:
    """Fit the configuration's sweep; write a table and a figure beside ``output``, the JSON.
    `ValueError` where the configuration names no sweep, or as `read_points` says."""
    if (sweep := config.scaling) is None:
        raise ValueError("scaling: the configuration names no run with a grid to fit a law to")
    fitted = fit(read_points(config, results, sweep))
    draw_scaling(fitted, output.with_suffix(".svg"), f"{sweep}: scaling law")
    files.write_text(output.with_suffix(".md"), markdown(fitted, sweep))
    files.write_json(output, {"format": FORMAT, "sweep": sweep, **asdict(fitted)})
    return fitted


# ----------------------------------------------------------------------------------- tables and the figure


def markdown(fitted: ScalingFit, sweep: str) -> str:
    """The laws, the minima and the runs, as tables."""
    named = {"parameters": fitted.parameters, "bytes": fitted.bytes, "bits per byte": fitted.bpb}
    laws = [[f"best {name}", f"{law.factor:.3g} {law}"] for name, law in named.items() if law]
    minima, runs = [], []
    for one in fitted.curves:
        best = [""] * 4
        if one.best_parameters and one.best_bytes and one.best_bpb:
            size, data = one.best_parameters, one.best_bytes
            best = [quantity(size, ""), quantity(data, "B"), f"{one.best_bpb:.4f}", f"{data / size:.1f}"]
        left = "" if one.residual is None else f"{one.residual:.4f}"
        minima.append([flops_label(one.budget), str(len(one.points)), *best, left, one.problem or ""])
        runs += [
            [p.run, flops_label(p.budget), quantity(p.parameters, ""), quantity(p.all_parameters, ""),
             quantity(p.bytes, "B"), f"{p.bpb:.4f}"]
            for p in one.points
        ]  # fmt: skip
    titles = "FLOPs|sizes|best parameters|bytes|bits per byte|bytes a parameter|fit leaves|"
    blocks = [
        f"# Scaling law of {sweep}",
        f"No law: {fitted.problem}." if fitted.problem else markdown_table("|law, C in FLOPs", laws),
        markdown_table(titles, minima),
        markdown_table("run|FLOPs|parameters|with tables|bytes|bits per byte", runs),
    ]
    return "\n\n".join(blocks) + "\n"


def draw_scaling(fitted: ScalingFit, path: Path, title: str) -> None:
    """Parabolas at the left, a dashed one where it has no minimum to use; the laws at the right."""
    parabolas = Chart(
        "Runs by size, a curve for each budget of FLOPs",
        Axis("parameters, without those that are looked up", count_label, log=True, margin=0.03),
        Axis("bits per byte on held-out text"),
        [one for number, curve in enumerate(fitted.curves) for one in _parabola(curve, number)],
    )
    picture(path, [(1.7, [parabolas]), (1, [_law(fitted, name) for name in _LAWS])], 1200, 640, title)


def _parabola(curve: IsoFlop, number: int) -> list[Series]:
    colour, sizes = number % COLOURS, [point.parameters for point in curve.points]
    name = flops_label(curve.budget) + (" (not used)" if curve.problem else "")
    bpb = [point.bpb for point in curve.points]
    series = [Series(name, sizes, bpb, colour, "dots", MARKERS[number % len(MARKERS)])]
    if curve.coefficients is not None:
        dense = np.geomspace(sizes[0] * 0.92, sizes[-1] * 1.08, 200)
        fitted = np.polyval(curve.coefficients, np.log10(dense)).tolist()
        series.append(Series("", dense.tolist(), fitted, colour, dashed=curve.problem is not None))
    if curve.best_parameters is not None and curve.best_bpb is not None:
        series.append(Series("", [curve.best_parameters], [curve.best_bpb], colour, "dots", "*"))
    return series


def _law(fitted: ScalingFit, name: str) -> Chart:
    (title, letter, form), corner = _LAWS[name], ""
    series: list[Series] = []
    if law := getattr(fitted, name):  # without one, a minimum alone says nothing here
        corner = f"{letter} ~ {law}"
        flops = [curve.flops for curve in fitted.curves]
        ends = [min(flops) / 1.3, max(flops) * 1.3]
        series = [Series("", ends, [law.at(end) for end in ends], COLOURS - 1)] + [
            Series("", [curve.flops], [getattr(curve, f"best_{name}")], number % COLOURS, "dots", "*")
            for number, curve in enumerate(fitted.curves)
            if curve.problem is None
        ]
    x = Axis("FLOPs of training", flops_label, log=True, margin=0.03)
    y = Axis("", form, log=True, margin=0.12)
    return Chart(title, x, y, series, corner=corner, instead=fitted.problem or "no law")
