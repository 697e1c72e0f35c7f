from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from spider.report.inside_plots import plot_inside, plot_loops

LOOPS = {"bpb": [2.4, 2.1, 2.05, 2.06], "trained": 2, "bytes": 10_000}
INSIDE = {
    "patch_bytes": [0, 90, 200, 150, 60, *[3] * 40],
    "halting_loops": [0, 300, 800, 100],
    "expert_share": [[[1.2, 0.8], [0.3, 1.7]], [[1.0, 1.0], [2.0, 0.0]]],
}
OFF = dict.fromkeys(INSIDE)
LARGE = INSIDE | {"expert_share": np.random.default_rng(0).dirichlet(np.ones(32), (6, 6)) * 32}


def coloured(path) -> float:
    image = imread(path)
    assert image.shape[0] > 500 and image.shape[1] > 1000
    return float((np.ptp(image[..., :3], axis=2) > 0.3).mean())


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_loops(LOOPS, path, "title"),
        lambda path: plot_loops(LOOPS | {"bpb": [2.1] * 12, "trained": 6}, path, "title"),
        lambda path: plot_loops(LOOPS | {"bpb": [2.1, 2.0], "trained": 1}, path, "title"),
        lambda path: plot_inside(INSIDE, path, "title"),
        lambda path: plot_inside(LARGE, path, "title"),
        lambda path: plot_inside(OFF | {"patch_bytes": [0, 0, 0, 0, 7]}, path, "title"),
        lambda path: plot_inside(OFF | {"expert_share": [[[1.5, 0.5]]]}, path, "title"),
    ],
    ids=["loops", "twelve loops", "one loop", "inside", "large", "fixed patches", "experts alone"],
)
def test_figures_are_drawn_with_colour_on_white(draw, tmp_path):
    draw(tmp_path / "figure.png")
    assert 0.0005 < coloured(tmp_path / "figure.png") < 0.5
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]


def test_what_is_switched_off_says_so_in_grey(tmp_path):
    plot_loops(None, tmp_path / "loops.png", "title")
    plot_inside(OFF, tmp_path / "inside.png", "title")
    plot_inside(OFF | {"patch_bytes": [], "halting_loops": []}, tmp_path / "none.png", "title")
    for name in ("loops", "inside", "none"):
        assert coloured(tmp_path / f"{name}.png") == 0
        assert imread(tmp_path / f"{name}.png")[100:, :, :3].min() < 0.5  # the sentences


def test_each_part_has_a_panel_of_its_own(tmp_path):
    centres = []
    for part, values in INSIDE.items():
        plot_inside(OFF | {part: values}, tmp_path / "figure.png", "title")
        colour = np.ptp(imread(tmp_path / "figure.png")[..., :3], axis=2) > 0.3
        centres.append(np.nonzero(colour)[1].mean() / colour.shape[1])
    patches, halting, experts = centres
    assert patches < 0.35 < halting < 0.65 < experts
