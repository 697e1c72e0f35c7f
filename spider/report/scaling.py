"""Fit scaling laws to a sweep over sizes and FLOP budgets: IsoFLOP parabolas, then power laws.

This is the second approach of Hoffmann et al. (arXiv:2203.15556). At each budget C a parabola in log N is
fitted to the loss, bits per byte on held-out text. Its minimum is the best size. Power laws are fitted to the
minima by least squares on logarithms:

    N_opt = k C^a    D_opt = k C^b    L_opt = k C^c

N counts the parameters of matrix products, including all experts. Rows of lookup tables (embedding, n-gram
tables) cost no FLOPs and are not counted. D is bytes trained. The D of a minimum is interpolated between the
sizes of its budget, because FLOPs per byte are the model's own count and not 6 N.

A parabola whose minimum is outside the range of sizes is reported with a remedy, drawn dashed, and left out
of the laws. If several runs have one size and one budget, the best counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
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
#: Fewest sizes for a parabola.
LEAST_SIZES = 3
#: Fewest minima for a law.
LEAST_BUDGETS = 2
#: The laws: title, letter, and format of values beside an axis.
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
    """FLOPs of the budget."""
    flops: float
    """FLOPs of the training, which takes whole steps."""
    parameters: float
    """Parameters without lookup tables."""
    all_parameters: int
    bytes: float
    bpb: float


@dataclass(frozen=True)
class IsoFlop:
    """The parabola of one budget."""

    budget: float
    flops: float
    """Geometric mean of the FLOPs of its runs."""
    points: list[Point]
    coefficients: tuple[float, float, float] | None = None
    """Coefficients of bpb in log10 of the parameters, highest power first; None: too few sizes."""
    residual: float | None = None
    """Root mean square of the residuals, in bits per byte; 0 for three sizes."""
    best: dict[str, float] = field(default_factory=dict)
    """The minimum: ``parameters``, ``bytes`` and ``bpb``; empty for a parabola with a problem."""
    problem: str | None = None
    """Reason why the parabola is not used."""


@dataclass(frozen=True)
class Law:
    """A power law: ``factor * flops ** exponent``."""

    exponent: float
    factor: float
    error: float | None
    """Standard error of the exponent; None for a law through only two minima."""

    def at(self, flops: float) -> float:
        return self.factor * flops**self.exponent

    def __str__(self) -> str:
        return f"C^{self.exponent:.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")


@dataclass(frozen=True)
class ScalingFit:
    """The parabolas of a sweep and the laws through their minima."""

    curves: list[IsoFlop]
    laws: dict[str, Law] = field(default_factory=dict)
    """Laws of the best ``parameters``, ``bytes`` and ``bpb``."""
    problem: str | None = None
    """Reason why laws are missing."""


def fit(points: list[Point]) -> ScalingFit:
    """Fit the parabolas of all budgets, and the laws through their minima."""
    groups: dict[float, dict[float, Point]] = defaultdict(dict)
    for point in sorted(points, key=lambda point: point.bpb):
        groups[point.budget].setdefault(point.parameters, point)
    curves = [fit_budget(budget, [*sizes.values()]) for budget, sizes in sorted(groups.items())]
    good = [curve for curve in curves if curve.problem is None]
    if len(good) < LEAST_BUDGETS:
        problem = f"{len(good)} of {len(curves)} budgets have a minimum, a law needs {LEAST_BUDGETS}"
        return ScalingFit(curves, problem=problem)
    flops = [curve.flops for curve in good]
    laws = {name: fit_law(flops, [curve.best[name] for curve in good]) for name in _LAWS}
    return ScalingFit(curves, laws)


def fit_budget(budget: float, points: list[Point]) -> IsoFlop:
    """Fit the parabola of one budget's points, which have different sizes."""
    points = sorted(points, key=lambda point: point.parameters)
    curve = IsoFlop(budget, math.exp(sum(math.log(point.flops) for point in points) / len(points)), points)
    if (count := len(points)) < LEAST_SIZES:
        return replace(curve, problem=f"{count} sizes, a parabola needs {LEAST_SIZES}")
    size_N = np.log10([point.parameters for point in points])
    bpb_N = np.array([point.bpb for point in points])
    # Centre the sizes: the powers of uncentred logarithms are nearly collinear.
    middle = size_N.mean()
    a, b, c = map(float, np.polyfit(size_N - middle, bpb_N, 2))
    residual_N = bpb_N - np.polyval((a, b, c), size_N - middle)
    coefficients = (a, float(b - 2 * a * middle), float(c - b * middle + a * middle**2))
    curve = replace(curve, coefficients=coefficients, residual=float(np.sqrt((residual_N**2).mean())))
    if a <= 0:
        problem = "it opens downwards: the sizes are too close to each other, or noise decided"
        return replace(curve, problem=problem)
    at = middle - b / (2 * a)
    if not size_N[0] <= at <= size_N[-1]:
        problem = "its minimum lies below the smallest size: add smaller ones, or a larger budget"
        if at > size_N[-1]:
            problem = "its minimum lies above the largest size: add larger ones, or a smaller budget"
        return replace(curve, problem=problem)
    data = float(10 ** np.interp(at, size_N, np.log10([point.bytes for point in points])))
    best = {"parameters": float(10**at), "bytes": data, "bpb": c - b**2 / (4 * a)}
    return replace(curve, best=best)


