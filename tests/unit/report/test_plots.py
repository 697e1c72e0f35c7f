import itertools
import subprocess
import sys

import numpy as np
import pytest

from spider.report.plots import Curve, _spread, plot_bpb, plot_loss, smoothed


def curve(run="demo", stage="main", begin=0.0, n=50):
    x = begin + np.linspace(0, 1e6, n)
    return Curve(run, stage, begin, begin + 1e6, x, 2 + 3 * np.exp(-x / 4e5), 2.2)


def pixels(path):
    from matplotlib.image import imread

    return imread(path)


GROUP = {
    "run": "demo",
    "stages": [("warmup", 3.0), ("main", 2.2)],
    "compressors": {"zlib": 2.7, "bz2": 2.31, "xz": 2.39, "zstd": 2.41},
}


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_loss([curve(), curve(stage="anneal", begin=1e6)], path),
        lambda path: plot_loss([curve(), curve(run="wide")], path),
        lambda path: plot_loss([curve(n=1)], path),
        lambda path: plot_bpb([GROUP], path),
        lambda path: plot_bpb([GROUP, {**GROUP, "run": "wide", "compressors": {"xz": 2.0}}], path),
        lambda path: plot_bpb([{**GROUP, "stages": [("only", 2.2)]}], path),
    ],
    ids=["stages", "runs", "one point", "bpb", "two texts", "one stage"],
)
def test_figures_are_drawn_with_colour_on_white(draw, tmp_path):
    draw(tmp_path / "figure.png")
    image = pixels(tmp_path / "figure.png")
    assert image.shape[0] > 500 and image.shape[1] > 900
    coloured = np.ptp(image[..., :3], axis=2) > 0.3
    assert 0.0005 < coloured.mean() < 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]


def test_a_run_that_logged_nothing_still_gives_a_figure(tmp_path):
    plot_loss([Curve("demo", "main", 0, 100, np.array([]), np.array([]))], tmp_path / "empty.png")
    assert pixels(tmp_path / "empty.png").min() < 0.5  # the axes and the sentence that says so


def test_labels_are_moved_apart_and_stay_in_order():
    placed = _spread([1.0, 1.01, 1.02, 5.0], gap=0.5)
    assert placed[3] == 5.0
    assert all(b - a >= 0.5 - 1e-6 for a, b in itertools.pairwise(placed))
    assert np.mean(placed[:3]) == pytest.approx(1.01)


def test_smoothing_neither_lags_nor_shifts_the_ends():
    line = np.linspace(5, 2, 200)
    np.testing.assert_allclose(smoothed(line), line)
    noisy = line + np.random.default_rng(0).normal(0, 0.2, 200)
    assert np.abs(smoothed(noisy) - line)[10:-10].max() < 0.3 < np.abs(noisy - line).max()


def test_importing_the_report_pulls_in_neither_torch_nor_matplotlib():
    code = (
        "import sys, spider.report.compare, spider.report.screen;"
        "print([m for m in ('torch', 'matplotlib', 'mlflow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
