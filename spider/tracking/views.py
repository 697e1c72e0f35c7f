"""The page of MLflow that compares the runs, as a saved view of the experiment *Training*.

MLflow keeps a saved view as a tag of the experiment, and the address of a page selects it. MLflow shows
columns in its table only. So the view draws the same figures as bars on the page of charts.
"""

from __future__ import annotations

import json
from typing import Any

#: The figures of a run in its row, the one that orders the rows first.
COLUMNS = ("bpb", "parameters", "bytes", "seconds")
#: The curve of the first chart.
CURVE = "val/bpb"
_KEY = "comparison"
_NAME = "Comparison"
#: Height of a chart in pixels, so that two rows of charts fit a screen.
_HEIGHT = 240
#: The tag of the view. A view that people have edited stays, so a view with other content needs another key.
TAG = f"mlflow.sharedViewState.{_KEY}"
#: MLflow opens its pages for language-model applications by default; these are the pages for trainings.
_MODE = "workflowType=machine_learning"


def opening(experiment: str | None, *, charts: bool = True) -> str:
    """Return what follows the address of a server to open the comparison.

    Args:
        experiment: the id of the experiment; None leads to the list of experiments.
        charts: show the charts beside the names of the runs, or else the table of the runs.
    """
    if experiment is None:
        return f"/#/experiments?{_MODE}"
    shown = "CHART" if charts else "TABLE"
    return f"/#/experiments/{experiment}/runs?viewStateShareKey={_KEY}&compareRunsMode={shown}&{_MODE}"


def comparison(created: int) -> str:
    """Return the value of the tag `TAG`; ``created`` is the time of the view in milliseconds."""
    curve = _chart("LINE", CURVE) | {
        "selectedMetricKeys": [CURVE],
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
    columns = [f"metrics.`{name}`" for name in COLUMNS]
    state = {
        "orderByKey": columns[0],
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
        "compareRunCharts": [curve, *(_chart("BAR", name) for name in COLUMNS)],
        "compareRunSections": [{"uuid": _KEY, "name": _NAME, "display": True, "cardHeight": _HEIGHT}],
        "isAccordionReordered": True,  # this section stays the first; MLflow appends those of other metrics
    }
    view = {"name": _NAME, "createdAt": created, "updatedAt": created, "state": json.dumps(state)}
    return json.dumps(view)


def _chart(kind: str, metric: str) -> dict[str, Any]:
    return {
        "uuid": metric,
        "type": kind,
        "metricKey": metric,
        "metricSectionId": _KEY,
        "runsCountToCompare": 10,
    }