def fit_law(flops: list[float], values: list[float]) -> Law:
    """Fit a power law to at least two points, by least squares on logarithms."""
    x_B = np.log10(flops)
    y_B = np.log10(values)
    middle = x_B.mean()
    slope, height = np.polyfit(x_B - middle, y_B, 1)
    error = None
    if len(x_B) > 2:
        residual_B = y_B - height - slope * (x_B - middle)
        error = float(np.sqrt((residual_B**2).sum() / (len(x_B) - 2) / ((x_B - middle) ** 2).sum()))
    return Law(float(slope), float(10 ** (height - slope * middle)), error)


def read_points(config: Config, results: Results, sweep: str) -> list[Point]:
    """Return the runs of a sweep as points.

    Raises:
        ValueError: A run is not trained or not evaluated, or two were scored on different texts.
    """
    points = []
    texts = set()
    for run in config.sweeps[sweep]:
        (stage,) = config.runs[run].stages
        folder = results.stage(run, stage.name)
        receipt = Receipt.read(folder.receipt)
        evaluation = Evaluation.read(folder.evaluation)
        budget = config.stage(run, stage.name).settings.target_flops
        assert budget is not None, "checked when the configuration is read"
        texts.add(evaluation.text_sha256)
        points.append(
            Point(
                run=run,
                budget=budget,
                flops=evaluation.flops_per_token * receipt.tokens,
                parameters=evaluation.parameters - evaluation.parameters_looked_up,
                all_parameters=evaluation.parameters,
                bytes=receipt.bytes,
                bpb=evaluation.bpb,
            )
        )
    if len(texts) > 1:
        raise ValueError(f"the runs of {sweep} were not all scored on the same text; evaluate them again")
    return points


def write_scaling(config: Config, results: Results, output: Path) -> ScalingFit:
    """Fit the configuration's sweep, and write a table and a figure beside ``output``, the JSON.

    Raises:
        ValueError: The configuration names no sweep, or as `read_points`.
    """
    sweep = config.scaling
    if sweep is None:
        raise ValueError("scaling: the configuration names no run with a grid to fit a law to")
    fitted = fit(read_points(config, results, sweep))
    draw_scaling(fitted, output.with_suffix(".svg"), f"{sweep}: scaling law")
    files.write_text(output.with_suffix(".md"), markdown(fitted, sweep))
    files.write_json(output, {"format": FORMAT, "sweep": sweep, **asdict(fitted)})
    return fitted


