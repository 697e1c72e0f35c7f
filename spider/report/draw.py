"""The figures of a stage, drawn from what its training and its evaluation left; no model is needed."""

from __future__ import annotations

from pathlib import Path

from spider.evaluation.artifact import Evaluation
from spider.report import figures
from spider.report.curves import curve_of
from spider.report.render import picture
from spider.report.text_view import write_page
from spider.results import StageFolder

#: What is drawn into a stage's folder.
FIGURES = ("loss.svg", "loops.svg", "inside.svg", "boundaries.html")


def draw_stage(folder: StageFolder) -> list[Path]:
    """Draw `FIGURES` into a stage's folder, from its evaluation.json, train.json and metrics.jsonl.

    Raises:
        ValueError: one of them is missing or damaged, or the evaluation is from before figures were kept.
    """
    measured = Evaluation.read(folder.evaluation)
    if measured.figures is None:
        raise ValueError(f"{folder.evaluation}: made by a Spider that kept no figures in it; evaluate again")
    where = f"{measured.run}, stage {measured.stage}"
    loss, loops, inside, page = (folder.path / name for name in FIGURES)
    curve = curve_of(folder, 0, measured.bpb)
    picture(loss, [(1, [figures.loss([curve], where)])], 800, 440, "")
    shown = figures.loops({measured.stage: measured.loops})
    picture(loops, [(1, [shown])], 800, 460, f"{where}: what more loops are worth")
    panels = figures.inside(measured.figures)
    columns = [(1.0, [panel]) for panel in panels]
    picture(inside, columns, max(800, 430 * len(columns)), 440, f"{where}: inside the model")
    unit = f" in {measured.text.unit}" if measured.text else ""
    write_page(measured.text, page, f"{where}: held-out text{unit}")
    return [loss, loops, inside, page]