# ----------------------------------------------------------------------------------- tables and the figure


def markdown(fitted: ScalingFit, sweep: str) -> str:
    """Return the laws, the minima and the runs as tables."""
    laws = [[_LAWS[name][0], f"{law.factor:.3g} {law}"] for name, law in fitted.laws.items()]
    minima = []
    runs = []
    for one in fitted.curves:
        best = [""] * 4
        if one.best:
            best = [
                quantity(one.best["parameters"], ""),
                quantity(one.best["bytes"], "B"),
                f"{one.best['bpb']:.4f}",
                f"{one.best['bytes'] / one.best['parameters']:.1f}",
            ]
        residual = "" if one.residual is None else f"{one.residual:.4f}"
        minima.append([flops_label(one.budget), str(len(one.points)), *best, residual, one.problem or ""])
        for p in one.points:
            sizes = [quantity(p.parameters, ""), quantity(p.all_parameters, ""), quantity(p.bytes, "B")]
            runs.append([p.run, flops_label(p.budget), *sizes, f"{p.bpb:.4f}"])
    of_minima = "FLOPs|sizes|best parameters|bytes|bits per byte|bytes per parameter|residual|"
    of_runs = "run|FLOPs|parameters|with tables|bytes|bits per byte"
    blocks = [
        f"# Scaling law of {sweep}",
        f"No law: {fitted.problem}." if fitted.problem else markdown_table(["", "law, C in FLOPs"], laws),
        markdown_table(of_minima.split("|"), minima),
        markdown_table(of_runs.split("|"), runs),
    ]
    return "\n\n".join(blocks) + "\n"


def draw_scaling(fitted: ScalingFit, path: Path, title: str) -> None:
    """Draw the parabolas at the left and the laws at the right. Unused parabolas are dashed."""
    parabolas = Chart(
        "Runs by size, a curve for each budget of FLOPs",
        Axis("parameters, without lookup tables", count_label, log=True, margin=0.03),
        Axis("bits per byte on held-out text"),
        [one for number, curve in enumerate(fitted.curves) for one in _parabola(curve, number)],
    )
    picture(path, [(1.7, [parabolas]), (1, [_law(fitted, name) for name in _LAWS])], 1200, 640, title)


def _parabola(curve: IsoFlop, number: int) -> list[Series]:
    colour = number % COLOURS
    sizes = [point.parameters for point in curve.points]
    name = flops_label(curve.budget) + (" (not used)" if curve.problem else "")
    bpb = [point.bpb for point in curve.points]
    series = [Series(name, sizes, bpb, colour, "dots", MARKERS[number % len(MARKERS)])]
    if curve.coefficients is not None:
        dense = np.geomspace(sizes[0] * 0.92, sizes[-1] * 1.08, 200)
        fitted = np.polyval(curve.coefficients, np.log10(dense)).tolist()
        series.append(Series("", dense.tolist(), fitted, colour, dashed=curve.problem is not None))
    if curve.best:
        series.append(Series("", [curve.best["parameters"]], [curve.best["bpb"]], colour, "dots", "*"))
    return series


def _law(fitted: ScalingFit, name: str) -> Chart:
    title, letter, form = _LAWS[name]
    law = fitted.laws.get(name)
    series: list[Series] = []
    if law:
        flops = [curve.flops for curve in fitted.curves]
        ends = [min(flops) / 1.3, max(flops) * 1.3]
        series.append(Series("", ends, [law.at(end) for end in ends], COLOURS - 1))
        for number, curve in enumerate(fitted.curves):
            if curve.best:
                series.append(Series("", [curve.flops], [curve.best[name]], number % COLOURS, "dots", "*"))
    return Chart(
        f"{title}: {letter} ~ {law}" if law else title,
        Axis("FLOPs of training", flops_label, log=True, margin=0.03),
        Axis("", form, log=True, margin=0.12),
        series,
        instead=fitted.problem or "no law",
    )
